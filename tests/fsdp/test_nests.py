"""Walking nests of tensors: the same tensors in the same order as torch's pytree, and the same nests out."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

from hp_plugin.core.fsdp.nests import cast_floating, map_tensors, opaque_in, tensors_in

Pair = namedtuple("Pair", ["first", "second"])


class Opaque:
    pass


def numbered(count: int) -> list[torch.Tensor]:
    return [torch.tensor([float(i)]) for i in range(count)]


a, b, c, d = numbered(4)
NESTS: list[Any] = [
    a,
    None,
    (),
    ((a, b), {"x": c}),
    [a, [b, (c,)], {"k": {"deep": [d]}}, 3, "text", None, True],
    Pair(a, [b, Pair(c, 1)]),
    OrderedDict(x=a, y=(b, c)),
    {"y": a, "x": b},
    (a, a),
    (Opaque(), a),
]


@pytest.mark.parametrize("nest", NESTS, ids=str)
def test_tensors_and_nests_are_those_of_pytree(nest: Any) -> None:
    expected = [leaf for leaf in tree_leaves(nest) if isinstance(leaf, torch.Tensor)]
    found = tensors_in(nest)
    assert [id(t) for t in found] == [id(t) for t in expected]

    def negate(leaf: Any) -> Any:
        return -leaf if isinstance(leaf, torch.Tensor) else leaf

    mapped = map_tensors(negate, nest)
    assert type(mapped) is type(nest)
    assert repr(mapped) == repr(tree_map(negate, nest))


def test_tensors_are_changed_in_the_order_in_which_they_are_found() -> None:
    nest = ({"y": a, "x": [b]}, Pair(c, (d,)))
    replacements = iter(numbered(4))
    mapped = map_tensors(lambda _: next(replacements), nest)
    assert [t.item() for t in tensors_in(mapped)] == [0, 1, 2, 3]
    assert mapped[0]["y"].item() == 0


def test_only_floating_tensors_are_cast_and_those_in_place_stay() -> None:
    integer, half = torch.ones(2, dtype=torch.int64), torch.ones(2, dtype=torch.bfloat16)
    out = cast_floating((a, [integer, half]), torch.bfloat16)
    assert out[0].dtype == torch.bfloat16
    assert out[1][0] is integer
    assert out[1][1] is half


def test_what_may_hide_tensors_is_found() -> None:
    hidden = Opaque()
    assert opaque_in((a, 1, None, "text", {"k": hidden})) is hidden
    assert opaque_in((a, 1, None, "text", {"k": [True, 2.5]})) is None
