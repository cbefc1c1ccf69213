"""The state of HyperMuon: kept, saved, loaded, and on one replica alone."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hp_plugin import HyperAdamW, HyperMuon
from hp_plugin.core.layout import Layout
from hp_plugin.core.muon.distribution import Distribution
from hp_plugin.errors import ConfigurationError, UnsupportedError
from tests.muon.optimizing import OTHERS, SHAPES, parameters, trained
from tests.muon.reference import reference_run, values
from tests.muon.simulation import SimulatedCommunicators, assert_same, distribute, shard_of, simulate


def test_state_is_there_before_the_first_step_with_the_same_keys_everywhere() -> None:
    params, others = parameters(), parameters(OTHERS)
    optimizer = HyperMuon([{"params": params}, {"params": others, "algorithm": "adamw"}])
    before = optimizer.state_dict()
    assert all(set(before["state"][i]) == {"momentum_buffer"} for i in range(3))
    assert all(set(before["state"][i]) == {"step", "exp_avg", "exp_avg_sq"} for i in range(3, 6))
    trained([*params, *others], optimizer, range(2))
    after = optimizer.state_dict()
    assert {key: set(value) for key, value in after["state"].items()} == {
        key: set(value) for key, value in before["state"].items()
    }


def test_a_resumed_run_has_the_bits_of_one_that_went_on() -> None:
    params, others = parameters(), parameters(OTHERS)
    optimizer = HyperMuon([{"params": params}, {"params": others, "algorithm": "adamw"}])
    middle = trained([*params, *others], optimizer, range(3))
    saved = copy.deepcopy(optimizer.state_dict())
    expected = trained([*params, *others], optimizer, range(3, 6))

    again = [nn.Parameter(each.clone()) for each in middle]
    resumed = HyperMuon([{"params": again[:3]}, {"params": again[3:], "algorithm": "adamw"}], lr=9.0, momentum=0.1)
    resumed.load_state_dict(pickle.loads(pickle.dumps(saved)))
    assert resumed.param_groups[0]["lr"] == 0.02
    assert_same(trained(again, resumed, range(3, 6)), expected)


def test_what_is_loaded_is_a_copy() -> None:
    params, twins = parameters(), parameters()
    first, second = HyperMuon(params), HyperMuon(twins)
    trained(params, first, range(1))
    second.load_state_dict(first.state_dict())
    trained(params, first, range(1, 2))
    assert not torch.equal(first.state[params[0]]["momentum_buffer"], second.state[twins[0]]["momentum_buffer"])


@pytest.mark.parametrize("saved", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("here", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_momentum_of_any_dtype_loads_and_keeps_the_dtype_of_here(
    weights: torch.dtype, here: torch.dtype, saved: torch.dtype
) -> None:
    params = [nn.Parameter(p.detach().to(weights)) for p in parameters()]
    source = HyperMuon(params, momentum_dtype=saved)
    trained(params, source, range(2))
    twins = [nn.Parameter(p.detach().clone()) for p in params]
    target = HyperMuon(twins, momentum_dtype=here)
    state = source.state_dict()
    state["param_groups"][0]["momentum_dtype"] = here
    target.load_state_dict(state)
    for param, twin in zip(params, twins, strict=True):
        buffer = target.state[twin]["momentum_buffer"]
        assert buffer.dtype == here
        assert torch.equal(buffer, source.state[param]["momentum_buffer"].to(here))
    trained(twins, target, range(2, 3))


def test_state_of_another_shape_or_algorithm_is_refused() -> None:
    params, others = parameters(), parameters(OTHERS)
    optimizer = HyperMuon([{"params": params}, {"params": others[1:2], "algorithm": "adamw"}])
    state = optimizer.state_dict()
    state["state"][0]["momentum_buffer"] = torch.zeros(2, 3)
    with pytest.raises(ConfigurationError, match=r"momentum_buffer .* has the local shape \(2, 3\)"):
        optimizer.load_state_dict(state)
    all_muon = HyperMuon([{"params": params}, {"params": others[1:2]}])
    with pytest.raises(ConfigurationError, match="steps with adamw here and has the state of muon"):
        optimizer.load_state_dict(all_muon.state_dict())
    with pytest.raises(ConfigurationError, match="steps with muon here and has the state of None"):
        HyperMuon(params).load_state_dict(HyperAdamW(params).state_dict())


# ---- momentum on one replica -----------------------------------------------------------------------------------------


def replicas(world: int, work: Callable[[SimulatedCommunicators, list[nn.Parameter], HyperMuon], Any]) -> list[Any]:
    """Runs on replicas of the same matrices, with momentum on the owner alone."""
    layouts = [Layout(shape, ("replicas",), (world,), (torch.distributed.tensor.Replicate(),)) for shape in SHAPES]

    def run(communicators: SimulatedCommunicators) -> Any:
        params = [nn.Parameter(shard_of(v, layout, 0)) for v, layout in zip(values(SHAPES, 1), layouts, strict=True)]
        distributions: dict[Tensor, Distribution] = {
            param: distribute(layout) for param, layout in zip(params, layouts, strict=True)
        }
        optimizer = HyperMuon(
            params, exact=True, momentum_placement="owner", distributions=distributions, communicators=communicators
        )
        return work(communicators, params, optimizer)

    return simulate(world, run)


def test_momentum_on_the_owner_saves_the_memory_of_the_others() -> None:
    def work(_: SimulatedCommunicators, params: list[nn.Parameter], optimizer: HyperMuon) -> tuple[int, int]:
        trained(params, optimizer, range(2))
        kept = sum("momentum_buffer" in optimizer.state[param] for param in params)
        state = optimizer.state_dict()["state"]
        assert all("momentum_buffer" in state[index] for index in range(len(params)))
        assert sum("momentum_buffer" in optimizer.state[param] for param in params) == kept
        return kept, len(params)

    kept = replicas(3, work)
    assert sum(each for each, _ in kept) == len(SHAPES)


def test_momentum_on_the_owner_survives_saving_loading_and_new_plans() -> None:
    def work(_: SimulatedCommunicators, params: list[nn.Parameter], optimizer: HyperMuon) -> list[Tensor]:
        trained(params, optimizer, range(2))
        optimizer.load_state_dict(optimizer.state_dict())
        trained(params, optimizer, range(2, 3))
        extra = nn.Parameter(torch.ones(40, 40))  # the largest: owners move
        optimizer.add_param_group({"params": [extra]})
        optimizer._distributions[extra] = distribute(
            Layout((40, 40), ("replicas",), (3,), (torch.distributed.tensor.Replicate(),))
        )
        return trained(params, optimizer, range(3, 5))

    expected = reference_run(values(SHAPES, 1), [values(SHAPES, 10 + step) for step in range(5)]).weights
    for found in replicas(3, work):
        assert_same(found, expected)


def test_an_optimizer_is_not_copied() -> None:
    optimizer = HyperMuon([nn.Parameter(torch.zeros(4, 4))])
    for take in (copy.deepcopy, pickle.dumps):
        with pytest.raises(UnsupportedError, match="load its state_dict"):
            take(optimizer)
