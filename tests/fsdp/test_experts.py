"""Experts that only some ranks hold: which modules become units of their own, and how finely they are sharded."""

from __future__ import annotations

import pytest
from torch import nn

from hp_plugin.core.fsdp.experts import expert_modules, expert_reshard, expert_shard_size
from hp_plugin.core.topology import Topology
from hp_plugin.errors import UnsupportedError


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])


class Mixture(nn.Module):
    """A layer with a router, shared experts, and experts one by one or in one module."""

    def __init__(self, *, grouped: bool) -> None:
        super().__init__()
        self.router, self.shared_experts = nn.Linear(2, 4), nn.Linear(2, 2)
        self.experts = nn.Linear(2, 8) if grouped else nn.Sequential(nn.ModuleList([nn.Linear(2, 2)]))
        mark(self.experts)


def mark(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.allreduce = False


@pytest.mark.parametrize("grouped", [False, True])
def test_experts_that_are_reduced_over_fewer_ranks_are_units_of_their_own(grouped):
    model = Model()
    model.layers[1].mixture = Mixture(grouped=grouped)
    assert expert_modules(model) == [model.layers[1].mixture.experts]


def test_experts_that_are_reduced_like_the_rest_belong_to_their_layer():
    model = Model()
    model.layers[1].mixture = Mixture(grouped=False)
    for parameter in model.parameters():
        parameter.allreduce = True
    assert expert_modules(model) == []


def test_an_expert_parameter_beside_others_in_one_module_is_refused():
    model = Model()
    model.layers[0].linear.weight.allreduce = False
    with pytest.raises(UnsupportedError, match=r"Linear holds the expert parameter weight beside others"):
        expert_modules(model)


@pytest.mark.parametrize(
    ("value", "shard_size", "expected"),
    [(True, 4, True), (False, 4, False), (2, 4, 2), (3, 4, True), (2, 6, 2), (4, 6, True), (2, 1, True), (2, 2, True)],
)
def test_a_number_of_ranks_that_keep_parts_is_rounded_up_for_experts(value, shard_size, expected):
    found = expert_reshard(value, shard_size)
    assert (type(found), found) == (type(expected), expected)


@pytest.mark.parametrize(
    ("ranks", "asked", "expected"),
    [
        ((0, 2, 4, 6), 4, 2),  # two of each supernode of four ranks
        ((0, 2, 4, 6), 1, 1),
        ((0, 1, 2, 3, 4, 5, 6, 7), 4, 4),
        ((0, 4), 4, 1),
        ((0, 4), "supernode", "supernode"),
    ],
)
def test_a_shard_size_is_cut_down_to_what_a_supernode_holds_of_the_experts(ranks, asked, expected):
    assert expert_shard_size(asked, ranks, Topology.from_supernode_size(8, 4)) == expected
