"""The cases: how the model is sharded and stepped, as options of both engines and as a setting of the formula."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bench.memory.formula import Accumulation, Setting
from bench.memory.model import Size, units

MESH = (2, 2)
"""(replicate, shard)."""
SIZE = Size()


@dataclass(frozen=True)
class Case:
    """One way to train.

    Attributes:
        name: Name in the report.
        mixed: bf16 compute, fp32 masters and sums.
        reshard: `reshard_after_forward` of the blocks.
        accumulation: As of `Setting`; three micro-batches unless "none".
        prefetch: Bytes gathered ahead; None: the default, the largest unit.
        window: Buckets beside `.grad`; None: the default.
    """

    name: str
    mixed: bool = False
    reshard: bool = True
    accumulation: Accumulation = "none"
    prefetch: int | None = None
    window: int | None = None

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step."""
        return 1 if self.accumulation == "none" else 3

    @property
    def options(self) -> dict[str, Any]:
        """Options of our `fully_shard` alone. The formula is that of the c10d transport."""
        chosen = {
            "transport": "c10d",
            "bucket_bytes": BUCKET_BYTES,
            "prefetch": self.prefetch,
            "window": self.window,
        }
        return {key: value for key, value in chosen.items() if value is not None}

    def setting(self) -> Setting:
        """The same for the formula."""
        return Setting(
            shard_size=MESH[1],
            compute=2 if self.mixed else 4,
            reshard=self.reshard,
            prefetch=self.prefetch,
            accumulation=self.accumulation,
            bucket=BUCKET_BYTES,
            window=2 if self.window is None else self.window,
        )


def _block_elements() -> int:
    return sum(units(SIZE)[1])


BUCKET_BYTES = 2 * _block_elements() * 4 // MESH[1]
"""Two blocks of sharded fp32 gradients: set, since the default is measured and would make the figures vary."""

CASES = (
    Case("fp32"),
    Case("fp32, no prefetch", prefetch=0),
    Case("fp32, kept after forward", reshard=False),
    Case("bf16", mixed=True),
    Case("bf16, kept after forward", mixed=True, reshard=False),
    Case("fp32, .grad exists", accumulation="grad_exists"),
    Case("fp32, .grad exists, window 1", accumulation="grad_exists", window=1),
    Case("fp32, all-reduce last", accumulation="all_reduce_last"),
    Case("bf16, all-reduce last", mixed=True, accumulation="all_reduce_last"),
    Case("fp32, sync last", accumulation="sync_last"),
)
