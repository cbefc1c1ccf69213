"""Puts the layer in and takes it out."""

from __future__ import annotations

import sys

import torch

from hp_plugin.errors import ConfigurationError, UnsupportedError
from hp_plugin.megatron import reporting
from hp_plugin.megatron.cpu_compat import devices, distributed, factories, megatron_names, rng
from hp_plugin.megatron.cpu_compat.patches import Ledger
from hp_plugin.megatron.releases import versions

_ledger: Ledger | None = None
# Process-wide by nature: it lists what was replaced in torch and Megatron, which are process-wide too.


def install() -> None:
    """Emulate ``torch.cuda`` names on CPU for Megatron in this process, and say so in one line on rank 0.

    Must run before Megatron is imported, since Megatron copies some of the names. A second call does nothing. Where
    there is ``megatron.core`` alone, what only ``megatron.training`` needs is left out.

    Raises:
        UnsupportedError: An accelerator is present, or the Megatron release is not supported.
        ConfigurationError: Megatron has been imported already.
    """
    global _ledger
    if _ledger is not None:
        return
    _refuse_accelerator()
    series = versions.series(versions.check_megatron(training=False))
    if "megatron.core" in sys.modules:
        raise ConfigurationError(
            "the CPU compatibility layer must be in place before Megatron is imported, and megatron.core is imported "
            "already; call hp_plugin.megatron.install() first, or start the job with python -m hp_plugin.megatron."
        )
    ledger = Ledger()
    try:
        # Megatron's jit_fuser is torch.compile, which would compile for a GPU that is not there.
        ledger.set_variable("TORCHDYNAMO_DISABLE", "1")
        for part in (devices, factories, rng, distributed):
            part.apply(ledger)
        megatron_names.apply(ledger, series)
    except BaseException:
        ledger.undo()
        raise
    _ledger = ledger
    reporting.say(announcement())


def restore() -> None:
    """Put every replaced name back. For tests: modules of Megatron that copied a name keep the copy."""
    global _ledger
    if _ledger is not None:
        _ledger.undo()
        _ledger = None


def is_installed() -> bool:
    """Whether the layer is in place in this process."""
    return _ledger is not None


def table() -> list[dict[str, str]]:
    """What is replaced at this moment, as ``{"name": ..., "area": ...}``; empty when the layer is not in place."""
    return [] if _ledger is None else [{"name": patch.name, "area": patch.area} for patch in _ledger.patches]


def announcement() -> str:
    """The line that is printed when the layer goes in."""
    areas = dict.fromkeys(entry["area"] for entry in table())
    return (
        f"CPU compatibility layer is on: {len(table())} names of torch.cuda, torch.distributed and Megatron are "
        f"emulated on CPU and gloo ({', '.join(areas)}); for tests and tutorials, not a measure of any accelerator."
    )


def _refuse_accelerator() -> None:
    if torch.cuda.is_available() or torch.accelerator.is_available():
        name = "CUDA" if torch.cuda.is_available() else str(torch.accelerator.current_accelerator())
        raise UnsupportedError(
            f"the CPU compatibility layer was asked for (--hyperfsdp-device cpu or {_VARIABLE}=cpu), but this machine "
            f"has a real accelerator ({name}), which it would hide; remove the request, or hide the device from the "
            'job, for example with CUDA_VISIBLE_DEVICES="".'
        )


_VARIABLE = "HP_DEVICE"
