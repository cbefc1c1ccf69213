"""State carried over: the optimizers that wrote it, run beside a training that went on with the right convention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hp_plugin.core.muon.convert import ORIGINS, Source, import_state, unflatten
from hp_plugin.errors import ConfigurationError, UnsupportedError

MU = 0.9
GRADIENTS = [torch.randn(4, 3, generator=torch.Generator().manual_seed(seed)) for seed in range(6)]


def running_mean() -> torch.Tensor:
    mean = torch.zeros(4, 3)
    for gradient in GRADIENTS:
        mean.lerp_(gradient, 1 - MU)
    return mean


def running_sum() -> torch.Tensor:
    total = torch.zeros(4, 3)
    for gradient in GRADIENTS:
        total.mul_(MU).add_(gradient)
    return total


def target(*, kind: str = "ema", algorithm: str = "muon", names: tuple[str, ...] = ("w",)) -> dict[str, Any]:
    """A state dict as `HyperMuon` gives it."""
    options = {"momentum": 0.8, "momentum_kind": kind} if algorithm == "muon" else {"betas": (0.9, 0.99)}
    keys = ["momentum_buffer"] if algorithm == "muon" else ["step", "exp_avg", "exp_avg_sq"]
    state = {i: {key: torch.ones(() if key == "step" else (4, 3)) for key in keys} for i in range(len(names))}
    group = {"algorithm": algorithm, **options, "params": list(range(len(names))), "param_names": list(names)}
    return {"state": state, "param_groups": [group]}


def saved(state: dict[str, Any], **group: Any) -> dict[str, Any]:
    return {"state": {0: state}, "param_groups": [{**group, "params": [0], "param_names": ["w"]}]}


def stepped(optimizer_class: Any, **options: Any) -> dict[str, Any]:
    """The state dict of a real optimizer after the gradients."""
    parameter = nn.Parameter(torch.zeros(4, 3))
    optimizer = optimizer_class([("w", parameter)], **options)
    for gradient in GRADIENTS:
        parameter.grad = gradient.clone()
        optimizer.step()
    result: dict[str, Any] = optimizer.state_dict()
    return result


# What the sources named in `ORIGINS` leave behind after the same gradients.
WRITTEN = {
    "hypermuon": saved({"momentum_buffer": running_mean()}, algorithm="muon", momentum=MU, momentum_kind="ema"),
    "torch": saved({"momentum_buffer": running_mean()}, momentum=MU),
    "emerging_optimizers": saved({"momentum_buffer": running_mean()}, momentum=MU),
    "megatron": saved({"momentum_buffer": running_mean()}, momentum=MU),
    "deepspeed": saved({"momentum_buffer": running_mean()}, momentum=MU, use_muon=True),
    "keller": saved({"momentum_buffer": running_mean()}, momentum=MU, use_muon=True),
    "dion": saved({"momentum": running_sum()}, mu=MU, algorithm="muon", step=6),
    "dion_reference": saved({"momentum_buffer": running_sum(), "algorithm": "muon"}, momentum=MU),
    "heavy_ball": saved({"momentum_buffer": running_sum()}, momentum=MU),
}


def test_every_origin_is_tried() -> None:
    assert WRITTEN.keys() | {"adamw"} == ORIGINS.keys()


@pytest.mark.parametrize("origin", WRITTEN)
@pytest.mark.parametrize("kind", ["ema", "heavy_ball"])
def test_momentum_keeps_its_meaning(origin: str, kind: str) -> None:
    result = import_state(target(kind=kind), Source(origin, WRITTEN[origin]))
    expected = running_mean() if kind == "ema" else running_mean() / (1 - 0.8)
    torch.testing.assert_close(result.state_dict["state"][0]["momentum_buffer"], expected)
    assert result.conversions[0].taken == ORIGINS[origin].momentum_key
    assert result.state_dict["param_groups"] == target(kind=kind)["param_groups"]


def test_the_running_sum_is_kept_as_it_is_if_both_keep_the_sum() -> None:
    goal = target(kind="heavy_ball")
    goal["param_groups"][0]["momentum"] = MU
    result = import_state(goal, Source("heavy_ball", WRITTEN["heavy_ball"]))
    assert torch.equal(result.state_dict["state"][0]["momentum_buffer"], running_sum())
    assert result.conversions[0].factor == 1.0


def test_a_heavy_ball_state_of_ours_says_so_itself() -> None:
    source = saved({"momentum_buffer": running_sum()}, algorithm="muon", momentum=MU, momentum_kind="heavy_ball")
    result = import_state(target(), Source("hypermuon", source))
    torch.testing.assert_close(result.state_dict["state"][0]["momentum_buffer"], running_mean())


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon came with torch 2.9")
def test_the_state_of_torch_is_read_as_torch_writes_it() -> None:
    result = import_state(target(), Source("torch", stepped(torch.optim.Muon, momentum=MU)))
    assert torch.equal(result.state_dict["state"][0]["momentum_buffer"], running_mean())


@pytest.mark.parametrize("from_adam", ["exp_avg", "fresh"])
def test_a_job_of_adam_goes_on_with_muon(from_adam: Any) -> None:
    """Adam's first moment is a running mean with beta1: the momentum that Muon with mu = beta1 would have."""
    source = stepped(torch.optim.AdamW, betas=(MU, 0.99))
    result = import_state(target(), Source("adamw", source), from_adam=from_adam)
    buffer = result.state_dict["state"][0]["momentum_buffer"]
    if from_adam == "exp_avg":
        torch.testing.assert_close(buffer, running_mean())
        assert result.summary() == "1 parameters: muon from exp_avg"
    else:
        assert torch.equal(buffer, torch.zeros(4, 3))
        assert result.summary() == "1 parameters: muon from fresh"
    assert set(result.state_dict["state"][0]) == {"momentum_buffer"}


def test_moments_of_adam_become_a_running_sum_where_that_is_the_convention() -> None:
    result = import_state(target(kind="heavy_ball"), Source("adamw", stepped(torch.optim.AdamW, betas=(MU, 0.99))))
    torch.testing.assert_close(result.state_dict["state"][0]["momentum_buffer"], running_mean() / 0.2)


@pytest.mark.parametrize(
    ("origin", "source"),
    [
        ("adamw", stepped(torch.optim.AdamW, betas=(0.9, 0.99))),
        (
            "dion",
            saved(
                {"momentum": running_mean(), "variance": GRADIENTS[0] ** 2, "step_dev": torch.tensor(6.0)},
                algorithm="adamw",
                step=6,
            ),
        ),
        ("keller", saved({"exp_avg": running_mean(), "exp_avg_sq": GRADIENTS[0] ** 2, "step": 6}, use_muon=False)),
    ],
)
def test_adamw_parameters_stay_adamw(origin: str, source: dict[str, Any]) -> None:
    state = import_state(target(algorithm="adamw"), Source(origin, source)).state_dict["state"][0]
    old = list(source["state"][0].values())
    assert state["step"].item() == 6.0 and state["step"].dtype == torch.float32
    torch.testing.assert_close(state["exp_avg"], running_mean())
    assert any(torch.equal(state["exp_avg_sq"], value) for value in old if isinstance(value, torch.Tensor))


def test_muon_goes_back_to_adamw_fresh_by_default() -> None:
    state = import_state(target(algorithm="adamw"), Source("dion", WRITTEN["dion"])).state_dict["state"][0]
    assert all(torch.equal(value, torch.zeros_like(value)) for value in state.values())
    assert set(state) == {"step", "exp_avg", "exp_avg_sq"}


def test_muon_goes_back_to_adamw_as_after_steps_with_a_constant_gradient() -> None:
    """The state is that of torch.optim.AdamW after ten such steps, so the next step is bounded."""
    result = import_state(target(algorithm="adamw"), Source("dion", WRITTEN["dion"]), to_adam="constant_gradient")
    parameter = nn.Parameter(torch.zeros(4, 3))
    adamw = torch.optim.AdamW([("w", parameter)], lr=0.1, betas=(0.9, 0.99), weight_decay=0.0)
    for _ in range(10):
        parameter.grad = running_mean()
        adamw.step()
    expected = adamw.state_dict()["state"][0]
    for key, value in result.state_dict["state"][0].items():
        torch.testing.assert_close(value, expected[key], msg=key)
    adamw.load_state_dict({**adamw.state_dict(), "state": result.state_dict["state"]})
    before = parameter.detach().clone()
    parameter.grad = GRADIENTS[0]
    adamw.step()
    assert float((parameter.detach() - before).abs().max()) < 2 * 0.1


def test_two_optimizers_become_one() -> None:
    goal = target(names=("w",))
    goal["param_groups"].append(target(algorithm="adamw")["param_groups"][0] | {"params": [1], "param_names": ["b"]})
    goal["state"][1] = target(algorithm="adamw")["state"][0]
    adam = stepped(torch.optim.AdamW)
    sources = [Source("torch", WRITTEN["torch"]), Source("adamw", adam, names=["b"])]
    result = import_state(goal, sources)
    assert torch.equal(result.state_dict["state"][0]["momentum_buffer"], running_mean())
    assert torch.equal(result.state_dict["state"][1]["exp_avg_sq"], adam["state"][0]["exp_avg_sq"])
    assert [(c.name, c.algorithm) for c in result.conversions] == [("w", "muon"), ("b", "adamw")]


def test_names_bring_states_together_and_not_the_order() -> None:
    source = saved({"momentum_buffer": running_mean()}, momentum=MU)
    source["state"][1] = {"momentum_buffer": GRADIENTS[0]}
    source["param_groups"][0] |= {"params": [0, 1], "param_names": ["w", "other"]}
    state = import_state(target(names=("other", "w")), Source("torch", source)).state_dict["state"]
    assert torch.equal(state[0]["momentum_buffer"], GRADIENTS[0])
    assert torch.equal(state[1]["momentum_buffer"], running_mean())


def test_state_becomes_fp32() -> None:
    source = saved({"momentum_buffer": running_mean().bfloat16()}, momentum=MU)
    buffer = import_state(target(), Source("torch", source)).state_dict["state"][0]["momentum_buffer"]
    assert buffer.dtype == torch.float32
    torch.testing.assert_close(buffer, running_mean(), rtol=1e-2, atol=1e-2)


def test_the_source_is_not_touched() -> None:
    """Optimizers change their state in place."""
    source = stepped(torch.optim.AdamW)
    kept = {key: value.clone() for key, value in source["state"][0].items()}
    for algorithm in ("muon", "adamw"):
        result = import_state(target(algorithm=algorithm), Source("adamw", source))
        for value in result.state_dict["state"][0].values():
            value.fill_(7.0)
    assert all(torch.equal(source["state"][0][key], value) for key, value in kept.items())


def test_what_is_missing_or_too_much_is_said() -> None:
    source = Source("torch", WRITTEN["torch"])
    with pytest.raises(ConfigurationError, match="no source has state for new; they have w"):
        import_state(target(names=("w", "new")), source)
    result = import_state(target(names=("new",)), source, missing="fresh")
    assert result.unused == ("w",)
    assert result.summary() == "1 parameters: muon from fresh\nnot used: w"
    assert torch.equal(result.state_dict["state"][0]["momentum_buffer"], torch.zeros(4, 3))


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        (lambda: Source("adafactor", {}), UnsupportedError, "'adafactor' cannot be read; known are hypermuon, adamw"),
        (lambda: Source("torch", saved({"momentum": running_sum()})), ConfigurationError, "has no 'step', only"),
        (
            lambda: Source("dion", saved({"momentum": running_sum()}, algorithm="lion", mu=MU)),
            UnsupportedError,
            "was trained by 'lion'",
        ),
        (
            lambda: Source("dion", saved({"momentum": running_sum()})),
            ConfigurationError,
            r"has no 'mu', only .*Give momentum=",
        ),
        (
            lambda: Source("heavy_ball", saved({"momentum_buffer": running_sum()}, momentum=1.0)),
            ConfigurationError,
            "1.0",
        ),
        (
            lambda: Source("deepspeed", saved({"momentum_buffer": torch.zeros(12)}, momentum=MU)),
            UnsupportedError,
            r"flat buffer, as ZeRO keeps; cut it with unflatten\(\)",
        ),
        (
            lambda: Source("torch", saved({"momentum_buffer": torch.zeros(3, 4)}, momentum=MU)),
            ConfigurationError,
            r"momentum_buffer of w has the shape \(3, 4\), not \(4, 3\)",
        ),
        (lambda: Source("torch", {"model": {}}), ConfigurationError, r'has "state" and "param_groups"; this has'),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(source: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        import_state(target(), source())


def test_mu_can_be_given_where_the_source_does_not_say_it() -> None:
    result = import_state(target(), Source("dion", saved({"momentum": running_sum()}), momentum=MU))
    torch.testing.assert_close(result.state_dict["state"][0]["momentum_buffer"], running_mean())


def test_two_sources_of_one_parameter_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="two sources have state for w"):
        import_state(target(), [Source("torch", WRITTEN["torch"]), Source("keller", WRITTEN["keller"])])


def test_a_flat_buffer_is_cut_into_matrices() -> None:
    """DeepSpeed's ZeRO stages keep all momenta of a partition in one buffer."""
    buffer = torch.arange(18.0)
    parts = unflatten(buffer, {"a": (2, 3), "b": (4, 3)})
    assert torch.equal(parts["a"], buffer[:6].view(2, 3)) and torch.equal(parts["b"], buffer[6:].view(4, 3))
    with pytest.raises(ConfigurationError, match=r"shape \(18,\) does not hold tensors of together 6 elements"):
        unflatten(buffer, {"a": (2, 3)})
