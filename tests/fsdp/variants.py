"""What the equivalence tests vary, as data."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tests.support.releases import TORCH

MESHES = ((1, 1), (1, 2), (2, 1), (2, 2), (1, 4))  # (dp_replicate, dp_shard)


@dataclass(frozen=True)
class Variant:
    """One way to train.

    Attributes:
        backend: "hyper" (this project), "fsdp2" (torch), "ddp" (torch), or "single" (one process, plain torch).
        model: key of `models.MODELS`.
        micro_batches: per step.
        mode: when gradients are reduced: "plain" (every micro-batch), "all_reduce_last" (inside the supernode every
            micro-batch, between supernodes with the last), "sync_last" (with the last only).
        reshard: `reshard_after_forward` of every unit.
        mixed: bfloat16 compute, float32 reduction, float32 masters.
        units: "blocks" (one per block and the root), "root" (one), "fine" (norms, attention, MLP on their own).
        one_dim: a mesh with the shard axis only, in place of (dp_replicate, dp_shard).
        shares: "single" only: number of data-parallel ranks whose backward passes are imitated one by one.
        fault: name of an injected fault, see `training.FAULTS`.
        steps: optimizer steps.
    """

    backend: str = "hyper"
    model: str = "transformer"
    micro_batches: int = 1
    mode: str = "plain"
    reshard: bool = True
    mixed: bool = False
    units: str = "blocks"
    one_dim: bool = False
    shares: int = 1
    fault: str | None = None
    steps: int = 2

    def __str__(self) -> str:
        words = [self.backend, self.model, f"m{self.micro_batches}", self.mode]
        words += ["reshard" if self.reshard else "keep", "bf16" if self.mixed else "fp32", self.units]
        words += ["1d"] * self.one_dim + ([f"shares{self.shares}"] if self.shares > 1 else [])
        return "-".join(words + ([self.fault] if self.fault else []))


def usual_variants(mesh: tuple[int, int]) -> list[Variant]:
    """The variants of this project's back end that `make test` runs on `mesh`."""
    modes = ("plain", "all_reduce_last", "sync_last")
    chosen = [Variant(reshard=reshard) for reshard in (True, False)]
    chosen += [Variant(micro_batches=3, mode=mode, reshard=reshard) for mode in modes for reshard in (True, False)]
    chosen += [Variant(mixed=True), *(Variant(micro_batches=3, mode=mode, mixed=True) for mode in modes)]
    chosen += [Variant(model="tied", micro_batches=3), Variant(model="tied", micro_batches=3, mode="all_reduce_last")]
    chosen += [Variant(model="mlp", micro_batches=3, mode=mode) for mode in modes]
    chosen += [Variant(micro_batches=3, units=units) for units in ("root", "fine")]
    if mesh[0] == 1:
        chosen += [Variant(micro_batches=3, one_dim=True), Variant(micro_batches=3, one_dim=True, mode="sync_last")]
    return chosen


def every_variant(model: str) -> list[Variant]:
    """The whole product for one model, in float32 with more steps; bfloat16's rounding grows with every step."""
    return [
        Variant(
            model=model,
            micro_batches=count,
            mode=mode,
            reshard=reshard,
            mixed=mixed,
            units=units,
            steps=2 if mixed else 4,
        )
        for count in (1, 3)
        for mode in ("plain", "all_reduce_last", "sync_last")
        for reshard in (True, False)
        for mixed in (False, True)
        for units in (("blocks", "root") if model == "mlp" else ("blocks", "root", "fine"))
    ]


def single_process(variant: Variant, mesh: tuple[int, int]) -> Variant:
    """The plain one-process run that `variant` on `mesh` must equal.

    In float32 it sees the whole batch at once. In bfloat16 it rounds each rank's gradient as that rank does, so that
    only the order of the float32 sum is left to differ.
    """
    shares = mesh[0] * mesh[1] if variant.mixed else 1
    return Variant(
        backend="single",
        model=variant.model,
        micro_batches=variant.micro_batches,
        mixed=variant.mixed,
        shares=shares,
        steps=variant.steps,
    )


def fsdp2(variant: Variant, mesh: tuple[int, int]) -> Variant:
    """The same training by torch FSDP2, which has these modes and units too. With one replica its mesh is 1-D."""
    return replace(variant, backend="fsdp2", fault=None, one_dim=mesh[0] == 1)


def fsdp2_runs_on(mesh: tuple[int, int]) -> bool:
    """Whether this torch's FSDP2 can train on `mesh` on CPU: in 2.7 its replicated form asserts events CPUs lack."""
    return mesh[0] == 1 or TORCH >= (2, 8)


def ddp(variant: Variant) -> Variant:
    """The same training by torch's DistributedDataParallel, reducing with the last micro-batch."""
    return Variant(backend="ddp", model=variant.model, micro_batches=variant.micro_batches, steps=variant.steps)
