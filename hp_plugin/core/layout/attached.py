"""The layout of a parameter that is a plain local tensor: an attribute of the tensor, kept by `fully_shard`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from hp_plugin.core.layout.layout import Layout, is_shard

_ATTRIBUTE = "_hp_attached_layout"


@dataclass(frozen=True, eq=False)
class AttachedLayout:
    """How the tensor that ranks hold as plain local pieces is divided.

    Attributes:
        layout: of the whole tensor, over the axes on which it is cut before any other sharding.
        coordinate: of this rank on these axes.
        groups: one process group per axis.
        apart: groups of ranks that hold other tensors under this name, as of experts that are modules.
        ranks: of the mesh that the axes are from, all axes: its global ranks, and the place of each axis in it.
    """

    layout: Layout
    coordinate: tuple[int, ...]
    groups: tuple[dist.ProcessGroup, ...]
    apart: tuple[dist.ProcessGroup, ...] = ()
    ranks: tuple[torch.Tensor, tuple[int, ...]] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> AttachedLayout:
        return self

    @property
    def shard_groups(self) -> tuple[dist.ProcessGroup, ...]:
        """The groups of axes with several ranks that divide the tensor."""
        axes = zip(self.layout.placements, self.layout.axis_sizes, self.groups, strict=True)
        return tuple(group for placement, size, group in axes if is_shard(placement) and size > 1)

    @property
    def norm_groups(self) -> tuple[dist.ProcessGroup, ...]:
        """The groups over which parts of a norm are added up."""
        return (*self.shard_groups, *self.apart)

    def take(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's piece of `whole`, in memory of its own."""
        piece = whole
        for dim in self.layout.shard_dims:
            segments = self.layout.local_segments(self.coordinate, dim)
            piece = torch.cat([piece.narrow(dim, start, length) for start, length in segments], dim)
        return piece.clone(memory_format=torch.contiguous_format) if piece is whole else piece.contiguous()


def attach_layout(tensor: torch.Tensor, attached: AttachedLayout) -> None:
    """Says of a plain tensor which part of a whole one it is."""
    setattr(tensor, _ATTRIBUTE, attached)


def attached_layout(tensor: torch.Tensor) -> AttachedLayout | None:
    """What `attach_layout` said, also of the DTensor that `fully_shard` made of the tensor; else None."""
    return getattr(tensor, _ATTRIBUTE, None)
