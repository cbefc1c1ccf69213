"""The table of device kernels: which implementation serves an operation, by device, dtype and size, and why.

`KERNEL_TABLE` is data: rows in order of preference; the first that is for the tensors, present and switched on is
taken, and torch where there is none. `hp-plugin doctor` prints it. The CPU has no rows: its native kernels are chosen
beside the references, by what the memory allows.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from hp_plugin.core.kernels.availability import SWITCH, absent_sets, switched_on

_HALF = (torch.bfloat16, torch.float16)
_FLOATS = (torch.float32, *_HALF)
_NO_STAND_INS: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class KernelRow:
    """An implementation of an operation.

    Attributes:
        operation: Name of the operation.
        implementation: Name of a set of `availability.SETS`.
        devices: Device types that it serves.
        dtypes: Dtypes of the tensor that is written (for a norm: read).
        min_rows: Only for matrices of at least so many rows (the shorter dim).
        reason: Why it stands where it stands.
    """

    operation: str
    implementation: str
    devices: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    reason: str
    min_rows: int = 0


DEVICE_TYPES = ("cuda", "npu")
"""Device types that the table knows."""
_BOTH = DEVICE_TYPES
KERNEL_TABLE: tuple[KernelRow, ...] = (
    KernelRow("accumulate_scaled_", "triton", _BOTH, _FLOATS, "one pass instead of a cast, a product and a sum"),
    KernelRow("accumulate_scaled_", "apex", ("cuda",), _FLOATS, "one pass, where Triton is not wanted"),
    KernelRow("scale_copy_", "triton", _BOTH, _FLOATS, "one pass instead of a cast and a product"),
    KernelRow("scale_copy_", "apex", ("cuda",), _FLOATS, "one pass, where Triton is not wanted"),
    KernelRow("decay_update_", "triton", _BOTH, _FLOATS, "unpacks, decays and updates in one pass, rounded once"),
    KernelRow("adamw_", "apex", ("cuda",), (torch.float32,), "all tensors in one launch"),
    KernelRow("adamw_", "npu", ("npu",), _FLOATS, "the vendor's fused step, one launch per tensor"),
    KernelRow("adamw_", "triton", _BOTH, _FLOATS, "one pass per tensor; gradients may be narrower"),
    KernelRow("l2_norm", "apex", ("cuda",), _FLOATS, "all tensors in one launch"),
    KernelRow("l2_norm", "triton", _BOTH, _FLOATS, "all tensors in one launch"),
    KernelRow("symmetric_product", "triton", _BOTH, _HALF, "half of the product is computed", min_rows=256),
    KernelRow(
        "symmetric_product",
        "blocks",
        _BOTH,
        (*_FLOATS, torch.float64),
        "5/8 of the product from two levels of blocks of vendor products, which float32 has no tile for",
        min_rows=2048,
    ),
    KernelRow(
        "accumulate_weight_gradient_", "apex", ("cuda",), _FLOATS, "adds the product to main_grad without a temporary"
    ),
    KernelRow("rms_norm", "npu", ("npu",), _FLOATS, "one launch"),
    KernelRow("swiglu", "npu", ("npu",), _FLOATS, "one launch"),
    KernelRow("grouped_matmul", "npu", ("npu",), _FLOATS, "one launch for all experts"),
)


class Kernels:
    """The table, applied to what is present and switched on.

    Args:
        on: Sets that are switched on.
        absent: Of sets that are not present, why.
        stand_ins: Device types whose tensors are served as those of another, for tests of the device paths on CPU.
    """

    def __init__(
        self, on: frozenset[str], absent: Mapping[str, str], stand_ins: Mapping[str, str] = _NO_STAND_INS
    ) -> None:
        self._on, self._absent, self._stand_ins = on, absent, stand_ins
        self._chosen: dict[tuple[str, str, torch.dtype, int], str] = {}

    def choose(self, operation: str, device_type: str, dtype: torch.dtype, rows: int = 0) -> str:
        """The implementation for an operation: a name of `SETS`, or `torch`.

        Args:
            operation: Name of the operation.
            device_type: Of the tensors.
            dtype: Of the tensor that is written.
            rows: Of a matrix, the length of the shorter dim.
        """
        key = (operation, device_type, dtype, rows)
        found = self._chosen.get(key)
        if found is None:
            served = self._stand_ins.get(device_type, device_type)
            rows_for = (
                row.implementation
                for row in KERNEL_TABLE
                if row.operation == operation
                and served in row.devices
                and dtype in row.dtypes
                and rows >= row.min_rows
                and self.missing(row.implementation) is None
            )
            found = self._chosen[key] = next(rows_for, "torch")
        return found

    def missing(self, implementation: str) -> str | None:
        """Why a set is not used, as a sentence, or None if it is."""
        if implementation in self._absent:
            return self._absent[implementation]
        if implementation not in self._on:
            return f"Off: it has never run on such a device. {SWITCH}={implementation} switches it on."
        return None


@functools.lru_cache(maxsize=1)
def kernels() -> Kernels:
    """What is chosen in this process; looked up at the first call.

    Raises:
        ConfigurationError: `HP_KERNELS` names what there is not.
    """
    return Kernels(switched_on(os.environ.get(SWITCH, "")), absent_sets())


def operations() -> tuple[str, ...]:
    """The operations of the table, in its order."""
    return tuple(dict.fromkeys(row.operation for row in KERNEL_TABLE))
