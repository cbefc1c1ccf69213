"""In which format a job's checkpoints are written: that of the optimizer that its command line asks for.

A job that has `--use-distributed-optimizer` goes back to stock Megatron with that flag, which reads the distributed
optimizer's formats only. HyperFSDP switches the flag off, since nothing else of it is needed, and announces it again
while a checkpoint is being written. Importing this module imports neither Megatron nor torch.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager

ATTRIBUTE = "hyperfsdp_saves_for_distributed_optimizer"
"""On Megatron's namespace: whether checkpoints have the distributed optimizer's format."""

_RESHARDABLE = "dist_ckpt_optim_fully_reshardable"
_PARALLEL = "ckpt_fully_parallel_save"
_SWITCHES = {_RESHARDABLE: "fully_reshardable", _PARALLEL: "fully_sharded_model_space"}
"""What Megatron chooses a format by: the argument of newer releases, or else that of 0.12; and the format then."""


def decide(args: argparse.Namespace) -> list[str]:
    """Note on the namespace what the command line asks for, before the flags are switched off. Returns lines to print.

    The format is that of Adam.
    """
    wanted = bool(getattr(args, "use_distributed_optimizer", False))
    switch = _switch(args)
    if getattr(args, "optimizer", "adam") != "adam" or getattr(args, "use_hypermuon", False):
        switch = None
    setattr(args, ATTRIBUTE, wanted and switch is not None)
    if not wanted:
        return []
    line = "checkpoints have the format of a job without --use-distributed-optimizer, which stock Megatron then loads."
    if switch is not None:
        line = (
            f"checkpoints have the distributed optimizer's format {_SWITCHES[switch]}: stock Megatron loads them with "
            "--use-distributed-optimizer; for stock Megatron without it, drop the flag here too."
        )
    return [line]


@contextmanager
def announced(args: argparse.Namespace) -> Iterator[None]:
    """Within it the namespace says what format is written, as Megatron's code for saving expects it."""
    if not getattr(args, ATTRIBUTE, False):
        yield
        return
    names = ("use_distributed_optimizer", _switch(args) or "")
    before = {name: getattr(args, name) for name in names}
    vars(args).update(dict.fromkeys(names, True))
    try:
        yield
    finally:
        vars(args).update(before)


def _switch(args: argparse.Namespace) -> str | None:
    return next((name for name in _SWITCHES if hasattr(args, name)), None)
