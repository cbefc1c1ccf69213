"""What the ranks of the fsdp-step tests do. At module level, because ranks import it by name."""

from __future__ import annotations

from typing import Any

from tests.support.gloo import init_gloo

ENV = {"LOCAL_WORLD_SIZE": "2"}  # of four ranks: two supernodes of two
MEGATRON_ENV = {**ENV, "HP_DEVICE": "cpu"}


def tiny_job(names: list[str], *, compute: str, options: dict[str, dict[str, Any]] | None = None) -> Any:
    from bench.fsdp_step.job import Job, VariantJob
    from bench.fsdp_step.settings import Balance, Size

    given = options or {}
    return Job(
        size=Size(layers=3, dim=32, heads=2, vocabulary=64, tokens=8),
        compute=compute,
        variants=[VariantJob(name=name, kind=name, options=given.get(name, {})) for name in names],
        balances=[Balance(name="c1", compute_over_wire=1.0)],
        rounds=1,
        steps=1,
        warm_up=1,
        equality_steps=4,
        balance_tolerance=None,
        nominal_wire_s=0.01,
        seed=1,
        learning_rate=1e-4,
        weight_decay=0.1,
    )


def run(names: list[str], compute: str, options: dict[str, dict[str, Any]] | None = None) -> dict[str, Any]:
    from bench.fsdp_step.worker import prepare, run_job

    job = tiny_job(names, compute=compute, options=options)
    prepare(job)
    init_gloo()
    return dict(run_job(job).model_dump(mode="json"))


def _context(compute_pace: Any = None) -> Any:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from bench.fsdp_step.variant import Context

    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    job = tiny_job([], compute="real")
    return Context(mesh=mesh, size=job.size, pace=compute_pace, seed=1, learning_rate=1e-4, weight_decay=0.1)


def _batch(context: Any) -> Any:
    import torch.distributed as dist

    from bench.fsdp_step.model import make_batches

    return make_batches(context.size, rank=dist.get_rank(), seed=1, count=1)[0]


def host_cpu_of_work() -> tuple[float, float]:
    """CPU seconds of all ranks: where another thread of each works for 0.1 s, and where each sleeps as long."""
    import threading
    import time

    from bench.fsdp_step.worker import _timed

    def work_aside() -> None:
        thread = threading.Thread(target=_work_for, args=(0.1,))
        thread.start()
        thread.join()

    init_gloo()
    return _timed(work_aside).host_cpu, _timed(lambda: time.sleep(0.1)).host_cpu


def _work_for(seconds: float) -> None:
    import time

    start = time.thread_time()
    while time.thread_time() - start < seconds:
        pass


def megatron_overlaps() -> None:
    from bench.fsdp_step.peers import build, megatron

    megatron.prepare()
    init_gloo()
    context = _context()
    batch = _batch(context)
    for kind in ("megatron_ddp", "megatron_distopt"):
        variant: Any = build(kind, context, {"bucket_elements": 4000})
        variant.step(batch)
        groups = variant.ddp.bucket_groups
        assert len(groups) > 3
        if kind == "megatron_distopt":
            assert not any(group.param_gather_dispatched for group in groups), "parameters travel with the next forward"
        loss = variant.forward(batch)
        if kind == "megatron_distopt":
            assert all(group.param_gather_dispatched for group in groups)
        loss.backward()
        assert all(group.grad_reduce_handle is not None for group in groups), "reductions are in flight after backward"
        variant.ddp.finish_grad_sync()
        assert all(group.grad_reduce_handle is None for group in groups)


def hook_does_not_wait() -> None:
    from bench.fsdp_step.peers import build

    init_gloo()
    context = _context()
    variant: Any = build("fsdp2_hook", context, {"own_units": True})
    loss = variant.forward(_batch(context))
    loss.backward()
    assert len(variant._works) == len(context.model().units), "every unit reduces between supernodes, once"
    for work in variant._works:
        work.wait()


def ablation_messages() -> dict[str, list[int]]:
    """Of one backward: messages between supernodes, and reductions that its end had to wait for."""
    from bench.fsdp_step.peers import build

    init_gloo()
    context = _context()
    batch = _batch(context)
    found = {}
    for kind in ("hyperfsdp", "no_pipeline", "no_fused_reduce", "no_zero_copy"):
        variant: Any = build(kind, context, {"bucket_bytes": 1})
        variant.step(batch)
        variant.root.counters.reset()
        variant.step(batch)
        counters = variant.root.counters
        found[kind] = [counters.all_reduces, counters.waits["end_of_backward"].count]
    return found


def packing_transport() -> None:
    import torch
    import torch.distributed as dist

    from bench.fsdp_step.ablations import PackingTransport
    from hp_plugin.core.transport import C10dTransport

    init_gloo()
    world, rank = dist.get_world_size(), dist.get_rank()
    group = dist.group.WORLD
    assert group is not None
    for transport in (PackingTransport(group), C10dTransport(group)):
        inputs = [torch.arange(3.0) + 10 * rank, torch.arange(2.0) - rank]
        outputs = [torch.zeros(3 * world), torch.zeros(2 * world)]
        transport.all_gather(lambda operands=(outputs, inputs): operands).wait()
        assert outputs[0].tolist() == [x + 10 * r for r in range(world) for x in range(3)]
        assert outputs[1].tolist() == [x - r for r in range(world) for x in range(2)]
        sums = [torch.zeros(3), torch.zeros(2)]
        transport.reduce_scatter(sums, [torch.arange(3.0 * world) * (rank + 1), torch.arange(2.0 * world)]).wait()
        ranks = sum(range(1, world + 1))
        assert sums[0].tolist() == [ranks * (3.0 * rank + x) for x in range(3)]
        assert sums[1].tolist() == [world * (2.0 * rank + x) for x in range(2)]
