"""One sharding plan for a model: made, checked, applied to plain tensors, and compared with one process by value."""

from __future__ import annotations

from hp_plugin.core.dtensor.applied import AppliedPlan, applied_plan
from hp_plugin.core.dtensor.apply import apply_plan
from hp_plugin.core.dtensor.check import check_plan
from hp_plugin.core.dtensor.loss import loss_function, vocabulary_parallel_cross_entropy
from hp_plugin.core.dtensor.placement import AxisPlacement, shard
from hp_plugin.core.dtensor.plan import InputSpec, ModuleSpec, OutputSpec, ParameterSpec, ShardingPlan
from hp_plugin.core.dtensor.planner import plan_transformer
from hp_plugin.core.dtensor.report import Comparison, PlanMismatchError, ValidationReport
from hp_plugin.core.dtensor.torch_styles import plan_from_styles
from hp_plugin.core.dtensor.validate import validate
from hp_plugin.core.dtensor.validation import SimulationReport, simulate

__all__ = [
    "AppliedPlan",
    "AxisPlacement",
    "Comparison",
    "InputSpec",
    "ModuleSpec",
    "OutputSpec",
    "ParameterSpec",
    "PlanMismatchError",
    "ShardingPlan",
    "SimulationReport",
    "ValidationReport",
    "applied_plan",
    "apply_plan",
    "check_plan",
    "loss_function",
    "plan_from_styles",
    "plan_transformer",
    "shard",
    "simulate",
    "validate",
    "vocabulary_parallel_cross_entropy",
]
