"""In which format a job's checkpoints are written: that of the optimizer that its command line asks for.

A job that has `--use-distributed-optimizer` goes back to stock Megatron with that flag, which reads the distributed
optimizer's format only. HyperFSDP switches the flag off, since nothing else of it is needed, and announces it again
while a checkpoint is being written. Importing this module imports neither Megatron nor torch.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager

ATTRIBUTE = "hyperfsdp_saves_for_distributed_optimizer"
"""On Megatron's namespace: whether checkpoints have the distributed optimizer's format."""

_RESHARDABLE = "dist_ckpt_optim_fully_reshardable"


def decide(args: argparse.Namespace) -> list[str]:
    """Note on the namespace what the command line asks for, before the flags are switched off. Returns lines to print.

    The format is that of Adam, and of releases that have `--dist-ckpt-optim-fully-reshardable`.
    """
    wanted = bool(getattr(args, "use_distributed_optimizer", False))
    possible = (
        hasattr(args, _RESHARDABLE)
        and getattr(args, "optimizer", "adam") == "adam"
        and not getattr(args, "use_hypermuon", False)
    )
    setattr(args, ATTRIBUTE, wanted and possible)
    if not wanted:
        return []
    line = "checkpoints have the format of a job without --use-distributed-optimizer, which stock Megatron then loads."
    if possible:
        line = (
            "checkpoints have the distributed optimizer's format fully_reshardable: stock Megatron loads them with "
            "--use-distributed-optimizer; for stock Megatron without it, drop the flag here too."
        )
    return [line]


@contextmanager
def announced(args: argparse.Namespace) -> Iterator[None]:
    """Within it the namespace says what format is written, as Megatron's code for saving expects it."""
    if not getattr(args, ATTRIBUTE, False):
        yield
        return
    before = (args.use_distributed_optimizer, args.dist_ckpt_optim_fully_reshardable)
    args.use_distributed_optimizer = args.dist_ckpt_optim_fully_reshardable = True
    try:
        yield
    finally:
        args.use_distributed_optimizer, args.dist_ckpt_optim_fully_reshardable = before
