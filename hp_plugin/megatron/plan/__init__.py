"""A sharding plan of what Megatron does with a model that it has divided itself."""

from __future__ import annotations

from hp_plugin.megatron.plan.from_model import plan_from_megatron

__all__ = ["plan_from_megatron"]
