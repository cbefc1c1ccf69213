"""The four placements of a plan. Each says where a value lies along one mesh axis, and where its gradient does."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import GetCoreSchemaHandler
from pydantic_core import core_schema
from torch.distributed.tensor import Placement as TorchPlacement
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from hp_plugin.errors import ConfigurationError

Kind = Literal["replicate", "copy", "shard", "partial"]

_SHARD = re.compile(r"shard\(\s*(-?\d+)\s*(?:,\s*blocks\s*=\s*(\d+)\s*)?\)")


@dataclass(frozen=True)
class AxisPlacement:
    """Where a tensor lies along one mesh axis.

    Attributes:
        kind: "replicate": the same value and the same gradient on all ranks. "copy": the same value, used by each rank
            for other work, so that gradients are partial sums. "shard": a piece of the value and of the gradient.
            "partial": a summand of the value, with the same gradient on all ranks.
        dim: the tensor dim of a shard, negative from the end; 0 otherwise.
        blocks: into how many equal blocks the dim is cut first, a piece of each of which the rank holds.
    """

    kind: Kind
    dim: int = 0
    blocks: int = 1

    @classmethod
    def parse(cls, text: str) -> AxisPlacement:
        """Reads `replicate`, `copy`, `partial`, `shard(1)` or `shard(1, blocks=2)`."""
        stripped = text.strip()
        if stripped in ("replicate", "copy", "partial"):
            return cls(stripped)  # type: ignore[arg-type]
        match = _SHARD.fullmatch(stripped)
        if match is None or match.group(2) == "0":
            raise ConfigurationError(
                f"{text!r} is not a placement; expected replicate, copy, partial, shard(DIM) or "
                "shard(DIM, blocks=COUNT) with a count of at least 1."
            )
        return cls("shard", int(match.group(1)), int(match.group(2) or 1))

    @property
    def is_shard(self) -> bool:
        """Whether each rank holds a piece."""
        return self.kind == "shard"

    @property
    def gradient(self) -> AxisPlacement:
        """Where the gradient of a tensor that lies so lies: the dual placement."""
        if self.kind == "copy":
            return PARTIAL
        return COPY if self.kind == "partial" else self

    def resolved(self, ndim: int) -> AxisPlacement:
        """The same with a non-negative dim, for a tensor of `ndim` dims."""
        if not self.is_shard or self.dim >= 0:
            return self
        return AxisPlacement("shard", self.dim + ndim, self.blocks)

    def as_torch(self) -> TorchPlacement:
        """The placement as `Layout` and checkpoints know it: shards, and replicas for all else."""
        if not self.is_shard:
            return Replicate()
        return Shard(self.dim) if self.blocks == 1 else _StridedShard(self.dim, split_factor=self.blocks)

    def __str__(self) -> str:
        if not self.is_shard:
            return self.kind
        return f"shard({self.dim})" if self.blocks == 1 else f"shard({self.dim}, blocks={self.blocks})"

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        """In a file a placement is its text."""
        return core_schema.no_info_plain_validator_function(
            cls._validated, serialization=core_schema.plain_serializer_function_ser_schema(str)
        )

    @classmethod
    def _validated(cls, value: Any) -> AxisPlacement:
        if isinstance(value, AxisPlacement):
            return value
        if not isinstance(value, str):
            raise ValueError(f"a placement is a text such as shard(0), but {value!r} was found")
        return cls.parse(value)


REPLICATE = AxisPlacement("replicate")
COPY = AxisPlacement("copy")
PARTIAL = AxisPlacement("partial")


def shard(dim: int, *, blocks: int = 1) -> AxisPlacement:
    """A piece along `dim`; of each of `blocks` equal blocks of it."""
    return AxisPlacement("shard", dim, blocks)
