"""Weights as Hugging Face keeps them: `model.safetensors`, or numbered files with `model.safetensors.index.json`.

A file is the length of a JSON header in 8 bytes, the header with names, dtypes, shapes and offsets, and the elements.
It is written and read here tensor by tensor, so that no more than one is in memory.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from hp_plugin.convert.contents import Contents, Stored
from hp_plugin.errors import ConfigurationError, UnsupportedError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_TIED = "tied"


def is_safetensors(folder: Path) -> bool:
    """Whether a folder has weights in this format."""
    return (folder / INDEX).is_file() or any(folder.glob("*.safetensors"))


def write(contents: Contents, folder: Path, *, max_bytes: int, dtype: torch.dtype | None = None) -> None:
    """Makes files of weights and buffers in `folder`, and an index where there are several.

    Args:
        contents: Of any format. Optimizer state is left out; tied weights are written once, as Hugging Face does.
        folder: Made if it does not exist. The index comes last, so an interrupted run leaves none.
        max_bytes: A file has at most so many bytes of elements, unless one tensor alone has more.
        dtype: Of floating weights; None leaves them. Buffers keep theirs.

    Raises:
        UnsupportedError: A dtype that the format does not have.
    """
    tensors = {name: stored.as_dtype(dtype) for name, stored in contents.weights.items()} | contents.buffers
    for name, stored in tensors.items():
        if stored.dtype not in _NAMES:
            raise UnsupportedError(f"{name} has the dtype {stored.dtype}, which safetensors does not have.")
    folder.mkdir(parents=True, exist_ok=True)
    files = list(_divided(tensors, max_bytes))
    weight_map: dict[str, str] = {}
    for number, names in enumerate(files, start=1):
        file = SINGLE if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        _write_file({name: tensors[name] for name in names}, contents.tied, folder / file)
        weight_map |= dict.fromkeys(names, file)
    if len(files) > 1:
        total = sum(_bytes(stored) for stored in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        partial = folder / f".{INDEX}.partial"
        partial.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        os.replace(partial, folder / INDEX)


def read(folder: Path) -> Contents:
    """The weights in a folder.

    Raises:
        ConfigurationError: A file is missing or damaged.
    """
    found = Contents("safetensors", weights={})
    for file in _files(folder):
        header, start = _header(file)
        metadata = header.pop("__metadata__", {})
        found.tied |= json.loads(metadata.get(_TIED, "{}"))
        for name, entry in header.items():
            found.weights[name] = _stored(file, start, name, entry)
    found.missing.append("safetensors has weights and buffers, but no optimizer state, counters or scheduler")
    return found


def _files(folder: Path) -> list[Path]:
    if not (folder / INDEX).is_file():
        return sorted(folder.glob("*.safetensors"))
    weight_map = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
    files = [folder / name for name in sorted(set(weight_map.values()))]
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise ConfigurationError(f"{folder} lacks {', '.join(absent)}, which its index names; copy them too.")
    return files


def _header(file: Path) -> tuple[dict[str, Any], int]:
    with file.open("rb") as stream:
        length = stream.read(8)
        size = struct.unpack("<Q", length)[0] if len(length) == 8 else 0
        text = stream.read(size) if 0 < size <= file.stat().st_size else b""
    if not text or len(text) != size:
        raise ConfigurationError(f"{file} is no file of safetensors, or is damaged: its header is incomplete.")
    return json.loads(text), 8 + size


def _stored(file: Path, start: int, name: str, entry: dict[str, Any]) -> Stored:
    shape, dtype = tuple(entry["shape"]), _DTYPES.get(entry["dtype"])
    if dtype is None:
        raise UnsupportedError(f"{name} in {file} has the dtype {entry['dtype']}, which cannot be read here.")
    first, last = entry["data_offsets"]
    stored = Stored(shape, dtype, lambda: _read(file, start + first, shape, dtype))
    if last - first != _bytes(stored) or start + last > file.stat().st_size:
        raise ConfigurationError(f"{name} in {file} has {last - first} bytes where {_bytes(stored)} are needed.")
    return stored


def _read(file: Path, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    found = torch.empty(shape, dtype=dtype)
    if found.numel():
        with file.open("rb") as stream:
            stream.seek(offset)
            stream.readinto(found.view(-1).view(torch.uint8).numpy())
    return found


def _divided(tensors: dict[str, Stored], max_bytes: int) -> Iterator[list[str]]:
    names: list[str] = []
    size = 0
    for name, stored in tensors.items():
        if names and size + _bytes(stored) > max_bytes:
            yield names
            names, size = [], 0
        names.append(name)
        size += _bytes(stored)
    yield names


def _write_file(tensors: dict[str, Stored], tied: dict[str, str], file: Path) -> None:
    metadata = {"format": "pt"}
    if own := {alias: name for alias, name in tied.items() if name in tensors}:
        metadata[_TIED] = json.dumps(own)
    header: dict[str, Any] = {"__metadata__": metadata}
    offset = 0
    for name, stored in tensors.items():
        end = offset + _bytes(stored)
        header[name] = {"dtype": _NAMES[stored.dtype], "shape": list(stored.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    partial = file.with_name(f".{file.name}.partial")
    with partial.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for stored in tensors.values():
            flat = stored.read().contiguous().view(-1)
            if flat.numel():
                stream.write(memoryview(flat.view(torch.uint8).numpy()))
    os.replace(partial, file)


def _bytes(stored: Stored) -> int:
    return stored.numel * stored.dtype.itemsize
