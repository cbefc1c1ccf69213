"""`deepspeed.utils.zero_to_fp32` on checkpoints of HyperFSDP.

`get_fp32_state_dict_from_zero_checkpoint`, `load_state_dict_from_zero_checkpoint` and the functions that write files
all read a tag's folder through one function, which learns to read ours. Tensors are read one by one, when they are
used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed.utils.zero_to_fp32 as zero_to_fp32
import torch

from hp_plugin.convert import hyperfsdp
from hp_plugin.convert.contents import Contents, Stored

_NAME = "_get_fp32_state_dict_from_zero_checkpoint"


class LazyTensor:
    """What DeepSpeed takes for a tensor of a checkpoint.

    Attributes:
        shape: Of the whole tensor.
        dtype: Of what `contiguous()` gives.
    """

    def __init__(self, stored: Stored) -> None:
        self.shape = torch.Size(stored.shape)
        self.dtype = stored.dtype
        self._stored = stored

    def contiguous(self) -> torch.Tensor:
        """Reads it, onto the host."""
        return self._stored.read()


def install() -> Callable[[], None]:
    """Replaces the function; returns what puts it back."""
    original = getattr(zero_to_fp32, _NAME)

    @functools.wraps(original)
    def state_dict(ds_checkpoint_dir: Any, exclude_frozen_parameters: bool) -> dict[str, Any]:
        folder = Path(ds_checkpoint_dir)
        if not hyperfsdp.is_hyperfsdp(folder):
            found: dict[str, Any] = original(ds_checkpoint_dir, exclude_frozen_parameters)
            return found
        return _lazy(hyperfsdp.read(folder), skip_frozen=exclude_frozen_parameters)

    def undo() -> None:
        setattr(zero_to_fp32, _NAME, original)

    setattr(zero_to_fp32, _NAME, state_dict)
    return undo


def _lazy(contents: Contents, *, skip_frozen: bool) -> dict[str, LazyTensor]:
    """Weights and buffers by every name; tied ones are one object, by which DeepSpeed knows them."""
    weights = {name: LazyTensor(stored.as_dtype(torch.float32)) for name, stored in contents.weights.items()}
    if skip_frozen:
        # Before the first step no parameter has a state, but all that are trained are in the optimizer's groups.
        trained = set(contents.state) or {name for group in contents.groups for name in group["params"]}
        weights = {name: tensor for name, tensor in weights.items() if name in trained}
    tied = {name: weights[first] for name, first in contents.tied.items() if first in weights}
    buffers = {name: LazyTensor(stored) for name, stored in contents.buffers.items()}
    return {**weights, **tied, **buffers}
