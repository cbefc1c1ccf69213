"""Training with `fully_shard` equals one process, torch FSDP2 and DDP: losses, gradients, norms and weights."""

from __future__ import annotations

import functools

import pytest
import torch

from tests.fsdp.comparison import FLOAT32, Record, assert_same_mixed_training, assert_same_training
from tests.fsdp.conftest import TRANSPORTS
from tests.fsdp.runs import Mesh, Runs, single_record
from tests.fsdp.variants import (
    MESHES,
    Variant,
    ddp,
    every_variant,
    fsdp2,
    fsdp2_runs_on,
    single_process,
    usual_variants,
)

USUAL = [(mesh, variant) for mesh in MESHES for variant in usual_variants(mesh)]
# What torch's back ends are compared on: their own correctness needs no second look at every combination.
WITH_FSDP2 = [
    (mesh, v)
    for mesh, v in USUAL
    if v.reshard and v.units == "blocks" and (v.model == "transformer" or v.mode == "plain") and fsdp2_runs_on(mesh)
]
WITH_DDP = [(mesh, v) for mesh, v in WITH_FSDP2 if not v.mixed and v.mode == "plain" and not v.one_dim]
EVERY = [(mesh, model) for mesh in MESHES for model in ("transformer", "tied", "mlp")]


def name(value: object) -> str:
    return f"{value[0]}x{value[1]}" if isinstance(value, tuple) else str(value)


@functools.cache
def usual_runs(mesh: Mesh, transport: str) -> Runs:
    return Runs(mesh, usual_variants(mesh), transport)


@functools.cache
def runs_of_torch(mesh: Mesh) -> Runs:
    variants = [fsdp2(v, mesh) for m, v in WITH_FSDP2 if m == mesh] + [ddp(v) for m, v in WITH_DDP if m == mesh]
    return Runs(mesh, variants, "c10d")


def on_every_transport(cases: list[tuple[Mesh, Variant]]) -> list[tuple[Mesh, Variant, str]]:
    """Where the shard group has one rank, nothing moves inside a supernode."""
    return [(mesh, v, transport) for mesh, v in cases for transport in (TRANSPORTS if mesh[1] > 1 else TRANSPORTS[:1])]


def assert_all_replicas_equal(records: list[Record], reference: Record, *, replicas: int, mixed: bool) -> None:
    assert len(records) == replicas
    for record in records:
        if mixed:
            assert_same_mixed_training(record, reference)
        else:
            assert_same_training(record, reference, FLOAT32)


@pytest.mark.timeout(600)  # the first test of a mesh trains all its variants
@pytest.mark.parametrize(("mesh", "variant", "transport"), on_every_transport(USUAL), ids=name)
def test_equals_one_process(mesh: Mesh, variant: Variant, transport: str) -> None:
    records = usual_runs(mesh, transport).records(variant)
    reference = single_record(single_process(variant, mesh))
    assert_all_replicas_equal(records, reference, replicas=mesh[0], mixed=variant.mixed)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("mesh", "variant", "transport"), on_every_transport(WITH_FSDP2), ids=name)
def test_equals_torch_fsdp2(mesh: Mesh, variant: Variant, transport: str) -> None:
    records = usual_runs(mesh, transport).records(variant)
    reference = runs_of_torch(mesh).records(fsdp2(variant, mesh))[0]
    assert_all_replicas_equal(records, reference, replicas=mesh[0], mixed=variant.mixed)


@pytest.mark.parametrize(("mesh", "variant", "transport"), on_every_transport(WITH_DDP), ids=name)
def test_equals_ddp(mesh: Mesh, variant: Variant, transport: str) -> None:
    records = usual_runs(mesh, transport).records(variant)
    reference = runs_of_torch(mesh).records(ddp(variant))[0]
    assert_all_replicas_equal(records, reference, replicas=mesh[0], mixed=variant.mixed)


@pytest.mark.parametrize(("mesh", "variant"), [(m, v) for m, v in USUAL if m[1] > 1], ids=name)
def test_transports_give_the_same_bits(mesh: Mesh, variant: Variant) -> None:
    """Sums are formed in rank order on both. Two replicas add up to the same whatever is in a message."""
    first, second = (usual_runs(mesh, transport).records(variant)[0] for transport in TRANSPORTS)
    assert first.losses == second.losses
    assert first.norms == second.norms
    for quantity in ("gradients", "weights"):
        for step, (a, b) in enumerate(zip(getattr(first, quantity), getattr(second, quantity))):
            assert a.keys() == b.keys()
            for key, value in a.items():
                assert torch.equal(value, b[key]), f"{quantity} of {key} in step {step}"


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("mesh", "model"), EVERY, ids=name)
def test_every_combination_equals_one_process(mesh: Mesh, model: str, transport: str) -> None:
    runs = Runs(mesh, every_variant(model), transport)
    problems = []
    for variant in every_variant(model):
        reference = single_record(single_process(variant, mesh))
        try:
            assert_all_replicas_equal(runs.records(variant), reference, replicas=mesh[0], mixed=variant.mixed)
        except AssertionError as error:
            problems.append(f"{variant}: {error}")
    assert not problems, "\n".join(problems)
