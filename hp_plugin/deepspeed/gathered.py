"""`deepspeed.zero.GatheredParameters` for parameters of HyperFSDP.

Inside the context a parameter is its full, plain value, under every name and reference that a caller holds. With
`modifier_rank` the value of that rank is written into the shards of all at the end; without, changes are dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.zero.partition_parameters import GatheredParameters
from torch import nn

from hp_plugin.deepspeed import access
from hp_plugin.errors import ConfigurationError, UnsupportedError


class _Gathered:
    """The parameters of ours in one context.

    Args:
        parameters: Sharded parameters, each once.
        modifier_rank: Rank of the data-parallel group whose values count at the end, for an expert's parameter of the
            ranks that hold the same expert; None drops changes.
        fwd_module: The module in whose forward they are used, where a caller names it.
    """

    def __init__(self, parameters: list[nn.Parameter], modifier_rank: int | None, fwd_module: Any) -> None:
        if fwd_module is not None and torch.is_grad_enabled():
            raise UnsupportedError(
                "GatheredParameters(..., fwd_module=...) uses a weight in the forward of another unit, from where no "
                'gradient would reach its shards; put both modules into one unit with "hyperfsdp.units".'
            )
        shown = [p for p in parameters if access.is_shown_full(p)]
        if shown and modifier_rank is not None:
            raise ConfigurationError(
                f"{len(shown)} parameters are gathered by an outer GatheredParameters already; give "
                "modifier_rank there."
            )
        self._parameters = [p for p in parameters if not access.is_shown_full(p)]
        self._modifier_rank = modifier_rank

    def enter(self) -> None:
        """Gathers. Every rank must call."""
        for parameter in self._parameters:
            access.show_full(parameter)

    def leave(self) -> None:
        """Writes back, where there is a modifier, and shows the shards again. Every rank must call."""
        for parameter in self._parameters:
            full = access.show_shard(parameter)
            if self._modifier_rank is not None:
                engine = access.engine_of(parameter)
                experts = engine.experts.group_of(parameter)
                group = engine.seq_data_parallel_group if experts is None else experts.data_parallel
                dist.broadcast(full, dist.get_global_rank(group, self._modifier_rank), group=group)
                access.write_full(parameter, full)


def install() -> Callable[[], None]:
    """Extends the class in place, however a job has imported it; returns what undoes it."""
    init, enter, leave = GatheredParameters.__init__, GatheredParameters.__enter__, GatheredParameters.__exit__

    def __init__(
        self: Any, params: Any, modifier_rank: int | None = None, fwd_module: Any = None, enabled: bool = True
    ) -> None:
        ours, others = _split(params) if enabled else ([], params)
        self.hyperfsdp = _Gathered(ours, modifier_rank, fwd_module) if ours else None
        init(
            self,
            others,
            modifier_rank=modifier_rank,
            fwd_module=fwd_module,
            enabled=enabled and not (ours and not others),
        )

    def __enter__(self: Any) -> Any:
        if self.hyperfsdp is not None:
            self.hyperfsdp.enter()
        return enter(self)

    def __exit__(self: Any, *error: Any) -> Any:
        result = leave(self, *error)
        if self.hyperfsdp is not None:
            self.hyperfsdp.leave()
        return result

    GatheredParameters.__init__, GatheredParameters.__enter__, GatheredParameters.__exit__ = (
        __init__,
        __enter__,
        __exit__,
    )

    def undo() -> None:
        GatheredParameters.__init__, GatheredParameters.__enter__, GatheredParameters.__exit__ = init, enter, leave

    return undo


def _split(params: Any) -> tuple[list[Any], Any]:
    """Ours, each once, and the rest as the original takes them."""
    if isinstance(params, torch.Tensor) or not isinstance(params, Iterable):
        return ([params], []) if access.is_ours(params) else ([], params)
    given = list(params)
    ours = list({id(p): p for p in given if access.is_ours(p)}.values())
    return ours, [p for p in given if not access.is_ours(p)]
