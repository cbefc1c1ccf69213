"""A checkpoint as Megatron 0.12 writes it with its distributed optimizer, made from one that this release has written.

Stock of newer releases cannot write `fully_sharded_model_space`. Here the optimizer state of a job without the
distributed optimizer, whose tensors have the same names, is cut into blocks as a tensor-parallel job of 0.12 would have
it, and each block is flattened; the common part is put in 0.12's order. `tests/megatron/releases` has the same from
0.12 itself.
"""

from __future__ import annotations

import itertools
import json
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

_STATE = "optimizer.state."
_COLUMNS = ("linear_proj.weight", "linear_fc2.weight")  # cut along columns by tensor parallelism
_STACKED = "decoder.layers."


def flattened(image: torch.Tensor, grid: tuple[int, ...]) -> torch.Tensor:
    """`image` as Megatron 0.12 stores it: a flattened block in every place of the grid."""
    sizes = [size // count for size, count in zip(image.shape, grid)]
    stored = torch.empty(*grid, torch.Size(sizes).numel(), dtype=image.dtype)
    for index in itertools.product(*map(range, grid)):
        stored[index] = image[tuple(slice(i * s, (i + 1) * s) for i, s in zip(index, sizes))].reshape(-1)
    return stored


def rewrite(source: Path, target: Path, *, tensor_parallel: int) -> None:
    """Write the checkpoint of the iteration folder `source` to `target`, which must not exist."""
    from megatron.core import dist_checkpointing

    metadata = FileSystemReader(source).read_metadata()
    state: dict[str, Any] = {}
    for key, entry in metadata.state_dict_metadata.items():
        is_tensor = isinstance(entry, TensorStorageMetadata)
        state[key] = torch.empty(entry.size, dtype=entry.properties.dtype) if is_tensor else None
    whole = {"flatten_state_dict": False, "flatten_sharded_tensors": False}  # objects are one entry each
    dcp.load(state, storage_reader=FileSystemReader(source), planner=DefaultLoadPlanner(**whole), no_dist=True)
    state = {key: value for key, value in state.items() if not key.startswith("common_state/")}
    for key in [key for key in state if key.startswith(f"{_STATE}exp_avg.")]:
        weight = key.removeprefix(f"{_STATE}exp_avg.")
        state.setdefault(f"{_STATE}fp32_param.{weight}", state[weight].float())
    added = {}
    for key, value in state.items():
        if key.startswith(_STATE) and isinstance(value, torch.Tensor):
            added[key] = {"nd_reformulated_orig_global_shape": tuple(value.shape)}
            state[key] = flattened(value, _grid(key, value, tensor_parallel))
    target.mkdir(parents=True)
    dcp.save(state, storage_writer=FileSystemWriter(target), planner=DefaultSavePlanner(**whole), no_dist=True)
    written = FileSystemReader(target).read_metadata()
    written.mcore_data = added  # type: ignore[attr-defined]
    (target / ".metadata").write_bytes(pickle.dumps(written))
    torch.save(_common(dist_checkpointing.load_common_state_dict(str(source))), target / "common.pt")
    backends = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch"}
    (target / "metadata.json").write_text(json.dumps({**backends, "common_backend_version": 1}))


def _grid(key: str, value: torch.Tensor, tensor_parallel: int) -> tuple[int, ...]:
    stacked = (value.shape[0],) if _STACKED in key else ()
    own = [1] * (value.dim() - len(stacked))
    if len(own) == 2:
        own[1 if key.endswith(_COLUMNS) else 0] = tensor_parallel
    return (*stacked, *own)


def _common(common: dict[str, Any]) -> dict[str, Any]:
    saved = common["optimizer"]
    inner = saved.get("optimizer", saved)
    step = int(inner["state"]["common_step"])
    groups = [
        {**{name: value for name, value in group.items() if name != "params"}, "step": step}
        for group in inner["param_groups"]
    ]
    optimizer = {"optimizer": {"param_groups": groups}, "param_state_sharding_type": "fully_sharded_model_space"}
    kept = {name: value for name, value in common.items() if name != "content_metadata"}
    return {**kept, "optimizer": optimizer}
