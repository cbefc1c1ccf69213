"""What `apply_plan` leaves on a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hp_plugin.core.dtensor.collectives import AxisGroup
from hp_plugin.core.dtensor.plan import Placed, ShardingPlan, placement_on
from hp_plugin.core.layout import AttachedLayout, Layout


@dataclass(frozen=True, eq=False)
class AppliedPlan:
    """What `apply_plan` leaves on a model.

    Attributes:
        plan: the plan.
        lines: axis -> this rank's line of ranks along it, in the order of the mesh.
        layouts: parameter name, tied names included -> how it is divided.
        ranks: the global ranks of the mesh, and the place in it of each axis in `lines`.
        whole_names: parameters that are called otherwise in the whole model -> their name there: experts that are
            modules are numbered from 0 on each rank.
    """

    plan: ShardingPlan
    lines: Mapping[str, AxisGroup]
    layouts: Mapping[str, AttachedLayout]
    ranks: tuple[torch.Tensor, tuple[int, ...]] | None = None
    whole_names: Mapping[str, str] = field(default_factory=dict)

    def whole_name(self, name: str) -> str:
        """What the parameter `name` of this rank is called in the whole model."""
        return self.whole_names.get(name, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> AppliedPlan:
        return self

    def layout_of(self, shape: tuple[int, ...], placed: Placed) -> AttachedLayout:
        """How a whole tensor of `shape` with these placements lies on the plan's axes."""
        axes = list(self.lines.values())
        layout = Layout(
            shape,
            tuple(line.axis for line in axes),
            tuple(line.size for line in axes),
            tuple(placement_on(placed, line.axis).resolved(len(shape)).as_torch() for line in axes),
        )
        coordinate, groups = tuple(line.rank for line in axes), tuple(line.group for line in axes)
        return AttachedLayout(layout, coordinate, groups, ranks=self.ranks)


def applied_plan(model: nn.Module) -> AppliedPlan | None:
    """The plan that was applied to `model`, if any."""
    return getattr(model, "_hp_applied_plan", None)
