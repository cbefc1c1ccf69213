"""The runs: stock ones that differ in the order of their sums, ours, and wrong ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Engine = Literal["ddp", "megatron_ddp", "fsdp2", "ours"]


@dataclass(frozen=True)
class Variant:
    """One run.

    Attributes:
        name: Name in the report.
        engine: What reduces the gradients: torch's DDP, Megatron's DDP, torch's FSDP2, or this project.
        mesh: Shape of the (replicate, shard) mesh; one number: shard only. Unused by the DDPs.
        bucket_mb: "ddp" only: size of its buckets, which decides in which order a ring adds each element.
        fault: What goes wrong; a key of `FAULTS`, or empty.
    """

    name: str
    engine: Engine
    mesh: tuple[int, ...] = (2, 2)
    bucket_mb: float = 25.0
    fault: str = ""


FAULTS: dict[str, str] = {
    "replica_dropped": "the gradients of the second replica never arrive",
    "micro_batch_dropped": "the gradients of the first micro-batch are lost",
    "shard_stale": "the last rank does not store what its optimizer computed",
}

OURS = Variant("ours", "ours")
WRONG = tuple(Variant(fault, "ours", fault=fault) for fault in FAULTS)


def stock(*, mixed: bool) -> tuple[Variant, ...]:
    """Stock runs of a precision. The DDPs have no bf16 compute with fp32 masters and sums of this kind; FSDP2 has.

    Megatron's comes last: to run without a GPU it needs a compatibility layer in the process.
    """
    fsdp2 = (Variant("fsdp2_2x2", "fsdp2"), Variant("fsdp2_4", "fsdp2", mesh=(4,)))
    if mixed:
        return (*fsdp2, Variant("fsdp2_4x1", "fsdp2", mesh=(4, 1)))
    ddp = (Variant("ddp", "ddp"), Variant("ddp_small_buckets", "ddp", bucket_mb=0.02))
    return (*ddp, *fsdp2, Variant("megatron_ddp", "megatron_ddp"))
