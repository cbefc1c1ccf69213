"""torch FSDP2: as it comes, tuned, and the strongest recipe for two tiers that can be built from its public hooks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from bench.fsdp_step.model import Transformer
from bench.fsdp_step.settings import Options
from bench.fsdp_step.variant import Context, Variant, take_options

TUNING: dict[str, Any] = {
    "reshard_after_forward": True,
    "own_units": False,  # embedding and head are units of their own
    "reduce_scatter_buffers": None,  # set_reduce_scatter_max_input_buffers
    "separate_reduce_scatter_group": False,
    "prefetch": 1,  # units gathered ahead; 1 is what FSDP2 does by itself
}


class FSDP2(Variant):
    """FSDP2 over `mesh`: 2-D for its own two-tier mode, 1-D for sharding inside the supernode alone."""

    def __init__(self, context: Context, mesh: DeviceMesh, options: Options) -> None:
        model = context.model()
        reshard = options["reshard_after_forward"]
        wrapped = model.units if options["own_units"] else list(model.blocks)
        for unit in wrapped:
            fully_shard(unit, mesh=mesh, reshard_after_forward=reshard)
        if reshard is False:
            fully_shard(model, mesh=mesh, reshard_after_forward=False)
        else:
            fully_shard(model, mesh=mesh)
        self.module, self.units = model, wrapped
        _tune(model, wrapped, options)
        self.optimizer = context.adamw(model.parameters())
        self.norm_group = context.shard_group
        self._options = options

    def local_gradients(self) -> list[torch.Tensor]:
        """The shards."""
        gradients = [p.grad for p in self.module.parameters()]
        return [gradient.to_local() for gradient in gradients if isinstance(gradient, DTensor)]

    def facts(self) -> dict[str, Any]:
        """Options, and whether FSDP2 reduces on a group of its own."""
        return {**self._options, "units": len(self.units), "reduce_scatter_group_is_separate": _is_separate(self.units)}


class HookedFSDP2(FSDP2):
    """1-D FSDP2 inside the supernode, and an all-reduce between supernodes in its hook, without waiting there.

    The hook's tensor becomes `.grad` without a copy (fp32 throughout), so waiting before the optimizer is enough.
    """

    def __init__(self, context: Context, options: Options) -> None:
        super().__init__(context, context.mesh["dp_shard"], options)
        self._works: list[Any] = []
        self.reductions = 0
        group, replicas = context.inter_group, context.replicas

        def reduce(gradient: torch.Tensor) -> None:
            self.reductions += 1
            self._works.append(dist.all_reduce(gradient.div_(replicas), group=group, async_op=True))

        # `units` holds the root too where it has parameters; a unit without parameters never calls the hook.
        for unit in [*self.units, self.module]:
            assert isinstance(unit, FSDPModule)
            unit.set_all_reduce_hook(reduce)

    def backward(self, loss: torch.Tensor) -> None:
        """Backward, then a wait for every reduction between supernodes."""
        super().backward(loss)
        for work in self._works:
            work.wait()
        self._works.clear()

    def facts(self) -> dict[str, Any]:
        """As FSDP2's, and how often the hook has run."""
        return {**super().facts(), "hook_calls": self.reductions}


def build_fsdp2(context: Context, options: Options) -> Variant:
    """FSDP2 on the 2-D mesh with its defaults: blocks and root."""
    take_options("fsdp2", options)
    return FSDP2(context, context.mesh, TUNING)


def build_fsdp2_tuned(context: Context, options: Options) -> Variant:
    """FSDP2 on the 2-D mesh with the options of `TUNING`."""
    return FSDP2(context, context.mesh, take_options("fsdp2_tuned", options, **TUNING))


def build_fsdp2_hook(context: Context, options: Options) -> Variant:
    """The hook recipe, with the options of `TUNING`."""
    return HookedFSDP2(context, take_options("fsdp2_hook", options, **TUNING))


def _tune(model: Transformer, units: list[torch.nn.Module], options: Options) -> None:
    assert isinstance(model, FSDPModule)
    if options["reduce_scatter_buffers"] is not None:
        model.set_reduce_scatter_max_input_buffers(options["reduce_scatter_buffers"])
    if options["separate_reduce_scatter_group"]:
        model.set_separate_reduce_scatter_group()
    depth = options["prefetch"]
    if depth == 1:
        return
    shards: list[FSDPModule] = [unit for unit in units if isinstance(unit, FSDPModule)]
    for position, unit in enumerate(shards):
        unit.set_modules_to_forward_prefetch(shards[position + 1 : position + 1 + depth])
        unit.set_modules_to_backward_prefetch(shards[max(0, position - depth) : position][::-1])


def _is_separate(units: list[torch.nn.Module]) -> bool:
    """Whether reduce-scatters have another group than all-gathers, by FSDP2's own state."""
    group: Any = units[0]._get_fsdp_state()._fsdp_param_group  # type: ignore[operator]
    return group._reduce_scatter_process_group is not group._all_gather_process_group
