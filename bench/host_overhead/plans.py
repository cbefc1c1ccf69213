"""Sharding plans beside tensor parallelism written by hand, torch's DTensor, and one rank's compute alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from bench.host_overhead.handwritten import divide_weights, parallelize_by_hand
from bench.host_overhead.model import Size
from bench.host_overhead.planned_model import Block, Blocks, make_blocks
from hp_plugin.core.dtensor import ShardingPlan, apply_plan, plan_transformer

PlanEngine = Literal["compute", "handwritten", "plan", "dtensor"]
ENGINES: tuple[PlanEngine, ...] = ("compute", "handwritten", "plan", "dtensor")


@dataclass(frozen=True)
class PlanVariant:
    """One way to run the planned model.

    Attributes:
        engine: Who divides it; "compute" has one rank's weights and no collective: the floor.
        sequence: Sequence parallelism: the stream is divided over the sequence between the regions.
    """

    engine: PlanEngine
    sequence: bool = False

    def __str__(self) -> str:
        return f"{self.engine}-tp_{'sequence' if self.sequence else 'whole'}"

    def peer(self, engine: PlanEngine) -> PlanVariant:
        """The variant of `engine` under otherwise equal conditions."""
        return PlanVariant(engine, self.sequence)


def plan_variants() -> list[PlanVariant]:
    """Every engine with and without sequence parallelism, those of one condition side by side."""
    return [PlanVariant(engine, sequence) for sequence in (False, True) for engine in ENGINES]


def build_planned(variant: PlanVariant, mesh: DeviceMesh, size: Size) -> nn.Module:
    """The model of `variant` on the axis `tp` of `mesh`."""
    model = make_blocks(size)
    if variant.engine == "compute":
        return divide_weights(model, mesh.get_local_rank(), mesh.size())
    if variant.engine == "handwritten":
        return parallelize_by_hand(model, mesh.get_group(), sequence_parallel=variant.sequence)
    if variant.engine == "dtensor":
        return _with_dtensors(model, mesh, sequence_parallel=variant.sequence)
    return apply_plan(model, make_plan(model, mesh.size(), sequence_parallel=variant.sequence), mesh)


def make_plan(model: Blocks, ranks: int, *, sequence_parallel: bool) -> ShardingPlan:
    """The planner's plan. A stream that arrives divided is not divided at the first layer."""
    plan = plan_transformer(model, {"tp": ranks}, sequence_parallel=sequence_parallel)
    if not sequence_parallel:
        return plan
    return plan.model_copy(update={"modules": {n: spec for n, spec in plan.modules.items() if n != "layers.0"}})


def _with_dtensors(model: Blocks, mesh: DeviceMesh, *, sequence_parallel: bool) -> Blocks:
    """As torchtitan parallelizes a Llama: torch's styles, local tensors between modules."""
    columns = {name: ColwiseParallel() for name in ("attention.wq", "attention.wk", "attention.wv", "mlp.w1", "mlp.w3")}
    stream = Shard(1) if sequence_parallel else Replicate()
    rows = {name: RowwiseParallel(output_layouts=stream) for name in ("attention.wo", "mlp.w2")}
    # One DTensor for all products of a region; each making its own takes longer.
    enter = PrepareModuleInput(input_layouts=(stream,), desired_input_layouts=(Replicate(),))
    styles: dict[str, ParallelStyle] = {**columns, **rows, "attention": enter, "mlp": enter}
    if sequence_parallel:
        styles |= {name: SequenceParallel() for name in ("attention_norm", "mlp_norm")}
    for layer in model.layers:
        assert isinstance(layer, Block)
        parallelize_module(layer, mesh, styles)
    return model


def make_planned_input(variant: PlanVariant, size: Size, ranks: int) -> torch.Tensor:
    """The stream that enters, or this rank's piece of it. It requires a gradient, as what an embedding gives does."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1, size.tokens, size.dim, generator=generator)
    has_piece = variant.sequence and variant.engine != "compute"
    return (x.chunk(ranks, 1)[0].clone() if has_piece else x).requires_grad_()
