"""From any format that is read to any that is written."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from hp_plugin.convert import hyperfsdp, safetensors, universal
from hp_plugin.convert.contents import Contents, Stored, checksum, number
from hp_plugin.convert.detect import find_tag, open_checkpoint
from hp_plugin.errors import ConfigurationError, HyperParallelError, UnsupportedError

FORMATS = ("hyperfsdp", "universal", "safetensors")
"""That can be written."""
DEFAULT_MAX_BYTES = 5 * 10**9


@dataclass
class Report:
    """What was converted.

    Attributes:
        source: Folder that was read.
        source_format: What it is.
        destination: Folder that was written.
        weights: Number of parameters, tied ones counted once.
        elements: Of them together.
        buffers: Number of buffers.
        states: Number of optimizer state tensors that were written.
        notes: Sentences on what did not come along.
        verified: Number of tensors that were read back and compared; None where that was not asked for.
    """

    source: str
    source_format: str
    destination: str
    weights: int
    elements: int
    buffers: int
    states: int
    notes: list[str] = field(default_factory=list)
    verified: int | None = None


def convert(
    source: Path,
    destination: Path,
    *,
    to: str,
    dtype: torch.dtype | None = None,
    max_bytes: int = DEFAULT_MAX_BYTES,
    verify: bool = False,
) -> Report:
    """Converts a checkpoint. One process, no process group, the memory of about one parameter.

    Args:
        source: The folder of one save, or one with a file that names the latest.
        destination: For "safetensors" the folder of the files; else a folder as `load_checkpoint` takes it, in which
            the folder of the save and the file that names it are made.
        to: One of `FORMATS`.
        dtype: Of floating weights, for "safetensors"; None leaves them, which is fp32 where there are masters.
        max_bytes: Of a file of "safetensors".
        verify: Read back what was written and compare names, numbers of elements and checksums.

    Raises:
        ConfigurationError: The source cannot be read, or the destination exists.
        UnsupportedError: The destination's format cannot hold it.
        HyperParallelError: What was read back is not what was written.
    """
    tag = find_tag(source)
    contents = open_checkpoint(tag)
    expected, place, finish = _prepared(contents, tag, destination, to, dtype, max_bytes)
    finish()
    report = Report(
        str(tag),
        contents.format,
        str(place),
        len(contents.weights),
        sum(stored.numel for stored in contents.weights.values()),
        len(expected.buffers),
        sum(isinstance(v, Stored) and bool(v.shape) for state in expected.state.values() for v in state.values()),
        [*contents.missing, *_lost(contents, to)],
    )
    if verify:
        report.verified = compare(expected, open_checkpoint(place))
    return report


def compare(expected: Contents, found: Contents) -> int:
    """The number of tensors, all of which are equal in name, shape and CRC-32.

    Raises:
        HyperParallelError: One is not, with its name.
    """
    ours = {_place(key): stored for key, stored in expected.tensors()}
    theirs = {_place(key): stored for key, stored in found.tensors()}
    if ours.keys() != theirs.keys():
        absent, beyond = sorted(ours.keys() - theirs.keys()), sorted(theirs.keys() - ours.keys())
        raise HyperParallelError(
            f"what was written differs: {len(absent)} tensors are missing ({', '.join(absent[:3])}), {len(beyond)} "
            f"are beyond ({', '.join(beyond[:3])})."
        )
    for key, stored in ours.items():
        other = theirs[key]
        if stored.shape != other.shape or checksum(stored.read()) != checksum(other.read()):
            raise HyperParallelError(
                f"{key} of shape {stored.shape} is not what was written: shape {other.shape}, or other values."
            )
    for name, state in expected.state.items():
        if "step" in state and number(state["step"]) != number(found.state.get(name, {}).get("step", -1.0)):
            raise HyperParallelError(f"the step of {name} is not the one that was written, {number(state['step']):g}.")
    if expected.tied != found.tied:
        raise HyperParallelError(f"tied weights differ: {expected.tied} were written, {found.tied} are read.")
    return len(ours)


def _place(key: str) -> str:
    """Formats without a place for buffers keep them among the weights."""
    return key.replace("buffer ", "weight ", 1) if key.startswith("buffer ") else key


def _prepared(
    contents: Contents, tag: Path, destination: Path, to: str, dtype: torch.dtype | None, max_bytes: int
) -> tuple[Contents, Path, Callable[[], None]]:
    """What is to be found in the destination, its folder, and what writes it."""
    if contents.format.startswith("Megatron") and to != "safetensors":
        raise UnsupportedError(
            f"{tag} is a checkpoint of Megatron, whose names and stacked layers no {to} checkpoint of a DeepSpeed job "
            "has; use --to safetensors, or let Megatron load it: HyperFSDP's jobs read torch_dist as it is."
        )
    if to == "safetensors":
        if dtype is not None:
            weights = {name: stored.as_dtype(dtype) for name, stored in contents.weights.items()}
        else:
            weights = contents.weights
        expected = Contents("safetensors", weights, contents.buffers, contents.tied)
        _refuse_existing(destination, safetensors.is_safetensors(destination))
        return expected, destination, lambda: safetensors.write(expected, destination, max_bytes=max_bytes)
    if dtype not in (None, torch.float32):
        raise ConfigurationError(f"--dtype is for --to safetensors; {to} keeps masters in fp32.")
    name = _tag_name(contents, tag)
    place = destination / name
    whole = {n: s.as_dtype(torch.float32) if n not in contents.frozen else s for n, s in contents.weights.items()}
    contents.weights = whole
    if to == "hyperfsdp":
        _refuse_existing(place, (place / hyperfsdp.FOLDER).exists())
        return contents, place, lambda: _with_latest(hyperfsdp.write, contents, place, "latest")
    if to == "universal":
        _refuse_existing(place, place.exists())
        return _of_universal(contents), place, lambda: _with_latest(universal.write, contents, place, universal.LATEST)
    raise ConfigurationError(f"--to is {to!r}; choose one of {', '.join(FORMATS)}.")


def _with_latest(write: Callable[[Contents, Path], None], contents: Contents, place: Path, latest: str) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    write(contents, place)
    partial = place.parent / f".{latest}.partial"
    partial.write_text(place.name, encoding="utf-8")
    os.replace(partial, place.parent / latest)


def _of_universal(contents: Contents) -> Contents:
    """What the universal layout has of a checkpoint: all in fp32, and moments alone."""
    state = {
        name: {key: value for key, value in values.items() if key in ("exp_avg", "exp_avg_sq", "step")}
        for name, values in contents.state.items()
    }
    weights = {name: stored.as_dtype(torch.float32) for name, stored in contents.weights.items()}
    return Contents("universal", weights, contents.buffers, contents.tied, set(contents.frozen), state)


def _tag_name(contents: Contents, tag: Path) -> str:
    return f"global_step{contents.counters['global_steps']}" if "global_steps" in contents.counters else tag.name


def _refuse_existing(place: Path, exists: bool) -> None:
    if exists:
        raise ConfigurationError(f"{place} exists already; remove it or give another destination.")


def _lost(contents: Contents, to: str) -> list[str]:
    notes = []
    if to == "safetensors" and contents.state:
        notes.append("optimizer state, counters and scheduler are not written: safetensors holds weights alone")
    if to == "universal" and (contents.frozen or contents.buffers):
        notes.append(
            "DeepSpeed takes no frozen parameters and no buffers from a universal checkpoint; load them into the "
            f"model before deepspeed.initialize ({len(contents.frozen)} frozen, {len(contents.buffers)} buffers)"
        )
    if to == "universal" and contents.clients:
        notes.append("client states differ between ranks; that of rank 0 is written for all")
    return notes
