"""Model weights in Megatron's `torch_dist` checkpoints: stock reads what we write, and we read what stock writes.

Megatron calls `sharded_state_dict` on the bare model, after it has taken the data-parallel wrapper off. The wrapper
therefore puts :func:`sharded_state_dict` on the model object itself. It runs the model's own method over stand-ins of
the full parameters, so that names, tensor- and pipeline-parallel offsets, padding rules and fused layouts are
Megatron's, and cuts the result to the rows that this rank holds (see `slices`).

Loading delivers plain local tensors, some of them already in place. :func:`load_state_dict` puts them into the shards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from hp_plugin.core.layout import local_tensor
from hp_plugin.errors import UnsupportedError
from hp_plugin.megatron.checkpoints.slices import (
    HeldRows,
    Template,
    assemble,
    cut,
    stand_in,
    storage_key,
    whole_template,
)

_SOURCE = "_hyperfsdp_source"


@dataclass(frozen=True)
class Source:
    """Where an entry of a sharded state dict came from; the optimizer finds its parameters by it.

    Attributes:
        parameter: The sharded parameter.
        template: Megatron's description of the whole parameter.
        held: The rows that this rank holds.
    """

    parameter: torch.nn.Parameter
    template: Template
    held: HeldRows


def sharded_state_dict(
    module: torch.nn.Module,
    prefix: str = "",
    sharded_offsets: Sequence[tuple[int, int, int]] = (),
    metadata: dict[str, Any] | None = None,
    *,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """What `module.sharded_state_dict(...)` would return without data parallelism, for the rows of this rank.

    No communication. Entries that are not parameters (buffers, extra states) are left as Megatron made them.

    Args:
        module: The model inside all wrappers; its class defines `sharded_state_dict`.
        prefix: As in Megatron.
        sharded_offsets: As in Megatron.
        metadata: As in Megatron.
        dtype: Dtype in which weights are saved: the compute dtype, as stock saves them. Shards of another dtype
            are copied; the fp32 masters are part of the optimizer's state.

    Raises:
        UnsupportedError: A parameter is saved in a form that does not consist of whole rows.
    """
    with _stand_ins(module, dtype) as standing:
        described = type(module).sharded_state_dict(  # type: ignore[attr-defined]
            module, prefix=prefix, sharded_offsets=sharded_offsets, metadata=metadata
        )

    def replace(entry: Any) -> Any:
        data = entry.data if isinstance(entry, (ShardedTensor, ShardedTensorFactory)) else None
        if not isinstance(data, torch.Tensor) or not data.is_meta:
            return entry
        parameter = standing.get(storage_key(data))
        if parameter is None:
            raise UnsupportedError(
                f"the model saves {entry.key} as a new tensor made from a parameter; only parameters and parts made of "
                "whole rows can be saved from shards."
            )
        return _cut_parameter(entry, parameter, dtype)

    dict_list_map_inplace(replace, described)
    return described


def sources(model_sharded_state_dict: Mapping[str, Any]) -> dict[int, Source]:
    """The sources of all parameters in a state dict of model chunks, by `id` of the parameter."""
    found: dict[int, Source] = {}
    for entry in nested_values(dict(model_sharded_state_dict)):
        source = getattr(entry, _SOURCE, None)
        if source is not None:
            found.setdefault(id(source.parameter), source)
    return found


@torch.no_grad()
def load_state_dict(module: torch.nn.Module, state_dict: Mapping[str, Any], *, strict: bool = True) -> Any:
    """Write a loaded state dict into the shards, buffers and extra states of `module`.

    No communication. Every rank calls with its own values.

    Args:
        module: The model inside all wrappers.
        state_dict: By name: for a parameter the rows of this rank, possibly with axes of size 1 in front, or a DTensor
            with the parameter's layout, or the full tensor; everything else as `torch.nn.Module` takes it.
        strict: Whether missing and unexpected names are an error.

    Returns:
        The named tuple of `torch.nn.Module.load_state_dict`: missing keys, unexpected keys.

    Raises:
        RuntimeError: A shape does not fit, or `strict` and the names differ.
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))
    others = {name: value for name, value in state_dict.items() if name not in parameters}
    for name, value in state_dict.items():
        if name in parameters:
            write_into(parameters[name], value, name)
    result = torch.nn.Module.load_state_dict(module, others, strict=False)
    missing = [name for name in result.missing_keys if name not in state_dict]
    unexpected = list(result.unexpected_keys)
    if strict and (missing or unexpected):
        raise RuntimeError(
            f"the checkpoint does not fit the model: missing {missing or 'nothing'}, unexpected "
            f"{unexpected or 'nothing'}. Check that model arguments equal those of the run that saved it."
        )
    result.missing_keys[:] = missing
    return result


@torch.no_grad()
def write_into(target: torch.Tensor, value: torch.Tensor, name: str) -> None:
    """Copy `value` into the local part of `target`; see :func:`load_state_dict` for the accepted shapes.

    Raises:
        RuntimeError: The shape of `value` is neither that of the local part nor that of the whole.
    """
    local, value = local_tensor(target), local_tensor(value)
    if value.numel() == local.numel():
        value = assemble(value, local.shape)
    elif tuple(value.shape) == tuple(target.shape):
        rows = [value.narrow(0, segment.start, segment.length) for segment in HeldRows.of(target).segments]
        value = torch.cat(rows) if rows else value[:0]
    else:
        raise RuntimeError(
            f"{name}: the checkpoint holds shape {tuple(value.shape)}, but this rank holds {tuple(local.shape)} of "
            f"{tuple(target.shape)}."
        )
    local.copy_(value)


@contextmanager
def _stand_ins(module: torch.nn.Module, dtype: torch.dtype) -> Iterator[dict[int, torch.nn.Parameter]]:
    """Within it, every parameter of `module` is its stand-in. Gives the parameters by storage key of the stand-in."""
    by_parameter: dict[int, torch.nn.Parameter] = {}
    by_storage: dict[int, torch.nn.Parameter] = {}
    undo: list[tuple[torch.nn.Module, str, torch.nn.Parameter]] = []
    try:
        for owner in module.modules():
            for name, parameter in list(owner._parameters.items()):
                if parameter is None:
                    continue
                if id(parameter) not in by_parameter:
                    by_parameter[id(parameter)] = stand_in(parameter, dtype)
                standing = by_parameter[id(parameter)]
                by_storage[storage_key(standing)] = parameter
                undo.append((owner, name, parameter))
                owner._parameters[name] = standing
        yield by_storage
    finally:
        for owner, name, parameter in undo:
            owner._parameters[name] = parameter


def _cut_parameter(template: Template, parameter: torch.nn.Parameter, dtype: torch.dtype) -> Any:
    held = HeldRows.of(parameter)
    if not whole_template(template, held):
        raise UnsupportedError(
            f"the model splits the parameter of shape {held.shape} before saving a part of it as {template.key}; "
            "the adapter can save whole parameters and those that Megatron splits through a ShardedTensorFactory."
        )
    entry = cut(template, held, local_tensor(parameter).detach().to(dtype))
    setattr(entry, _SOURCE, Source(parameter, template, held))
    return entry
