"""What the engine did, as plain integers that a test can hold against a formula."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass
class Counters:
    """Totals of one root module on this rank since the last `reset()`.

    Bytes are those of the operands as this rank sees them (the full tensor of an all-gather or reduce-scatter, the
    buffer of an all-reduce), not what an algorithm puts on the wire; see `hp_plugin.core.topology.traffic` for that.
    """

    all_gathers: int = 0
    """Units gathered inside the supernode."""
    reduce_scatters: int = 0
    """Units reduced inside the supernode."""
    all_reduces: int = 0
    """Reductions between supernodes."""
    all_gather_bytes: int = 0
    reduce_scatter_bytes: int = 0
    all_reduce_bytes: int = 0
    copied_bytes: int = 0
    """Bytes written by copies of our own: casts, padding, shards on a dim other than 0. Transport is not counted."""
    gradient_dtensors_built: int = 0
    """DTensor wrappers constructed for `.grad`: one per parameter and buffer, none in a steady step."""

    def reset(self) -> None:
        """Sets every counter to zero."""
        for field in fields(self):
            setattr(self, field.name, 0)
