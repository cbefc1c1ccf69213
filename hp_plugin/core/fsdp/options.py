"""Options of `fully_shard` that hold for everything under one root, however many units name them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

from hp_plugin.errors import ConfigurationError


@dataclass(frozen=True)
class RootOptions:
    """What one call of `fully_shard` asks for, and what a root resolves from all of them. None: the default.

    Attributes:
        bucket_bytes: Bytes of sharded gradient per message between supernodes, at least 1.
        window: Gradient buckets that may wait for the slow link beside `.grad`, at least 1.
        prefetch: Bytes of full parameters that may be gathered ahead of their use; 0: nothing is.
        transport: "c10d" or "shm".
        deterministic: Whether the same run gives the same bits on every transport.
    """

    bucket_bytes: int | None = None
    window: int | None = None
    prefetch: int | None = None
    transport: str | None = None
    deterministic: bool | None = None

    def __post_init__(self) -> None:
        for option, least in (("bucket_bytes", 1), ("window", 1), ("prefetch", 0)):
            value = getattr(self, option)
            if value is None:
                continue
            if type(value) is not int or value < least:
                raise ConfigurationError(
                    f"{option}={value!r}: expected an integer of at least {least}, or None for the default"
                )

    @classmethod
    def resolve(cls, given: Iterable[tuple[str, RootOptions]]) -> RootOptions:
        """One set of options out of those of all units; a unit that leaves an option out takes what others name.

        Args:
            given: Name of each unit under the root, and its options.

        Raises:
            ConfigurationError: If two units name different values.
        """
        chosen: dict[str, tuple[str, Any]] = {}
        for name, options in given:
            for option in (field.name for field in fields(cls)):
                value = getattr(options, option)
                if value is None:
                    continue
                first, earlier = chosen.setdefault(option, (name, value))
                if earlier != value:
                    raise ConfigurationError(
                        f"unit {first} has {option}={earlier!r} and unit {name} has {option}={value!r}, but they share "
                        "a root and the option holds for all of it; give one value, to all units or to the root alone"
                    )
        return cls(**{option: value for option, (_, value) in chosen.items()})
