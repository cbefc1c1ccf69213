"""Which format a folder is in."""

from __future__ import annotations

from pathlib import Path

from hp_plugin.convert import hyperfsdp, safetensors, torch_dist, universal, zero
from hp_plugin.convert.contents import Contents
from hp_plugin.errors import ConfigurationError, UnsupportedError

_LATEST = ("latest", universal.LATEST)
_MEGATRON_LATEST = "latest_checkpointed_iteration.txt"
_READERS = {
    "torch_dist": (torch_dist.is_torch_dist, torch_dist.read),
    "hyperfsdp": (hyperfsdp.is_hyperfsdp, hyperfsdp.read),
    "universal": (universal.is_universal, universal.read),
    "zero": (zero.is_zero, zero.read),
    "safetensors": (safetensors.is_safetensors, safetensors.read),
}


def format_of(folder: Path) -> str | None:
    """Name of a folder's format; None where it is none that is known."""
    return next((name for name, (is_it, _) in _READERS.items() if folder.is_dir() and is_it(folder)), None)


def find_tag(source: Path) -> Path:
    """The folder of one save: `source` itself, or the one that a file `latest` in it names.

    Raises:
        ConfigurationError: There is no checkpoint.
        UnsupportedError: It is one of a format that is not read.
    """
    if not source.is_dir():
        raise ConfigurationError(f"{source} is no folder; give the folder of a checkpoint, or one with a file latest.")
    if format_of(source) is not None:
        return source
    for file in _LATEST:
        if (source / file).is_file():
            return _checked(source / (source / file).read_text(encoding="utf-8").strip())
    if (source / _MEGATRON_LATEST).is_file():
        iteration = (source / _MEGATRON_LATEST).read_text(encoding="utf-8").strip()
        return _checked(source / (f"iter_{int(iteration):07d}" if iteration.isdigit() else iteration))
    return _checked(source)


def open_checkpoint(source: Path) -> Contents:
    """What is in the folder of one save.

    Raises:
        ConfigurationError: It is no checkpoint, or files are missing.
        UnsupportedError: It is of a kind that is not read.
    """
    found = format_of(source)
    if found is None:
        _checked(source)
    assert found is not None
    return _READERS[found][1](source)


def _checked(folder: Path) -> Path:
    if format_of(folder) is not None:
        return folder
    if any(folder.glob("mp_rank_*/model_optim_rng.pt")):
        raise UnsupportedError(
            f"{folder} is in Megatron's format torch, which is read by Megatron alone; save it once more with "
            "--ckpt-format torch_dist (--ckpt-convert-format torch_dist)."
        )
    raise ConfigurationError(
        f"{folder} holds no checkpoint that is known. Known are those of DeepSpeed (ZeRO, universal), HyperFSDP, "
        "Megatron torch_dist and safetensors; give the folder of one save, or one with a file latest."
    )
