"""Follows a sharding plan through a model operation by operation, and says where a tensor first lies otherwise."""

from __future__ import annotations

from hp_plugin.core.dtensor.validation.live import report_of
from hp_plugin.core.dtensor.validation.report import Finding, Operation, PlacementError, SimulationReport
from hp_plugin.core.dtensor.validation.simulate import simulate

__all__ = ["Finding", "Operation", "PlacementError", "SimulationReport", "report_of", "simulate"]
