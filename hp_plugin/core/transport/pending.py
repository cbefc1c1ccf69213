"""Collectives in flight: what issues them returns one of these, and what needs the result waits for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

Prepare = Callable[[], tuple[list[torch.Tensor], list[torch.Tensor]]]
"""Allocates and fills the operands of an all-gather; returns (outputs, inputs)."""


class Pending:
    """Collectives in flight, and the tensors that must live until they are done.

    Attributes:
        operand_bytes: Of an all-gather, bytes of its outputs. Final after `wait`, as:
        copied_bytes: What the transport copied on this rank outside the back end.
        temporaries: What the transport has allocated where it was called and reads in `wait`, maybe on another stream.
    """

    __slots__ = ("_keep", "_works", "copied_bytes", "operand_bytes", "temporaries")

    def __init__(self, works: Sequence[Any], keep: Sequence[torch.Tensor]) -> None:
        self._works = works
        self._keep: Sequence[torch.Tensor] = keep
        self.operand_bytes = self.copied_bytes = 0
        self.temporaries: Sequence[torch.Tensor] = ()

    def wait(self) -> None:
        """Makes the results visible: blocks the host on gloo, the current stream on a device. Idempotent."""
        for work in self._works:
            if work is not None:
                work.wait()
        self._works = ()
        self._keep = ()
        self.temporaries = ()


class PendingCopies(Pending):
    """The reduce-scatter of a group of one rank: `wait` copies inputs to outputs.

    Args:
        outputs: 1-D tensors.
        inputs: Tensors of the same lengths.
    """

    __slots__ = ("_outputs",)

    def __init__(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        super().__init__((), list(inputs))
        self._outputs = outputs

    def wait(self) -> None:
        """Copies. Idempotent."""
        for output, operand in zip(self._outputs, self._keep):
            output.copy_(operand)
        self._outputs = ()
        super().wait()


def bytes_of(tensors: Sequence[torch.Tensor]) -> int:
    """Bytes of the elements of `tensors`, together."""
    return sum(tensor.numel() * tensor.dtype.itemsize for tensor in tensors)
