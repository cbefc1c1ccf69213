"""Reading files of `torch.save` without mapping their tensors into memory, and without the package that wrote them."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch

from hp_plugin.errors import ConfigurationError


class Stub:
    """Stands for an object of a class that is not imported: keeps its constructor's arguments and its state."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args = args
        self.state: Any = kwargs or None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.state = {**(self.state or {}), key: value}

    def append(self, value: Any) -> None:
        """As a list; the value is dropped."""

    def extend(self, values: Any) -> None:
        """As a list; the values are dropped."""


class _Unpickler(pickle.Unpickler):
    """Classes of DeepSpeed, and of anything that is not installed, become stubs."""

    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] in ("deepspeed", "megatron"):
            return Stub
        try:
            return super().find_class(module, name)
        except (ImportError, AttributeError):
            return Stub


class _Module:
    """What `torch.load` takes as the module that unpickles."""

    Unpickler = _Unpickler
    load = staticmethod(pickle.load)
    loads = staticmethod(pickle.loads)
    __name__ = __name__


def load(path: Path, *, exact: bool = False) -> Any:
    """A file of `torch.save`, whose tensors are mapped and read when they are used.

    Like every pickle it may run code as it is loaded: read checkpoints of your own only.

    Args:
        path: The file.
        exact: Make objects of DeepSpeed's own classes too, which imports it.

    Raises:
        ConfigurationError: It is damaged or of an older format of torch.
    """
    chosen = {} if exact else {"pickle_module": _Module}
    try:
        return torch.load(path, map_location="cpu", mmap=True, weights_only=False, **chosen)
    except (RuntimeError, pickle.UnpicklingError, EOFError, OSError) as error:
        raise ConfigurationError(f"{path} cannot be read as a file of torch.save: {error}") from error


def values(stub: Any) -> dict[str, Any] | tuple[Any, ...]:
    """What a stub of a dataclass or named tuple holds."""
    if isinstance(stub, Stub):
        return stub.state if isinstance(stub.state, dict) else stub.args
    return stub._asdict() if hasattr(stub, "_asdict") else dict(vars(stub))
