"""Options are checked where they are given, by name, and say what to do instead."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import nn

from hp_plugin.core.muon.optimizer import HyperMuon
from hp_plugin.core.muon.options import MuonOptions, adamw_options, complete_group, muon_options, newton_schulz_of
from hp_plugin.errors import ConfigurationError, HyperParallelError, UnsupportedError

DEFAULTS = {
    "muon": {"lr": 0.02, "momentum": 0.95, "nesterov": True, "weight_decay": 0.1, **MuonOptions().as_group()},
    "adamw": adamw_options(lr=1e-3, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1),
}


def matrices() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(4, 3))]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"lr": -1.0}, "lr is -1.0, but must be a number and not negative"),
        ({"lr": float("nan")}, "lr is nan"),
        ({"lr": float("inf")}, "lr is inf"),
        ({"momentum": 1.0}, "momentum has the value 1.0, but must be at least 0 and below 1"),
        ({"momentum": -0.1}, "momentum has the value -0.1"),
        ({"weight_decay": -0.1}, "weight_decay is -0.1"),
        ({"extra_scale": -1.0}, "extra_scale is -1.0"),
        ({"eps": 0.0}, "eps=0.0 must be > 0"),
        ({"scale": "spectral"}, "say whose it is"),
        ({"scale": "nothing"}, "there is no scale 'nothing'"),
        ({"coefficients": "septic"}, "septic"),
        ({"coefficients": "polar_express5", "steps": 3}, "exactly 5 steps|5 steps or more"),
        ({"steps": 0}, "steps"),
        ({"exchange": "broadcast"}, "exchange is 'broadcast'; choose one of 'auto', 'a2a', 'gather'"),
        ({"kernel": "cholesky"}, "cholesky"),
        ({"momentum_kind": "adam"}, "momentum_kind is 'adam'; choose one of 'ema', 'heavy_ball'"),
        ({"momentum_placement": "everywhere"}, "momentum_placement is 'everywhere'; choose"),
        ({"gradients": "nowhere"}, "gradients is 'nowhere'; choose"),
        ({"gradients": "owner"}, "other replicas without the gradient"),
        ({"momentum_dtype": torch.int32}, "momentum_dtype is torch.int32"),
        ({"ns_dtype": torch.int8}, "Newton-Schulz runs in one of"),
        ({"exact": True, "ns_dtype": torch.float32}, "exact=True repeats torch.optim.Muon"),
        ({"exact": True, "kernel": "gram"}, "exact=True|gram"),
        ({"algorithm": "sgd"}, "algorithm 'sgd'; choose muon or adamw"),
        ({"betas": (0.9, 0.99)}, "unknown option 'betas'"),
        ({"learning_rate": 0.1}, "unknown option 'learning_rate'"),
        ({"algorithm": "adamw", "momentum": 0.9}, "a parameter group of adamw has the unknown option 'momentum'"),
        ({"algorithm": "adamw", "betas": (0.9, 1.0)}, "betas has the value 1.0"),
    ],
    ids=str,
)
def test_groups_with_impossible_options_are_refused(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(HyperParallelError, match=sentence):
        complete_group({"params": matrices(), **given}, DEFAULTS)
    optimizer = HyperMuon(matrices())
    with pytest.raises(HyperParallelError, match=sentence):
        optimizer.add_param_group({"params": matrices(), **given})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(
    ("given", "sentence"),
    [({"nestrov": True}, "no option 'nestrov'"), ({"adjust_lr_fn": "original"}, "no option 'adjust_lr_fn'")],
)
def test_arguments_with_unknown_names_are_refused(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        HyperMuon(matrices(), **given)
    with pytest.raises(ConfigurationError, match=sentence):
        muon_options(given)


def test_a_learning_rate_in_a_tensor_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="pass float\\(lr\\)"):
        HyperMuon(matrices(), lr=torch.tensor(0.1))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["lr", "momentum", "weight_decay", "extra_scale"])
def test_zero_is_a_value_and_not_an_absent_one(name: str) -> None:
    assert complete_group({"params": [], name: 0.0}, DEFAULTS)[name] == 0.0
    assert HyperMuon(matrices(), **{name: 0.0}).param_groups[0][name] == 0.0


def test_every_option_reaches_the_parameter_group_and_can_differ_there() -> None:
    given: dict[str, Any] = {
        "scale": "adamw_rms",
        "extra_scale": 0.5,
        "coefficients": (1.5, -0.5, 0.1),
        "steps": 3,
        "eps": 1e-5,
        "ns_dtype": torch.float32,
        "kernel": "loop",
        "exact": False,
        "exchange": "gather",
        "momentum_kind": "heavy_ball",
        "momentum_dtype": torch.float64,
        "momentum_placement": "owner",
        "gradients": "owner",
    }
    assert set(given) == {field.name for field in fields(MuonOptions)}
    group = HyperMuon(matrices(), **given).param_groups[0]
    assert {name: group[name] for name in given} == given
    added = HyperMuon(matrices())
    added.add_param_group({"params": matrices(), **given})
    assert {name: added.param_groups[1][name] for name in given} == given
    assert added.param_groups[0]["scale"] == "clamped_aspect"
    newton_schulz = newton_schulz_of(group)
    assert (len(newton_schulz.coefficients), newton_schulz.dtype, newton_schulz.eps) == (3, torch.float32, 1e-5)


def test_defaults_are_those_of_the_signature() -> None:
    group = HyperMuon(matrices()).param_groups[0]
    assert (group["lr"], group["momentum"], group["nesterov"], group["weight_decay"]) == (0.02, 0.95, True, 0.1)
    assert group["algorithm"] == "muon"
    adam = HyperMuon([{"params": matrices()}, {"params": matrices(), "algorithm": "adamw"}], weight_decay=0.3)
    assert adam.param_groups[1]["weight_decay"] == 0.3
    apart = HyperMuon(
        [{"params": matrices()}, {"params": matrices(), "algorithm": "adamw"}], weight_decay=0.3, adam_weight_decay=0.0
    )
    assert apart.param_groups[1]["weight_decay"] == 0.0
