"""What a `torch_dist` checkpoint has of `HyperMuon`, and what becomes of the state of another optimizer.

Every tensor has the key of its weight: `optimizer.state.momentum_buffer.<weight>` for Muon's parameters,
`optimizer.state.exp_avg.<weight>` and `exp_avg_sq` for AdamW's, as stock Megatron's own Muon writes them. Who owns a
matrix is not part of it, so a checkpoint is read for any layout.

Which optimizer wrote a checkpoint is told by the arguments of the job that saved, which Megatron keeps in it. Options
of parameter groups are those of the command line, never those of a checkpoint: Megatron's scheduler sets learning rate
and weight decay by them in every step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from hp_plugin.core.layout import local_tensor
from hp_plugin.core.muon import HyperMuon
from hp_plugin.core.muon.state import load_into
from hp_plugin.errors import ConfigurationError, UnsupportedError
from hp_plugin.megatron import reporting
from hp_plugin.megatron.checkpoints import distributed_format
from hp_plugin.megatron.checkpoints.distributed_format import SAVER, format_of
from hp_plugin.megatron.checkpoints.opened import forget_opened

Origin = Literal["muon", "adam"]

_MOMENTUM, _FIRST_MOMENT = "momentum_buffer", "exp_avg"
_ROUTES = ("hypermuon_include", "hypermuon_exclude")


def origin_of(metadata: Mapping[str, Any] | None, options: Any) -> Origin:
    """Which optimizer wrote a checkpoint; that of this job if nothing tells.

    Args:
        metadata: Of the checkpoint, with the arguments of the job that saved.
        options: Of Muon here.

    Raises:
        UnsupportedError: An optimizer whose state Muon cannot start from.
        ConfigurationError: Muon trained other parameters there.
    """
    saver = (metadata or {}).get(SAVER)
    if saver is None:
        return "muon" if format_of(dict(metadata or {})) is None else "adam"
    if "muon" in saver.optimizer:
        return "muon"
    if getattr(saver, "use_hypermuon", False):
        for name in _ROUTES:
            there, here = getattr(saver, name, None), getattr(options, name.removeprefix("hypermuon_"))
            if there != here:
                raise ConfigurationError(
                    f"--{name.replace('_', '-')} is {here} here and was {there} in the job that saved the checkpoint, "
                    "so parameters have the states of another optimizer: give it the same value, or load weights alone "
                    "with --no-load-optim."
                )
        return "muon"
    if saver.optimizer != "adam":
        raise UnsupportedError(
            f"the checkpoint was saved with --optimizer {saver.optimizer}, from whose state Muon and AdamW cannot "
            "start; load weights alone with --no-load-optim."
        )
    return "adam"


def refuse_muon(metadata: Mapping[str, Any] | None) -> None:
    """Refuse the state of a checkpoint of Muon to an optimizer that is none.

    Raises:
        UnsupportedError: It was saved with Muon.
    """
    saver = (metadata or {}).get(SAVER)
    if saver is not None and (getattr(saver, "use_hypermuon", False) or "muon" in saver.optimizer):
        raise UnsupportedError(
            "the checkpoint was saved with Muon, which keeps no second moments of the matrices that it trains, so Adam "
            "cannot go on from it: go on with --use-hypermuon, or load weights alone with --no-load-optim and "
            "--override-opt_param-scheduler."
        )


def refuse_flat_states(metadata: Mapping[str, Any] | None) -> None:
    """Refuse the distributed optimizer's formats, which Megatron's optimizers without sharding do not read.

    Raises:
        UnsupportedError: The checkpoint is in one of them.
    """
    name = format_of(dict(metadata or {}))
    if name is not None:
        raise UnsupportedError(
            f"the optimizer state is in the distributed optimizer's format {name}, which --use-hypermuon reads with "
            "--use-hyperfsdp only: add the flag, or load weights alone with --no-load-optim."
        )


@contextmanager
def whole_momentum(muon: HyperMuon, *, is_loading: bool) -> Iterator[None]:
    """Within it all replicas have the momentum that one of them keeps; after loading, until the next step.

    Every rank must enter. What was described within keeps the copies alive that are dropped at the end.
    """
    muon.share_momentum()
    try:
        yield
    finally:
        if is_loading:
            muon.plan_again()
        else:
            muon.drop_momentum()


def describe(owner: Any, described: dict[str, Any], metadata: Mapping[str, Any] | None, *, is_loading: bool) -> None:
    """Change the description of an optimizer's state, in place, to what Muon writes or finds.

    Args:
        owner: The optimizer; what it starts from is noted on it until the state has been loaded.
        described: As Megatron's optimizers or `checkpoints.optimizer_state` make it.
        metadata: Of the checkpoint.
        is_loading: Whether a checkpoint is to be read.

    Raises:
        As `origin_of`.
    """
    if is_loading:
        owner.starts_from = origin_of(metadata, owner.muon_options)
    if is_loading and distributed_format.is_distributed(described):
        return  # described with Adam's names already; options are not read from it
    inner = described.get("optimizer", described)
    for group in inner.get("param_groups", ()):
        group.pop("param_names", None)  # of this pipeline stage; groups are the same on all ranks
    if is_loading:
        # Options come from the command line, and Adam has fewer groups: Megatron would merge two lists of one length.
        inner.pop("param_groups", None)
    if is_loading and owner.starts_from == "adam":
        for values in inner.get("state", {}).values():
            entry = values.get(_MOMENTUM) if isinstance(values, dict) else None
            if isinstance(entry, (ShardedTensor, ShardedTensorFactory)):
                entry.key = entry.key.replace(f".{_MOMENTUM}.", f".{_FIRST_MOMENT}.", 1)


@torch.no_grad()
def load_inner(owner: Any, inner: Mapping[str, Any]) -> None:
    """Take over a loaded state of stock's optimizers. No communication.

    Args:
        owner: The optimizer.
        inner: `state` by index, `common_step` in it or `step` in a group, and `param_groups`.
    """
    muon, state = owner.optimizer, inner["state"]
    steps = [group["step"] for group in inner["param_groups"] if group.get("step") is not None]
    step = state.get("common_step", max(steps) if steps else None)
    index = 0
    for group in muon.param_groups:
        for master in group["params"]:
            values = dict(state.get(index, {}))
            if group["algorithm"] == "adamw" and step is not None:
                values["step"] = torch.as_tensor(step)
            else:
                values.pop("step", None)
            load_into(muon.state[master], values, shape=tuple(master.shape))
            index += 1
    muon.plan_again()


@torch.no_grad()
def finish_loading(owner: Any) -> None:
    """After the state has been read: the momentum of a job that starts from Adam, and what is said of it."""
    forget_opened()
    if getattr(owner, "starts_from", "muon") != "adam":
        return
    matrices = [p for g in owner.optimizer.param_groups if g["algorithm"] == "muon" for p in g["params"]]
    if owner.muon_options.start_from == "fresh":
        for parameter in matrices:
            local_tensor(owner.optimizer.state[parameter][_MOMENTUM]).zero_()
        reporting.say("the checkpoint was saved with Adam: the momentum of Muon's matrices starts at zero.")
    else:
        reporting.say("the checkpoint was saved with Adam: the momentum of Muon's matrices is Adam's first moment.")
    owner.starts_from = "muon"
