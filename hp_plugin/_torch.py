"""Imports torch when it is imported, and explains the one failure of that which is not torch's own.

torch imports the packages of other devices by itself. Where one of them fails, so does torch, and with it we.
"""

from __future__ import annotations

_BACKEND_FAILED = "Failed to load the backend extension"


def explanation(error: RuntimeError) -> str:
    """What a failed import of a device's package means and what to do."""
    name = str(error).removeprefix(_BACKEND_FAILED).lstrip(": ").split(". ")[0].strip(". ")
    cause = error.__cause__
    found = f": {cause}" if cause is not None else ""
    advice = "make its libraries findable"
    if name == "torch_npu":
        advice = "make CANN's libraries findable (source its set_env.sh; torch_npu needs the CANN of its release)"
    return (
        f"torch cannot be imported, since it loads {name} by itself and that fails{found}. To use the device, "
        f"{advice}. To go on without it, set TORCH_DEVICE_BACKEND_AUTOLOAD=0: hp_plugin then runs on what else torch "
        f"finds, and a program that wants the device imports {name} itself, before hp_plugin"
    )


try:
    import torch  # noqa: F401
except RuntimeError as failure:
    if not str(failure).startswith(_BACKEND_FAILED):
        raise
    raise ImportError(explanation(failure)) from failure
