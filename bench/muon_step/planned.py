"""What the exchange plan promises, without running it: bytes against the least possible, and how even the work is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed.tensor import Replicate, Shard

from hp_plugin.core.layout import Layout
from hp_plugin.core.muon.blocks import MatrixView, whole
from hp_plugin.core.muon.coefficients import resolve_coefficients
from hp_plugin.core.muon.distribution import Distribution
from hp_plugin.core.muon.newton_schulz import NewtonSchulz
from hp_plugin.core.muon.plan import ExchangePlan, MatrixParameter, make_plan

Shape = tuple[int, ...]
"""(rows, columns), or (experts, rows, columns) of a stack that is sharded by expert."""

FEWEST_MATRICES = 8
"""Of each rank, for its share of the work to be judged: a few matrices of different shapes cannot be divided evenly."""


@dataclass(frozen=True)
class ShapeSet:
    """The matrices of a model, and the shards x replicas over which they are planned.

    Attributes:
        name: of the set.
        shapes: of its parameters.
        meshes: (shards, replicas).
    """

    name: str
    shapes: tuple[Shape, ...]
    meshes: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Planned:
    """Figures of one plan.

    Attributes:
        name: of the set of shapes.
        shards, replicas: of the mesh.
        matrices_per_rank: mean.
        bytes_vs_lower_bound: received by all ranks together, over `least_received`; None where experts lie whole on
            one rank of each replica: the bound is of matrices whose shards are on all ranks.
        flops_imbalance: largest load of a rank over the mean.
    """

    name: str
    shards: int
    replicas: int
    matrices_per_rank: float
    bytes_vs_lower_bound: float | None
    flops_imbalance: float


def gpt_shapes(*, layers: int, dim: int) -> tuple[Shape, ...]:
    """Fused QKV, output, and an MLP of four times the width."""
    return ((3 * dim, dim), (dim, dim), (4 * dim, dim), (dim, 4 * dim)) * layers


def moe_shapes(*, layers: int, dim: int, experts: int, expert_dim: int) -> tuple[Shape, ...]:
    """Attention with four query heads to each key and value, a shared expert, and a stack of routed ones."""
    attention = ((dim, dim), (dim // 4, dim), (dim // 4, dim), (dim, dim))
    shared = ((2 * expert_dim, dim), (dim, expert_dim))
    routed = ((experts, 2 * expert_dim, dim), (experts, dim, expert_dim))
    return (*attention, *shared, *routed) * layers


SETS = (
    ShapeSet(
        "gpt",
        gpt_shapes(layers=32, dim=1024),
        ((1, 4), (4, 1), (2, 2), (3, 2), (2, 3), (4, 2), (8, 1), (8, 2), (4, 4)),
    ),
    ShapeSet("moe", moe_shapes(layers=8, dim=2048, experts=64, expert_dim=1408), ((4, 1), (2, 2), (8, 2), (16, 2))),
)


def planned_figures(sets: Sequence[ShapeSet] = SETS, *, steps: int = 5) -> list[Planned]:
    """The figures of every set on every one of its meshes.

    Args:
        sets: to plan.
        steps: of Newton-Schulz, as in the benchmark.
    """
    return [_figures(each, shards, replicas, steps=steps) for each in sets for shards, replicas in each.meshes]


def least_received(elements: int, *, shards: int, replicas: int) -> float:
    """Elements that all ranks together must receive where each matrix is orthogonalized once, by one rank.

    Storage is F even shards, R times over. The owner of a matrix of S elements receives the (F-1)/F of it that it does
    not store. Each of the F R ranks receives its S/F of the update, but the owner, which computes it.

    Args:
        elements: of all matrices, S summed.
        shards: F.
        replicas: R.
    """
    return elements * ((shards - 1) / shards + replicas - 1 / shards)


def _figures(shapes: ShapeSet, shards: int, replicas: int, *, steps: int) -> Planned:
    plan = plan_of(shapes.shapes, shards=shards, replicas=replicas, steps=steps)
    matrices = sum(len(parameter.blocks) for parameter in plan.parameters)
    spread = all(len(shape) == 2 for shape in shapes.shapes)
    received = sum(sum(plan.received_elements(rank)) for rank in range(shards * replicas))
    elements = sum(shape[0] * shape[1] for shape in shapes.shapes)
    return Planned(
        name=shapes.name,
        shards=shards,
        replicas=replicas,
        matrices_per_rank=matrices / (shards * replicas),
        bytes_vs_lower_bound=(
            received / least_received(elements, shards=shards, replicas=replicas) if spread else None
        ),
        flops_imbalance=plan.flops_imbalance,
    )


def plan_of(shapes: Sequence[Shape], *, shards: int, replicas: int, steps: int) -> ExchangePlan:
    """The plan for parameters that are sharded along their first dim, as by `fully_shard`; rank 0 speaks for all."""
    newton_schulz = NewtonSchulz(resolve_coefficients("classic", steps))
    parameters = []
    for index, shape in enumerate(shapes):
        layout = Layout(shape, ("dp_replicate", "dp_shard"), (replicas, shards), (Replicate(), Shard(0)))
        view = MatrixView.of(shape, "stack" if len(shape) == 3 else "matrix")
        distribution = Distribution(layout, tuple(range(shards * replicas)))
        parameters.append(MatrixParameter(str(index), view, whole(view), distribution, newton_schulz, "a2a"))
    return make_plan(parameters, 0)
