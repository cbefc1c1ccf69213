"""The host-overhead benchmark counts what it says it counts and compares like with like."""

from __future__ import annotations

import pytest

from tests.support.ranks import run_ranks


def _check_counter() -> None:
    import torch
    from torch.distributed.tensor import DTensor, Replicate, Shard

    from bench.host_overhead.dtensors import count_dtensors
    from bench.host_overhead.variants import fake_ranks

    with fake_ranks() as meshes:
        mesh = meshes["fsdp_8"]
        local = torch.ones(4, 4)
        with count_dtensors() as count:
            _ = local + local
        assert (count.total, count.operations) == (0, 0)
        with count_dtensors() as count:
            planted = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        assert (count.total, count.operations) == (1, 0)
        for _ in range(3):  # the first dispatch goes through Python, later ones through C++
            with count_dtensors() as count:
                _ = planted + planted
            assert count.total >= 1
            assert count.operations == 1
        with count_dtensors() as count:
            planted.redistribute(mesh, [Replicate()])
        assert count.total >= 1
        before = count.total
        _ = planted + planted
        DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        assert count.total == before, "it counted after the context was closed"


def test_counter_sees_planted_dtensors() -> None:
    run_ranks(1, _check_counter)


def _check_steady_steps(mode: str) -> None:
    from bench.host_overhead.model import Size
    from bench.host_overhead.steady import dtensors_of_a_step
    from bench.host_overhead.variants import MESHES, Variant, build, fake_ranks, make_input
    from bench.transports import transport_of
    from hp_plugin.core.fsdp.root import unit_of

    size = Size(layers=2)
    with fake_ranks() as meshes:
        for mesh in MESHES:
            for mixed in (False, True):
                ours = Variant("ours", mesh, mixed)
                model = build(ours, meshes, size)
                count = dtensors_of_a_step(ours, model, make_input(ours, size), mode=mode)
                assert transport_of(unit_of(model).root) == "c10d", "ranks that are not there share no memory"
                assert (count.total, count.operations) == (0, 0), f"{ours}: {count}"
        peer = Variant("fsdp2", "fsdp_8")
        count = dtensors_of_a_step(peer, build(peer, meshes, size), make_input(peer, size), mode=mode)
        assert count.total > 0, "torch FSDP2 builds DTensors in every step; the counter must see them"


@pytest.mark.parametrize("mode", ["dtensors_one_batch", "dtensors_all_reduce_last", "dtensors_sync_last"])
def test_a_steady_step_of_ours_builds_no_dtensor(mode: str) -> None:
    run_ranks(1, _check_steady_steps, mode=mode)


def test_every_engine_has_the_same_weights_and_units() -> None:
    run_ranks(1, _check_variants)


def _check_variants() -> None:
    import torch

    from bench.host_overhead.model import Size
    from bench.host_overhead.variants import all_variants, build, fake_ranks

    size = Size(layers=2)
    with fake_ranks() as meshes:
        for variant in all_variants():
            model = build(variant, meshes, size)
            per_layer = len(list(model.layers[0].parameters()))
            assert per_layer == 9
            plain = dict(build(variant.peer("plain"), meshes, size).named_parameters())
            for name, parameter in model.named_parameters():
                assert parameter.shape == plain[name].shape
                if variant.engine != "plain":
                    local = parameter.to_local()  # rank 0 holds the first rows
                    torch.testing.assert_close(local.to(plain[name].dtype), plain[name][: local.shape[0]])


def test_the_headline_is_the_worst_condition() -> None:
    from bench.host_overhead.command import _add_ratios
    from bench.host_overhead.timing import RoundTime
    from bench.host_overhead.variants import all_variants
    from bench.report import Report

    def seconds(variant: object) -> float:
        slow = "ours-hsdp_2x4-bf16"
        return 3.0 if str(variant) == slow else {"plain": 1.0, "ours": 2.0, "fsdp2": 4.0}[str(variant).split("-")[0]]

    times = [{str(v): RoundTime(seconds(v), seconds(v), seconds(v)) for v in all_variants()} for _ in range(4)]
    report = Report("host-overhead")
    _add_ratios(report, times)
    assert report.ratios["fsdp_vs_fsdp2"] == 0.75
    assert report.ratios["fsdp_vs_fsdp2_fsdp_8_fp32"] == 0.5
    assert report.ratios["fsdp_vs_plain"] == 3.0
    assert report.ratios["fsdp2_vs_plain"] == 4.0


def _check_planned_engines() -> None:
    import torch
    from torch.distributed.device_mesh import init_device_mesh

    from bench.host_overhead.dtensors import count_dtensors
    from bench.host_overhead.model import Size
    from bench.host_overhead.planned_model import make_blocks
    from bench.host_overhead.plans import build_planned, make_planned_input, plan_variants
    from hp_plugin.core.topology import Topology, TrafficRecorder
    from tests.support import init_gloo

    init_gloo()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    size, rank = Size(layers=2, dim=32, heads=4, tokens=4), mesh.get_local_rank()
    whole, x = make_blocks(size), torch.randn(1, size.tokens, size.dim, generator=torch.Generator().manual_seed(1))
    x.requires_grad_()
    expected = whole(x)
    expected.square().sum().backward()
    calls, dtensors = {}, {}
    for variant in plan_variants():
        model = build_planned(variant, mesh, size)
        assert make_planned_input(variant, size, 2).shape[1] == (2 if variant.sequence else 4) or (
            variant.engine == "compute"
        )
        if variant.engine == "compute":
            continue
        piece = (x.detach().chunk(2, 1)[rank] if variant.sequence else x.detach()).clone().requires_grad_()
        with TrafficRecorder(Topology.from_supernode_size(2, 2)) as recorder, count_dtensors() as count:
            y = model(piece)
            y.square().sum().backward()
        calls[variant], dtensors[variant] = dict(recorder.traffic.calls), count.total
        out = expected.chunk(2, 1)[rank] if variant.sequence else expected
        torch.testing.assert_close(y, out, msg=str(variant))
        assert x.grad is not None
        torch.testing.assert_close(piece.grad, x.grad.chunk(2, 1)[rank] if variant.sequence else x.grad)
        weight = whole.layers[0].attention.wo.weight.grad.chunk(2, 1)[rank]  # type: ignore[union-attr, operator]
        found = model.layers[0].attention.wo.weight.grad  # type: ignore[union-attr, index]
        found = found.to_local() if variant.engine == "dtensor" else found  # type: ignore[operator]
        torch.testing.assert_close(found, weight)
    for variant, count in dtensors.items():
        assert (count > 0) == (variant.engine == "dtensor"), variant
        if variant.engine == "plan":
            assert calls[variant] == calls[variant.peer("handwritten")] != {}, variant


def test_plan_handwritten_and_dtensor_compute_the_same() -> None:
    """And the first two by the same collectives, so that their ratio is that of what runs around them."""
    run_ranks(2, _check_planned_engines)


def test_a_plan_is_judged_by_its_worst_condition() -> None:
    from bench.host_overhead.command import _add_plan_ratios
    from bench.host_overhead.plans import plan_variants
    from bench.host_overhead.timing import RoundTime
    from bench.report import Report

    seconds = {"compute": 1.0, "handwritten": 2.0, "plan": 2.0, "dtensor": 8.0}

    def round_time(variant: object) -> RoundTime:
        found = 3.0 if str(variant) == "plan-tp_sequence" else seconds[str(variant).split("-")[0]]
        return RoundTime(found, found, found)

    report = Report("host-overhead")
    _add_plan_ratios(report, [{str(v): round_time(v) for v in plan_variants()} for _ in range(4)])
    assert report.ratios["plan_vs_handwritten_tp"] == 1.5
    assert report.ratios["plan_vs_handwritten_tp_whole"] == 1.0
    assert report.ratios["plan_vs_dtensor"] == 0.375
    assert report.ratios["plan_vs_compute_whole"] == 2.0
