"""Checkpoints of HyperFSDP: one folder in torch's distributed format (DCP), by the names of parameters.

A DeepSpeed job keeps it as `<tag>/hyperfsdp`, with counters, scheduler and client state in `extra`; a job that calls
`hp_plugin.save_checkpoint` gives the folder itself a name and `extra` a meaning of its own.
"""

from __future__ import annotations

import contextlib
import io
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from hp_plugin.convert.contents import Contents, StateValue, Stored
from hp_plugin.convert.saving import save
from hp_plugin.errors import ConfigurationError

FOLDER = "hyperfsdp"
COUNTERS = ("global_steps", "global_samples", "skipped_steps")
_STATE, _GROUPS, _CLIENT = "optimizer.state.", "optimizer.param_groups.", "extra.client_"


class Reader(dcp.FileSystemReader):
    """Reads the index of a checkpoint once, however many tensors are asked for."""

    _index: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index."""
        if self._index is None:
            try:
                self._index = super().read_metadata(*args, **kwargs)
            except FileNotFoundError as error:
                raise ConfigurationError(f"{self.path} holds no checkpoint: it has no .metadata file.") from error
        return self._index

    def tensor(self, key: str) -> Stored:
        """One tensor, read when it is asked for."""
        entry = self.read_metadata().state_dict_metadata[key]
        assert isinstance(entry, TensorStorageMetadata)
        shape, dtype = tuple(entry.size), entry.properties.dtype

        def read() -> torch.Tensor:
            found = {key: torch.empty(shape, dtype=dtype)}
            with _alone():
                dcp.load(found, storage_reader=self, no_dist=True)
            return found[key]

        return Stored(shape, dtype, read)

    def value(self, key: str) -> Any:
        """Anything that is no tensor."""
        found: dict[str, Any] = {key: None}
        with _alone():
            dcp.load(found, storage_reader=self, no_dist=True)
        return found[key]

    def is_tensor(self, key: str) -> bool:
        """Whether an entry is one."""
        return isinstance(self.read_metadata().state_dict_metadata[key], TensorStorageMetadata)


def is_hyperfsdp(folder: Path) -> bool:
    """Whether a folder is a tag of a DeepSpeed job with HyperFSDP, or a checkpoint of `hp_plugin.save_checkpoint`."""
    if (folder / FOLDER / ".metadata").is_file():
        return True
    if not (folder / ".metadata").is_file():
        return False
    return any(key.startswith("model.") for key in Reader(str(folder)).read_metadata().state_dict_metadata)


def engine_state(folder: Path) -> dict[str, Any]:
    """What the engine keeps beside the tensors; empty for a checkpoint of another job."""
    reader = Reader(str(_inner(folder)))
    has = "extra.engine" in reader.read_metadata().state_dict_metadata
    return unpacked(reader.value("extra.engine")) if has else {}


def read(folder: Path) -> Contents:
    """What a checkpoint of HyperFSDP holds.

    Raises:
        ConfigurationError: There is none.
    """
    reader = Reader(str(_inner(folder)))
    keys = list(reader.read_metadata().state_dict_metadata)
    engine = unpacked(reader.value("extra.engine")) if "extra.engine" in keys else {}
    tied, buffers = dict(engine.get("tied", {})), set(engine.get("buffers", ()))
    names = [key.removeprefix("model.") for key in keys if key.startswith("model.") and reader.is_tensor(key)]
    found = Contents(
        "HyperFSDP" if "converted" not in engine else f"HyperFSDP, converted from {engine['converted']}",
        weights={n: reader.tensor(f"model.{n}") for n in names if n not in tied and n not in buffers},
        buffers={n: reader.tensor(f"model.{n}") for n in names if n in buffers},
        tied=tied,
        state=_state(reader, keys),
        groups=_groups(reader, keys),
        optimizer_class=engine.get("optimizer"),
        counters={name: engine[name] for name in COUNTERS if name in engine},
        scheduler=engine.get("lr_scheduler"),
        loss_scale=engine.get("loss_scaler"),
    )
    found.frozen = set(found.weights) - set(found.state) if found.state else set()
    found.optimizer = _kind(found)
    clients = {int(key.removeprefix(_CLIENT)): unpacked(reader.value(key)) for key in keys if key.startswith(_CLIENT)}
    found.client = clients.pop(0, {})
    found.clients = clients
    return found


def write(contents: Contents, folder: Path) -> None:
    """Makes `<folder>/hyperfsdp`, whole or not at all; tensors are read and written one by one.

    Args:
        contents: Of any format.
        folder: The tag.
    """
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f".{FOLDER}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    lazy: dict[str, Stored] = {}
    state = _laid_out(contents, lazy)
    try:
        with _alone():
            dcp.save(state, storage_writer=_Writer(str(partial)), planner=_LazyPlanner(lazy), no_dist=True)
        shutil.rmtree(folder / FOLDER, ignore_errors=True)
        partial.rename(folder / FOLDER)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """One process reads or writes, which is what is meant: torch need not say so for every tensor."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


class _LazyPlanner(DefaultSavePlanner):
    """Knows shapes while it plans, and reads a tensor when its turn to be written comes."""

    def __init__(self, lazy: Mapping[str, Stored]) -> None:
        super().__init__()
        self._lazy = lazy

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The tensor itself."""
        stored = self._lazy.get(index.fqn)
        return super().lookup_object(index) if stored is None else stored.read()


class _Writer(dcp.FileSystemWriter):
    """Writes one file, item by item; torch's own keeps all tensors of a file alive until the file is complete."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Everything that was planned."""
        name, results = "__0_0.distcp", []
        with Path(self.path, name).open("wb") as stream:
            for item in plan.items:
                start = stream.tell()
                data = planner.resolve_data(item)
                if isinstance(data, io.BytesIO):
                    stream.write(data.getbuffer())
                else:
                    save(data.detach().contiguous(), stream)
                length = stream.tell() - start
                results.append(WriteResult(item.index, length, _StorageInfo(name, start, length)))
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done


def _laid_out(contents: Contents, lazy: dict[str, Stored]) -> dict[str, Any]:
    """The state dict that `hp_plugin.core.checkpoint` would save, with tensors on no device."""

    def placeholder(key: str, stored: Stored) -> torch.Tensor:
        lazy[key] = stored
        return torch.empty(stored.shape, dtype=stored.dtype, device="meta")

    model = {**contents.weights, **contents.buffers}
    model |= {alias: contents.weights[name] for alias, name in contents.tied.items()}
    state: dict[str, dict[str, Any]] = {}
    for name, values in contents.state.items():
        state[name] = {}
        for key, value in values.items():
            if isinstance(value, Stored):
                state[name][key] = placeholder(f"{_STATE}{name}.{key}", value)
            else:
                state[name][key] = torch.tensor(float(value))
    clients = {0: contents.client, **contents.clients}
    return {
        "model": {name: placeholder(f"model.{name}", stored) for name, stored in model.items()},
        "optimizer": {"state": state, "param_groups": contents.groups},
        "extra": {
            "engine": packed(_engine(contents)),
            **{f"client_{rank}": packed(client) for rank, client in clients.items()},
        },
    }


def _engine(contents: Contents) -> dict[str, Any]:
    return {
        **{name: contents.counters.get(name, 0) for name in COUNTERS},
        "lr_scheduler": contents.scheduler,
        "loss_scaler": contents.loss_scale,
        "dp_world_size": 1,
        "mesh": None,
        "optimizer": contents.optimizer_class,
        "config": None,
        "tied": dict(contents.tied),
        "buffers": sorted(contents.buffers),
        "converted": contents.format,
    }


def _inner(folder: Path) -> Path:
    return folder / FOLDER if (folder / FOLDER).is_dir() else folder


def _state(reader: Reader, keys: list[str]) -> dict[str, dict[str, StateValue]]:
    found: dict[str, dict[str, StateValue]] = {}
    for key in keys:
        if not key.startswith(_STATE) or not reader.is_tensor(key):
            continue
        name, _, leaf = key.removeprefix(_STATE).rpartition(".")
        found.setdefault(name, {})[leaf] = reader.tensor(key)
    return found


def _groups(reader: Reader, keys: list[str]) -> list[dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    for key in keys:
        if key.startswith(_GROUPS):
            index, _, option = key.removeprefix(_GROUPS).partition(".")
            value = reader.tensor(key).read() if reader.is_tensor(key) else reader.value(key)
            found.setdefault(int(index), {})[option] = value
    return [found[index] for index in sorted(found)]


def _kind(found: Contents) -> str | None:
    keys = {key for values in found.state.values() for key in values}
    algorithms = {group.get("algorithm") for group in found.groups}
    if "muon" in algorithms or ("momentum_buffer" in keys and "exp_avg" in keys):
        return "muon"
    return "adam" if {"exp_avg", "exp_avg_sq"} <= keys else ("other" if keys else None)


def packed(state: Mapping[str, Any]) -> bytes:
    """What is no tensor of the model, as one entry of a checkpoint."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def unpacked(blob: bytes) -> dict[str, Any]:
    """Undoes `packed`. Written by a job's own save; like DeepSpeed's files it may hold objects of any class."""
    found: dict[str, Any] = torch.load(io.BytesIO(blob), map_location="cpu", weights_only=False)
    return found
