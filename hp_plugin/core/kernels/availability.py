"""Which sets of device kernels are present here and switched on.

No set has run on the hardware that it is for, so all are off until `HP_KERNELS` names them. Presence is looked up, not
tried out: a vendor's package is imported only once its set is switched on.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Callable, Mapping
from types import MappingProxyType

from hp_plugin.errors import ConfigurationError

SWITCH = "HP_KERNELS"
"""Environment variable: names out of `SETS` with commas between them, or `all`."""

SETS: Mapping[str, str] = MappingProxyType(
    {
        "triton": "kernels of this package in Triton, for CUDA and Ascend",
        "blocks": "symmetric products by block recursion, for any device",
        "apex": "multi-tensor kernels and fused weight gradients of NVIDIA's apex, for CUDA",
        "npu": "fused operations of torch_npu, for Ascend",
    }
)


def switched_on(value: str) -> frozenset[str]:
    """The sets that a value of `HP_KERNELS` names.

    Raises:
        ConfigurationError: A name that is none of `SETS`.
    """
    names = [name.strip().lower() for name in value.split(",") if name.strip()]
    if names == ["all"]:
        return frozenset(SETS)
    unknown = [name for name in names if name not in SETS]
    if unknown:
        raise ConfigurationError(
            f"{SWITCH}={value} names {unknown[0]!r}; it takes {', '.join(SETS)}, with commas between them, or all"
        )
    return frozenset(names)


def absent_sets() -> dict[str, str]:
    """Of each set that cannot be used here, a sentence that says why."""
    return {name: reason for name, find in _SEARCHES.items() if (reason := find()) is not None}


def _triton_reason() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (pip install hp-plugin[cuda]; on Ascend triton-ascend)."
    return None


def _apex_reason() -> str | None:
    """Without importing it: NVIDIA's apex is recognised by the module and the extension that are used of it."""
    if importlib.util.find_spec("apex") is None:
        return "NVIDIA's apex is not installed."
    foreign = foreign_apex()
    if foreign is not None:
        return foreign
    if importlib.util.find_spec("amp_C") is None:
        return "apex is installed without its CUDA extensions (no module amp_C), and these are what would be used."
    return None


def foreign_apex() -> str | None:
    """A sentence, if a package named apex is installed that is another project; else None.

    The package of that name on PyPI is a toolkit for Pyramid of 2013.
    """
    found = importlib.util.find_spec("apex")
    if found is None:
        return None
    places = [*(found.submodule_search_locations or [])]
    if any(os.path.isdir(os.path.join(place, "multi_tensor_apply")) for place in places):
        return None
    try:
        version = importlib.metadata.version("apex")
    except importlib.metadata.PackageNotFoundError:
        version = "of unknown version"
    return (
        f"The installed package apex ({version}) is not NVIDIA's: it has no apex.multi_tensor_apply. The name apex on "
        "PyPI belongs to another project; uninstall it, and build NVIDIA's from its sources if it is wanted."
    )


def _npu_reason() -> str | None:
    return None if importlib.util.find_spec("torch_npu") is not None else "torch_npu is not installed."


_SEARCHES: Mapping[str, Callable[[], str | None]] = {"triton": _triton_reason, "apex": _apex_reason, "npu": _npu_reason}
