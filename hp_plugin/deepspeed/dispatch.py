"""The patch point: which engine class `DeepSpeedEngine(...)` makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.hybrid_engine import DeepSpeedHybridEngine
from deepspeed.runtime.pipe.engine import PipelineEngine

from hp_plugin.deepspeed.schema import read_block
from hp_plugin.errors import UnsupportedError


def install() -> Callable[[], None]:
    """Gives `DeepSpeedEngine` a `__new__`; returns what takes it away again."""

    def __new__(cls: type, *args: Any, **kwargs: Any) -> Any:
        return object.__new__(_class_for(cls, kwargs.get("config_class")))

    DeepSpeedEngine.__new__ = staticmethod(__new__)

    def undo() -> None:
        # Deleting it would leave the slot of a class with a Python-level __new__, which refuses arguments.
        DeepSpeedEngine.__new__ = staticmethod(lambda cls, *args, **kwargs: object.__new__(cls))

    return undo


def _class_for(cls: type, config: Any) -> type:
    raw = getattr(config, "_param_dict", None)
    if not isinstance(raw, dict):
        return cls
    block = read_block(raw)
    if block is None:
        return cls
    if issubclass(cls, PipelineEngine):
        raise UnsupportedError(
            "HyperFSDP does not shard a PipelineModule yet; pass a plain module to deepspeed.initialize, or remove the "
            'block "hyperfsdp".'
        )
    if issubclass(cls, DeepSpeedHybridEngine):
        raise UnsupportedError(
            'HyperFSDP does not support the hybrid engine; remove "hybrid_engine" and generate in eval mode, or remove '
            'the block "hyperfsdp".'
        )
    if cls is not DeepSpeedEngine:
        return cls
    from hp_plugin.deepspeed.engine import HyperFSDPEngine

    return HyperFSDPEngine
