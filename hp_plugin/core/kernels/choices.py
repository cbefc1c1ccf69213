"""Which implementation serves each operation, and why: what ``hp-plugin doctor`` prints of this package."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from hp_plugin.core.kernels import table
from hp_plugin.core.kernels.native import native_status

# Operation -> the tensors that its native kernel takes.
_NATIVE_SCOPES: Mapping[str, str] = MappingProxyType(
    {
        "accumulate_scaled_": "contiguous tensors, float32 destination, float32 or bfloat16 source",
        "scale_copy_": "contiguous tensors, float32 or bfloat16 source to float32, float32 source to bfloat16",
        "sum_in_order_": "contiguous tensors, float32 terms to float32, bfloat16 terms to bfloat16 or float32",
    }
)
COUNTERS = "shared_memory_counters"


@dataclass(frozen=True)
class KernelChoice:
    """One line of :func:`chosen_kernels`.

    Attributes:
        operation: name of the operation, for example ``accumulate_scaled_``.
        device_type: torch device type, or ``other`` for every type without an entry of its own.
        implementation: ``native``, ``torch``, or ``none`` for an operation that torch has no substitute for.
        applies_to: what this implementation is used for; torch serves the rest.
        reason: one sentence that says why.
    """

    operation: str
    device_type: str
    implementation: str
    applies_to: str
    reason: str


def chosen_kernels() -> tuple[KernelChoice, ...]:
    """Lists which implementation serves each operation, per device type; loads the native library if it is there.

    On devices that is every row of the table of kernels, with what it would be used for and why it is or is not.

    Raises:
        ConfigurationError: ``HP_NATIVE_LIBRARY`` names a file that cannot be used, or ``HP_KERNELS`` what there is not.
    """
    status = native_status()
    choices = []
    for operation, scope in _NATIVE_SCOPES.items():
        if status.library is not None:
            reason = f"{status.reason} Build: {status.library.build_info}."
            choices.append(KernelChoice(operation, "cpu", "native", scope, reason))
        else:
            choices.append(KernelChoice(operation, "cpu", "torch", "all tensors", status.reason))
        reason = "There is no kernel for other devices, or none that is used."
        choices.append(KernelChoice(operation, "other", "torch", "all tensors", reason))
    if status.library is not None:
        scope = "ranks of one host: publish, wait, barrier, life locks"
        choices.append(KernelChoice(COUNTERS, "cpu", "native", scope, status.reason))
    else:
        scope = "nothing: ranks of one host communicate through torch.distributed"
        choices.append(KernelChoice(COUNTERS, "cpu", "none", scope, status.reason))
    return (*choices, *_device_choices())


def _device_choices() -> list[KernelChoice]:
    """Of each row of the table and device: the implementation, or torch and why it is not that."""
    chosen = table.kernels()
    found = []
    served: dict[tuple[str, str], str] = {}
    for device_type in table.DEVICE_TYPES:
        for row in table.KERNEL_TABLE:
            if device_type not in row.devices:
                continue
            dtypes = "/".join(str(dtype).removeprefix("torch.") for dtype in row.dtypes)
            rows = f", {row.min_rows} rows or more" if row.min_rows else ""
            missing = chosen.missing(row.implementation)
            first = served.get((device_type, row.operation))
            if missing is None and first is not None:
                missing = f"Serves only what {first} does not."
            elif missing is None and not row.min_rows:
                served[device_type, row.operation] = row.implementation
            implementation = row.implementation if missing is None else "torch"
            reason = f"{row.reason}." if missing is None else f"{row.implementation}: {missing}"
            found.append(KernelChoice(row.operation, device_type, implementation, f"{dtypes}{rows}", reason))
    return found
