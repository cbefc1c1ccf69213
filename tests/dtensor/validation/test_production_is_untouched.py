"""Production mode builds nothing of validation, and validation leaves nothing behind."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import hp_plugin.core.dtensor.validation as package
from hp_plugin import UnsupportedError
from hp_plugin.core.dtensor import apply_plan, loss_function, plan_transformer, simulate
from hp_plugin.core.dtensor.validation import calls, checker, follow, live, reference, session
from tests.dtensor.models import make_batch, make_decoder
from tests.dtensor.validation.operations import followed
from tests.support import init_gloo, run_ranks


@contextmanager
def nothing_of_validation() -> Iterator[None]:
    """Every class and function of the package raises when it is made or called."""
    with ExitStack() as stack:
        for module in (calls, checker, follow, live, reference, session):
            for found in vars(module).values():
                is_own = inspect.isclass(found) and found.__module__.startswith(package.__name__)
                if is_own and "__init__" in vars(found):
                    stack.enter_context(mock.patch.object(found, "__init__", _refuse))
        yield


def _refuse(*args: Any, **kwargs: Any) -> None:
    raise AssertionError("production built an object of validation")


def train_in_production() -> None:
    init_gloo()
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    apply = torch.autograd.Function.apply
    with nothing_of_validation():
        model = make_decoder()
        apply_plan(model, plan_transformer(model, {"tp": 1}), mesh)
        ids, targets = make_batch()
        loss_function(model)(model(ids), targets).backward()
        assert torch.autograd.Function.apply == apply
        assert not any("_hp_follower" in vars(module) for module in model.modules())
        with pytest.raises(AssertionError, match="built an object of validation"):
            apply_plan(make_decoder(), plan_transformer(make_decoder(), {"tp": 1}), mesh, mode="validation")


def test_production_builds_no_object_of_validation() -> None:
    run_ranks(1, train_in_production, timeout=120.0)


def test_nothing_stays_behind_after_a_simulation() -> None:
    before = torch.autograd.Function.__dict__["apply"]
    followed(lambda block, x: torch.nn.functional.dropout(x, 0.5))
    with pytest.raises(UnsupportedError):
        followed(lambda block, x: torch.nn.functional.rrelu(x, training=True))
    assert torch.autograd.Function.__dict__["apply"] is before
    assert torch._C._len_torch_function_stack() == 0


def test_a_model_that_was_followed_by_a_simulation_is_a_copy() -> None:
    model = make_decoder()
    weights = [p.detach().clone() for p in model.parameters()]
    classes = [type(m) for m in model.modules()]
    report = simulate(lambda: model, plan_transformer(model, {"tp": 2}), make_batch())
    report.raise_if_different()
    assert [type(m) for m in model.modules()] == classes
    assert all(torch.equal(p, w) for p, w in zip(model.parameters(), weights, strict=True))
    assert all(p.grad is None for p in model.parameters())
    assert isinstance(model, nn.Module)
