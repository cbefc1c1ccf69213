"""Checkpoints in torch's distributed format (DCP): saved on one mesh, loaded on any other."""

from __future__ import annotations

from hp_plugin.core.checkpoint.dcp import load_checkpoint, save_checkpoint

__all__ = ["load_checkpoint", "save_checkpoint"]
