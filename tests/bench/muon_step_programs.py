"""What the ranks of the muon-step tests do. At module level, because ranks import it by name."""

from __future__ import annotations

from typing import Any

from tests.support.gloo import init_gloo

ENV = {"LOCAL_WORLD_SIZE": "2", "DS_ACCELERATOR": "cpu"}  # of four ranks: two supernodes of two
MEGATRON_ENV = {**ENV, "HP_DEVICE": "cpu"}


def tiny_job(names: list[str], *, options: dict[str, dict[str, Any]] | None = None, **changes: Any) -> Any:
    from bench.fsdp_step.job import VariantJob
    from bench.fsdp_step.settings import Size
    from bench.muon_step.job import Job
    from bench.muon_step.settings import load

    own, given = load(), options or {}
    job = Job(
        size=Size(layers=2, dim=64, heads=2, vocabulary=64, tokens=8),
        variants=[
            VariantJob(name=name, kind=name, options=given.get(name, own.variants[name].options)) for name in names
        ],
        muon=own.muon,
        adamw=own.adamw,
        rounds=1,
        steps=2,
        warm_up=1,
        equality_steps=3,
        equality_tokens=64,
        compute_over_wire=1.0,
        wire_tolerance=None,
        nominal_wire_s=0.012,
        seed=1,
    )
    return job.model_copy(update=changes)


def run(names: list[str], options: dict[str, dict[str, Any]] | None = None) -> dict[str, Any]:
    from bench.muon_step.worker import prepare, run_job

    job = tiny_job(names, options=options)
    prepare(job)
    init_gloo()
    return dict(run_job(job).model_dump(mode="json"))


def run_with_another_torch_muon(change: dict[str, Any]) -> dict[str, Any]:
    """Ours and torch, whose Muon has other hyperparameters than it should."""
    from unittest import mock

    from bench.muon_step.peers.torch_dtensor import TorchDTensor
    from bench.muon_step.worker import run_job

    make = TorchDTensor._make_optimizers

    def spoiled(self: Any, context: Any) -> Any:
        made = make(self, context)
        for group in made[0].param_groups:
            group.update(change)
        return made

    init_gloo()
    with mock.patch.object(TorchDTensor, "_make_optimizers", spoiled):
        return dict(run_job(tiny_job(["hypermuon", "torch_dtensor"])).model_dump(mode="json"))


def window_of_a_slow_optimizer() -> tuple[float, float]:
    """(window, step) in seconds: layers wait 60 ms, the update 50 ms, the forward 10 ms before its first layer."""
    import time

    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from bench.fsdp_step.model import loss_of, make_batches
    from bench.muon_step.variant import MarkedPace, MuonContext, MuonVariant

    init_gloo()
    job = tiny_job([])
    pace = MarkedPace(layer_s=0.01)
    context = MuonContext(
        mesh=init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("dp_replicate", "dp_shard")),
        size=job.size,
        pace=pace,
        seed=1,
        learning_rate=1e-3,
        weight_decay=0.0,
        muon=job.muon,
        adam=job.adamw,
    )

    class Slow(MuonVariant):
        model = context.model()

        def forward(self, batch: Any) -> Any:
            time.sleep(0.01)
            return loss_of(self.model(batch[0]), batch[1])

        def backward(self, loss: Any) -> None:
            loss.backward()

        def update(self) -> None:
            time.sleep(0.05)

        def full_weights(self) -> Any:
            yield from self.model.named_parameters()

    variant = Slow()
    batch = make_batches(job.size, rank=0, seed=1, count=1)[0]
    variant.step(batch)
    start = time.perf_counter()
    pace.new_step()
    variant.step(batch)
    return pace.still_s, time.perf_counter() - start
