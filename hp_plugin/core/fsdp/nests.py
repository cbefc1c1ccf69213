"""Tensors inside the arguments and results of a forward: nests of tuples, lists, dicts and registered classes.

`torch.utils._pytree` serves every nest but takes tens of microseconds for one tensor. What almost every forward takes
and returns, tensors and plain values in built-in containers, is walked here; anything else is left to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

_PLAIN = (int, float, complex, bool, str, bytes, type(None))


def map_tensors(change: Callable[[torch.Tensor], torch.Tensor], nest: Any) -> Any:
    """`nest` with every tensor replaced by what `change` makes of it, in the order of `tensors_in`."""
    kind = type(nest)
    if isinstance(nest, torch.Tensor):
        return change(nest)
    if kind in _PLAIN:
        return nest
    if kind is tuple or kind is list:
        return kind([map_tensors(change, each) for each in nest])
    if kind is dict:
        return {key: map_tensors(change, each) for key, each in nest.items()}
    return tree_map(lambda leaf: change(leaf) if isinstance(leaf, torch.Tensor) else leaf, nest)


def tensors_in(nest: Any) -> list[torch.Tensor]:
    """Every tensor in `nest`, in order."""
    found: list[torch.Tensor] = []
    _collect(nest, found)
    return found


def _collect(nest: Any, found: list[torch.Tensor]) -> None:
    kind = type(nest)
    if isinstance(nest, torch.Tensor):
        found.append(nest)
    elif kind in _PLAIN:
        pass
    elif kind is tuple or kind is list:
        for each in nest:
            _collect(each, found)
    elif kind is dict:
        for each in nest.values():
            _collect(each, found)
    else:
        found += [leaf for leaf in tree_leaves(nest) if isinstance(leaf, torch.Tensor)]


def opaque_in(nest: Any) -> object | None:
    """A leaf of `nest` that is neither a tensor nor a plain value, so that it may hide tensors; None without one."""
    for leaf in tree_leaves(nest):
        if not isinstance(leaf, (torch.Tensor, *_PLAIN)):
            return leaf
    return None


def cast_floating(nest: Any, dtype: torch.dtype) -> Any:
    """`nest` with every floating tensor in `dtype`."""
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, nest)
