"""Which parameter took the place of which: a ZeRO-3 partition, then a plain parameter, then a shard."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hp_plugin.core.layout import Layout, local_tensor
from hp_plugin.errors import ConfigurationError


class Replacements:
    """Old parameters and what stands for them now; several steps are followed to the last.

    The old objects are kept, without their memory: their addresses must not be given to others while a caller's lists
    and optimizers still refer to them.
    """

    def __init__(self) -> None:
        self._of: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def record(self, old: torch.Tensor, new: torch.Tensor) -> None:
        """`new` stands for `old` from now on."""
        if old is not new:
            self._of[id(old)] = (old, new)

    def follow(self, tensor: torch.Tensor) -> torch.Tensor:
        """What stands for `tensor` now; itself where nothing does."""
        while id(tensor) in self._of:
            tensor = self._of[id(tensor)][1]
        return tensor

    def follow_all(self, parameters: Iterable[Any]) -> list[Any]:
        """The same for a list of parameters, named parameters or parameter groups, as optimizers take them."""
        return [self._follow_entry(entry) for entry in parameters]

    def _follow_entry(self, entry: Any) -> Any:
        if isinstance(entry, dict):
            inside = entry["params"]
            inside = [inside] if isinstance(inside, torch.Tensor) else list(inside)
            return {**entry, "params": self.follow_all(inside)}
        if isinstance(entry, tuple) and len(entry) == 2:
            return (entry[0], self.follow(entry[1]))
        return self.follow(entry)

    def apply_to(self, optimizer: torch.optim.Optimizer) -> None:
        """Lets an optimizer that was built before the model was sharded work on what stands for its parameters."""
        for group in optimizer.param_groups:
            group["params"] = [self.follow(parameter) for parameter in group["params"]]
        for old in list(optimizer.state):
            new = self.follow(old)
            if new is not old:
                optimizer.state[new] = _state_of_shard(optimizer.state.pop(old), new)

    def forget(self) -> None:
        """Gives up the old objects, once nothing refers to them any more."""
        self._of.clear()


def check_live(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Raises ConfigurationError where an optimizer steps a tensor that is no parameter of the model any more."""
    live = {id(parameter) for parameter in model.parameters()}
    for index, group in enumerate(optimizer.param_groups):
        dead = [p for p in group["params"] if id(p) not in live]
        if dead:
            shapes = ", ".join(str(tuple(p.shape)) for p in dead[:3])
            raise ConfigurationError(
                f"parameter group {index} of the optimizer has {len(dead)} of {len(group['params'])} parameters that "
                f"are not parameters of the model (shapes {shapes}, ...), so a step would not change the model. "
                "Build the optimizer from the parameters of the module that is passed to deepspeed.initialize, after "
                "the last change to that module."
            )


def shard_of(full: torch.Tensor, like: DTensor) -> torch.Tensor:
    """This rank's part of a full tensor that is laid out as the DTensor `like`: a view, plain. No communication."""
    layout = Layout.from_dtensor(like)
    coordinate = like.device_mesh.get_coordinate()
    assert coordinate is not None
    found = full
    for dim in range(full.ndim):
        pieces = [found.narrow(dim, s.start, s.length) for s in layout.local_segments(tuple(coordinate), dim)]
        found = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim) if pieces else found.narrow(dim, 0, 0)
    return found


def _state_of_shard(state: dict[str, Any], new: torch.Tensor) -> dict[str, Any]:
    assert isinstance(new, DTensor)
    found: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and value.shape == new.shape and value.ndim:
            local = shard_of(value, new).contiguous().to(local_tensor(new).device)
            value = DTensor.from_local(
                local, new.device_mesh, new.placements, run_check=False, shape=new.shape, stride=new.stride()
            )
        found[key] = value
    return found
