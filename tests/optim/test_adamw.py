"""HyperAdamW is torch's AdamW on the local shards, bit for bit, without DTensor work, with state dicts that travel."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from hp_plugin.core.layout import local_tensor
from hp_plugin.core.optim import HyperAdamW
from hp_plugin.errors import ConfigurationError, UnsupportedError
from tests.optim.parameters import (
    MESHES,
    full,
    local_copies,
    make_mesh,
    no_dtensor_work,
    plain_parameters,
    set_gradients,
    sharded_parameters,
)
from tests.support import init_gloo, run_ranks

OPTIONS = {"lr": 3e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}


def steps_on_mesh(*, shape: tuple[int, int], backends: list[dict[str, Any]]) -> None:
    init_gloo()
    mesh = make_mesh(shape)
    for backend in backends:
        params = sharded_parameters(mesh)
        copies, reference = local_copies(params), plain_parameters()
        ours = HyperAdamW(params, **OPTIONS, **backend)
        theirs = torch.optim.AdamW([mine for mine in copies if mine.numel()], **OPTIONS, **backend)
        whole = torch.optim.AdamW(reference, **OPTIONS, **backend)
        for step in range(4):
            set_gradients(params, step)
            set_gradients(reference, step)
            for mine, param in zip(copies, params, strict=True):
                mine.grad = local_tensor(param.grad).clone()
            if step == 0:
                ours.step()
            else:
                with no_dtensor_work():
                    ours.step()
            theirs.step()
            whole.step()
        for param, mine, value in zip(params, copies, reference, strict=True):
            assert torch.equal(local_tensor(param), mine)
            torch.testing.assert_close(full(param), value.detach())
            state = ours.state[param]
            assert state["step"] == 4
            for name in ("exp_avg", "exp_avg_sq"):
                assert isinstance(state[name], DTensor)
                assert state[name].placements == param.placements
                if mine.numel():
                    assert torch.equal(local_tensor(state[name]), theirs.state[mine][name])


@pytest.mark.parametrize("shape", MESHES, ids=lambda shape: f"{shape[0]}x{shape[1]}")
def test_steps_equal_torch_on_local_tensors_and_on_one_process(shape: tuple[int, int]) -> None:
    backends = [{}, {"foreach": True}, {"fused": True}, {"foreach": False}]
    run_ranks(shape[0] * shape[1], steps_on_mesh, timeout=180.0, shape=shape, backends=backends)


def test_plain_parameters_step_like_torch() -> None:
    ours, theirs = plain_parameters(), plain_parameters()
    first, second = HyperAdamW(ours, **OPTIONS), torch.optim.AdamW(theirs, **OPTIONS)
    for step in range(3):
        set_gradients(ours, step)
        set_gradients(theirs, step)
        first.step()
        second.step()
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)
        assert type(first.state[a]["exp_avg"]) is torch.Tensor


def test_parameters_without_gradient_are_left_alone() -> None:
    params = plain_parameters()
    before = [param.detach().clone() for param in params]
    optimizer = HyperAdamW(params)
    set_gradients(params, 1)
    params[1].grad = None
    optimizer.step()
    assert torch.equal(params[1], before[1])
    assert params[1] not in optimizer.state
    assert not torch.equal(params[0], before[0])


def test_a_closure_is_evaluated_with_gradients_before_the_step() -> None:
    param = nn.Parameter(torch.ones(3))
    optimizer = HyperAdamW([param], lr=0.1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (param**2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 3.0
    assert (param < 1).all()
    assert optimizer.step() is None


def test_a_group_added_later_has_its_own_options_and_missing_ones_from_the_defaults() -> None:
    ours, theirs = plain_parameters(), plain_parameters()
    first, second = HyperAdamW(ours[:2], **OPTIONS), torch.optim.AdamW(theirs[:2], **OPTIONS)
    for optimizer, params in ((first, ours), (second, theirs)):
        set_gradients(params, 0)
        optimizer.step()
        optimizer.add_param_group({"params": params[2:], "lr": 1e-3, "weight_decay": 0.0})
        optimizer.param_groups[0]["lr"] = 5e-3  # as a scheduler does
        set_gradients(params, 1)
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_state_dicts_go_to_and_come_from_torch() -> None:
    ours, theirs = plain_parameters(), plain_parameters()
    first, second = HyperAdamW(ours, **OPTIONS), torch.optim.AdamW(theirs, **OPTIONS)
    for optimizer, params in ((first, ours), (second, theirs)):
        set_gradients(params, 0)
        optimizer.step()
    crossed = HyperAdamW(ours)
    crossed.load_state_dict(second.state_dict())
    second.load_state_dict(first.state_dict())
    assert crossed.param_groups[0]["lr"] == OPTIONS["lr"]
    for optimizer, params in ((crossed, ours), (second, theirs)):
        set_gradients(params, 1)
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("option", ["amsgrad", "maximize"])
def test_a_state_dict_with_an_option_that_does_not_exist_is_refused(option: str) -> None:
    params = plain_parameters()
    other = torch.optim.AdamW(params, **{option: True})
    with pytest.raises(UnsupportedError, match=f"no option '{option}'"):
        HyperAdamW(params).load_state_dict(other.state_dict())


def test_a_state_dict_of_adam_is_refused() -> None:
    params = plain_parameters()
    with pytest.raises(UnsupportedError, match="Adam with L2"):
        HyperAdamW(params).load_state_dict(torch.optim.Adam(params).state_dict())


def test_state_of_another_shape_is_refused() -> None:
    params = plain_parameters()
    optimizer = HyperAdamW(params)
    set_gradients(params, 0)
    optimizer.step()
    state = optimizer.state_dict()
    state["state"][0]["exp_avg"] = torch.zeros(2, 3)
    with pytest.raises(ConfigurationError, match=r"loaded exp_avg .* has the local shape \(2, 3\)"):
        HyperAdamW(params).load_state_dict(state)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"lr": -1.0}, "lr is -1.0"),
        ({"lr": float("nan")}, "lr is nan"),
        ({"betas": (1.0, 0.9)}, "betas are"),
        ({"eps": -1e-8}, "eps is"),
        ({"weight_decay": -0.1}, "weight_decay is"),
        ({"foreach": True, "fused": True}, "choose one"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        HyperAdamW(plain_parameters(), **options)
    with pytest.raises(ConfigurationError, match=sentence):
        HyperAdamW([{"params": plain_parameters(), **options}])


def test_tensor_learning_rates_and_sparse_gradients_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="lr as a number"):
        HyperAdamW(plain_parameters(), lr=torch.tensor(0.1))  # type: ignore[arg-type]
    param = nn.Parameter(torch.ones(2))
    param.grad = torch.ones(2).to_sparse()
    with pytest.raises(UnsupportedError, match="sparse"):
        HyperAdamW([param]).step()


def step_with_partial_gradient() -> None:
    init_gloo()
    mesh = make_mesh((1, 2))
    param = nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh, [Replicate(), Shard(0)]))
    param.grad = DTensor.from_local(torch.ones(4, 1), mesh, [Replicate(), Shard(1)])
    with pytest.raises(ConfigurationError, match="placed as .* but its gradient as"):
        HyperAdamW([param]).step()


def test_a_gradient_placed_unlike_its_parameter_is_refused() -> None:
    run_ranks(2, step_with_partial_gradient)


class Holder(nn.Module):
    """A module that owns the parameters, as the state-dict functions need names."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__()
        self.items = nn.ParameterList(params)


def trained(mesh: DeviceMesh, steps: range) -> tuple[Holder, HyperAdamW]:
    module = Holder(sharded_parameters(mesh))
    optimizer = HyperAdamW(module.parameters(), **OPTIONS)
    for step in steps:
        set_gradients(list(module.parameters()), step)
        optimizer.step()
    optimizer.zero_grad()
    return module, optimizer


def round_trip(*, shape: tuple[int, int]) -> None:
    init_gloo()
    mesh = make_mesh(shape)
    module, optimizer = trained(mesh, range(2))
    saved = copy.deepcopy(get_optimizer_state_dict(module, optimizer))  # else both optimizers would share state
    entry = saved["state"]["items.0"]
    assert isinstance(entry["exp_avg"], DTensor)
    assert entry["step"] == 2
    whole = {name: full(state["exp_avg"]) for name, state in saved["state"].items()}

    other, fresh = trained(mesh, range(0))
    with torch.no_grad():
        for target, source in zip(other.parameters(), module.parameters(), strict=True):
            local_tensor(target).copy_(local_tensor(source))
    set_optimizer_state_dict(other, fresh, saved)
    for name, param in other.named_parameters():
        assert torch.equal(full(fresh.state[param]["exp_avg"]), whole[name])
    for holder, each in ((module, optimizer), (other, fresh)):
        set_gradients(list(holder.parameters()), 7)
        each.step()
    for a, b in zip(module.parameters(), other.parameters(), strict=True):
        assert torch.equal(local_tensor(a), local_tensor(b))
    # The plain way, on the same mesh.
    again = HyperAdamW(other.parameters(), **OPTIONS)
    again.load_state_dict(fresh.state_dict())
    assert all(isinstance(state["exp_avg"], DTensor) for state in again.state.values())


@pytest.mark.parametrize("shape", [(1, 2), (2, 2), (1, 4)], ids=lambda shape: f"{shape[0]}x{shape[1]}")
def test_distributed_state_dicts_round_trip(shape: tuple[int, int]) -> None:
    run_ranks(shape[0] * shape[1], round_trip, timeout=180.0, shape=shape)
