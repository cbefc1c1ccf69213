"""Which checkpoint a job is reading.

Megatron asks an optimizer to describe what it wants to read, but does not say of which checkpoint. Every release reads
a checkpoint's common part first, by `load_common_state_dict`; what that call tells is kept here until the optimizer
has taken its state over.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

SHARDING_TYPE = "distrib_optim_sharding_type"
"""In the metadata of a checkpoint: the distributed optimizer's format; absent where another optimizer saved."""

SAVER = "hyperfsdp_saver"
"""In the metadata while loading: the arguments of the job that saved."""

OPENED = "hyperfsdp_opened"
"""In the metadata while loading: the :class:`Opened`."""

_TYPE_IN_STATE = "param_state_sharding_type"


@dataclass(frozen=True)
class Opened:
    """A checkpoint of which the common part has been read.

    Attributes:
        directory: Of the iteration.
        saver: The arguments of the job that saved; None if they are not in it.
        sharding_type: The distributed optimizer's format; None where another optimizer, or none, was saved.
    """

    directory: Path
    saver: Any
    sharding_type: str | None

    @classmethod
    def of(cls, directory: str | Path, common: Mapping[str, Any]) -> Opened:
        """By the common part of the checkpoint."""
        state = common.get("optimizer")
        # With experts there are several optimizers, by number.
        parts = [state, *state.values()] if isinstance(state, Mapping) else []
        found = [part[_TYPE_IN_STATE] for part in parts if isinstance(part, Mapping) and _TYPE_IN_STATE in part]
        return cls(Path(directory), common.get("args"), found[0] if found else None)

    @functools.cached_property
    def tensors(self) -> Metadata:
        """Names, shapes and chunks of all tensors: torch's metadata with Megatron's additions. Reads a file."""
        return FileSystemReader(self.directory).read_metadata()


_last: Opened | None = None


def note_opened(original: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's `load_common_state_dict`, which notes what it has read."""

    @functools.wraps(original)
    def load_common_state_dict(checkpoint_dir: Any, *args: Any, **kwargs: Any) -> Any:
        global _last
        common = original(checkpoint_dir, *args, **kwargs)
        _last = Opened.of(checkpoint_dir, common)
        return common

    return load_common_state_dict


def with_opened(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    """`metadata` as Megatron gives it while loading (None in 0.12), with what is known of the checkpoint."""
    known = dict(metadata or {})
    if _last is None or OPENED in known:
        return known
    known[OPENED] = _last
    known.setdefault(SAVER, _last.saver)
    if known.get(SHARDING_TYPE) is None and _last.sharding_type is not None:
        known[SHARDING_TYPE] = _last.sharding_type
    return known


def forget_opened() -> None:
    """To be called once the optimizer has its state."""
    global _last
    _last = None
