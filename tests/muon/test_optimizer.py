"""HyperMuon is a torch optimizer: groups, closures, schedulers, scalers, refusals."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from hp_plugin import HyperAdamW, HyperMuon, clip_grad_norm_
from hp_plugin.core.muon.distribution import Distribution
from hp_plugin.core.muon.newton_schulz import orthogonalize_reference
from hp_plugin.core.muon.splits import Convolution, RowSplit, Stack
from hp_plugin.errors import ConfigurationError, UnsupportedError
from tests.muon.layouts import flat
from tests.muon.optimizing import OTHERS, SHAPES, parameters, set_gradients, trained
from tests.muon.reference import reference_run, values
from tests.muon.simulation import assert_same

# ---- what any optimizer does -----------------------------------------------------------------------------------------


def test_steps_are_those_of_the_reference() -> None:
    params = parameters()
    found = trained(params, HyperMuon(params, exact=True), range(4))
    gradients = [values(SHAPES, 10 + step) for step in range(4)]
    assert_same(found, reference_run(values(SHAPES, 1), gradients).weights)


def test_it_is_an_optimizer_of_torch() -> None:
    params = parameters()
    optimizer = HyperMuon(params)
    assert isinstance(optimizer, torch.optim.Optimizer)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    trained(params, optimizer, range(1))
    assert calls == ["before", "after"]
    optimizer.zero_grad()
    assert all(param.grad is None for param in params)
    assert "momentum" in repr(optimizer)


def test_a_closure_is_evaluated_with_gradients_before_the_step() -> None:
    [param] = parameters([(4, 3)])
    optimizer = HyperMuon([param], lr=0.1, weight_decay=0.0)
    before = param.detach().clone()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (param**2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == pytest.approx(float((before**2).sum()))
    assert not torch.equal(param, before)
    assert optimizer.step() is None


def test_groups_have_options_of_their_own() -> None:
    params = parameters()
    optimizer = HyperMuon(
        [
            {"params": params[:1], "lr": 0.1, "momentum": 0.5},
            {"params": params[1:2], "nesterov": False, "weight_decay": 0.0},
            {"params": params[2:]},
        ],
        exact=True,
    )
    found = trained(params, optimizer, range(3))
    gradients = [values(SHAPES, 10 + step) for step in range(3)]
    for index, options in enumerate([{"lr": 0.1, "momentum": 0.5}, {"nesterov": False, "weight_decay": 0.0}, {}]):
        alone = reference_run(values(SHAPES, 1)[index : index + 1], [[g[index]] for g in gradients], **options)
        assert torch.equal(found[index], alone.weights[0])


def test_a_group_added_later_is_planned_and_stepped() -> None:
    params = parameters()
    optimizer = HyperMuon(params[:1], exact=True)
    trained(params[:1], optimizer, range(1))
    assert sum(len(wave.blocks) for wave in optimizer.plan.waves) == 1
    optimizer.add_param_group({"params": params[1:2], "lr": 0.5})
    optimizer.add_param_group({"params": params[2:], "algorithm": "adamw"})
    assert sum(len(wave.blocks) for wave in optimizer.plan.waves) == 2
    before = [param.detach().clone() for param in params]
    trained(params, optimizer, range(1, 2))
    assert not any(torch.equal(param, old) for param, old in zip(params, before, strict=True))
    assert set(optimizer.state[params[2]]) == {"step", "exp_avg", "exp_avg_sq"}
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": params[:1]})


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 1 / (1 + step)] * 2),
        lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4),
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(
            optimizer, [0.1, 0.01], total_steps=8, cycle_momentum=False
        ),
    ],
    ids=["StepLR", "LambdaLR", "CosineAnnealingLR", "OneCycleLR"],
)
def test_schedulers_set_the_learning_rate_before_the_scale(
    make: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler],
) -> None:
    tall, other = parameters([(12, 3), (6, 6)])
    optimizer = HyperMuon([{"params": [tall]}, {"params": [other], "algorithm": "adamw"}], weight_decay=0.0, exact=True)
    scheduler = make(optimizer)
    seen = []
    for step in range(3):
        set_gradients([tall, other], step)
        before = tall.detach().clone()
        rate = optimizer.param_groups[0]["lr"]
        optimizer.step()
        scheduler.step()
        seen.append(rate)
        # The update of a matrix of 3 columns has 3 singular values near 1, times lr sqrt(12 / 3).
        assert float((tall.detach() - before).norm()) == pytest.approx(rate * 2 * 3**0.5, rel=0.25)
    assert len(set(seen)) == 3
    resumed = make(optimizer)
    resumed.load_state_dict(scheduler.state_dict())
    assert resumed.get_last_lr() == scheduler.get_last_lr()


def test_names_are_kept_and_used_in_messages() -> None:
    named = [("layers.0.weight", parameters([(4, 3)])[0]), ("layers.0.bias", nn.Parameter(torch.ones(4)))]
    with pytest.raises(UnsupportedError, match=r"parameter layers\.0\.bias of shape \(4,\) is no matrix"):
        HyperMuon(named)
    optimizer = HyperMuon(named[:1])
    assert optimizer.state_dict()["param_groups"][0]["param_names"] == ["layers.0.weight"]
    assert [each.name for each in optimizer.plan.parameters] == ["layers.0.weight"]


def test_a_model_is_routed() -> None:
    model = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 6), nn.Linear(6, 11))
    optimizer = HyperMuon(model)
    muon = {p for group in optimizer.param_groups if group["algorithm"] == "muon" for p in group["params"]}
    assert muon == {model[1].weight, model[3].weight}
    assert {p for group in optimizer.param_groups for p in group["params"]} == set(model.parameters())


def test_groups_of_the_same_shapes_need_no_names() -> None:
    one, other = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4, 4))
    optimizer = HyperMuon([{"params": [one]}, {"params": [other]}])
    one.grad, other.grad = torch.eye(4), torch.eye(4)
    optimizer.step()
    assert torch.equal(one, other)
    assert [parameter.name for parameter in optimizer.plan.parameters] == ["0 of group 0", "0 of group 1"]


def test_a_wave_needs_a_byte() -> None:
    with pytest.raises(ConfigurationError, match="wave_bytes is 0"):
        HyperMuon([nn.Parameter(torch.ones(4, 4))], wave_bytes=0)


# ---- the AdamW part --------------------------------------------------------------------------------------------------


def test_the_adamw_part_has_the_bits_of_hyper_adamw() -> None:
    mine, theirs = parameters(OTHERS), parameters(OTHERS)
    matrices = parameters()
    options = {"lr": 3e-3, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.2}
    ours = HyperMuon([{"params": matrices}, {"params": mine, "algorithm": "adamw", **options}])
    adamw = HyperAdamW(theirs, **options)  # type: ignore[arg-type]
    for step in range(4):
        set_gradients(matrices, step)
        set_gradients(mine, step)
        set_gradients(theirs, step)
        ours.step()
        adamw.step()
    assert_same(mine, theirs)
    for one, other in zip(mine, theirs, strict=True):
        assert ours.state[one].keys() == adamw.state[other].keys()
        assert all(torch.equal(ours.state[one][key], adamw.state[other][key]) for key in ours.state[one])


def test_defaults_of_the_adamw_part_are_arguments() -> None:
    mine, theirs, matrices = parameters(OTHERS), parameters(OTHERS), parameters()
    ours = HyperMuon(
        [{"params": matrices}, {"params": mine, "algorithm": "adamw"}],
        adam_lr=2e-3,
        adam_betas=(0.7, 0.9),
        adam_eps=1e-5,
        adam_weight_decay=0.05,
    )
    adamw = HyperAdamW(theirs, lr=2e-3, betas=(0.7, 0.9), eps=1e-5, weight_decay=0.05)
    for step in range(2):
        set_gradients(mine, step)
        set_gradients(theirs, step)
        ours.step()
        adamw.step()
    assert_same(mine, theirs)


# ---- gradients -------------------------------------------------------------------------------------------------------


def test_matrices_without_gradient_are_left_alone() -> None:
    params = parameters()
    optimizer = HyperMuon(params)
    trained(params, optimizer, range(1))
    before = params[1].detach().clone()
    momentum = optimizer.state[params[1]]["momentum_buffer"].clone()
    set_gradients(params, 5)
    params[1].grad = None
    optimizer.step()
    assert torch.equal(params[1], before)
    assert torch.equal(optimizer.state[params[1]]["momentum_buffer"], momentum)
    assert optimizer.counters.newton_schulz_calls == 2


def test_accumulated_micro_batches_are_orthogonalized_once_and_have_the_bits_of_one_batch() -> None:
    parts = [values(SHAPES, 20 + index) for index in range(4)]
    whole, split = parameters(), parameters()
    one, four = HyperMuon(whole, exact=True), HyperMuon(split, exact=True)
    for step in range(3):
        for param, *each in zip(whole, *parts, strict=True):
            param.grad = ((each[0] + each[1]) + each[2]) + each[3] + step
        one.step()
        for param in split:
            param.grad = None
        for part in parts:
            for param, value in zip(split, part, strict=True):
                param.grad = value.clone() if param.grad is None else param.grad + value
        for param in split:
            assert param.grad is not None
            param.grad += step
        four.step()
        assert four.counters.newton_schulz_calls == len(SHAPES)
    assert_same(whole, split)


@pytest.mark.parametrize("max_norm", [1e6, 1e-3])
def test_clipping_acts_on_gradients_and_never_on_updates(max_norm: float) -> None:
    """From zero momentum a common factor of the gradients changes nothing: the update has the size of its scale."""
    clipped, free = parameters(), parameters()
    first, second = (HyperMuon(each, ns_dtype=torch.float32) for each in (clipped, free))
    set_gradients(clipped, 3)
    set_gradients(free, 3)
    clip_grad_norm_(clipped, max_norm)
    first.step()
    second.step()
    for one, other, start in zip(clipped, free, parameters(), strict=True):
        difference = (one - other).detach().norm() / (other - start).detach().norm()
        assert float(difference) < 1e-4


def test_running_means_and_running_sums_lead_in_one_direction() -> None:
    means, sums = parameters(), parameters()
    first = HyperMuon(means, ns_dtype=torch.float32)
    second = HyperMuon(sums, ns_dtype=torch.float32, momentum_kind="heavy_ball")
    trained(means, first, range(5))
    trained(sums, second, range(5))
    for one, other in zip(means, sums, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(
            first.state[one]["momentum_buffer"], second.state[other]["momentum_buffer"] * 0.05, rtol=1e-4, atol=1e-6
        )


def test_gradients_with_other_strides_are_taken() -> None:
    """Autograd may lay a gradient out as channels_last or transposed."""
    [plain, turned] = [parameters([(6, 4)])[0] for _ in range(2)]
    [kernel, other] = [parameters([(6, 3, 2, 2)])[0] for _ in range(2)]
    first, second = HyperMuon([plain, kernel]), HyperMuon([turned, other])
    set_gradients([plain, kernel], 3)
    turned.grad = plain.grad.T.contiguous().T
    other.grad = kernel.grad.to(memory_format=torch.channels_last)
    first.step()
    second.step()
    assert torch.equal(plain, turned)
    assert torch.equal(kernel, other)


def test_small_updates_of_bfloat16_weights_survive_in_float32_masters() -> None:
    [master] = parameters([(8, 8)])
    optimizer = HyperMuon([master], lr=1e-6, weight_decay=0.0)
    set_gradients([master], 2)
    master.grad = master.grad.bfloat16().float()
    before = master.detach().clone()
    optimizer.step()
    assert not torch.equal(master, before)


# ---- matrices inside parameters --------------------------------------------------------------------------------------


def test_scales_are_those_of_the_logical_matrices() -> None:
    """Half of a fused weight is square, so it is scaled by 1 and not by the square root of 2."""
    fused, stack, kernel = parameters([(8, 4), (2, 8, 4), (8, 2, 2, 1)])
    splits = {fused: RowSplit(("gate", "up")), stack: Stack(), kernel: Convolution(1)}
    options = {"lr": 1.0, "momentum": 0.0, "weight_decay": 0.0, "ns_dtype": torch.float32}
    optimizer = HyperMuon([fused, stack, kernel], splits=splits, **options)  # type: ignore[arg-type]
    before = [param.detach().clone() for param in (fused, stack, kernel)]
    set_gradients([fused, stack, kernel], 4)
    optimizer.step()
    steps = optimizer.plan.parameters[0].newton_schulz.coefficients
    for start in (0, 4):
        want = before[0][start : start + 4] - orthogonalize_reference(fused.grad[start : start + 4], steps).float()
        torch.testing.assert_close(fused[start : start + 4].detach(), want, rtol=1e-4, atol=1e-4)
    for index in range(2):
        want = before[1][index] - 2**0.5 * orthogonalize_reference(stack.grad[index], steps).float()
        torch.testing.assert_close(stack[index].detach(), want, rtol=1e-4, atol=1e-4)
    want = before[2].flatten(1) - 2**0.5 * orthogonalize_reference(kernel.grad.flatten(1), steps).float()
    torch.testing.assert_close(kernel.flatten(1).detach(), want, rtol=1e-4, atol=1e-4)
    assert optimizer.counters.newton_schulz_calls == 5


# ---- overflow --------------------------------------------------------------------------------------------------------


def scaled_step(scaler: torch.amp.GradScaler, optimizer: HyperMuon, params: list[nn.Parameter], value: float) -> None:
    for param in params:
        param.grad = torch.full_like(param, value) + torch.arange(param.numel()).view(param.shape)
        param.grad *= scaler.get_scale()
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    scaler.update()


def test_a_grad_scaler_unscales_and_skips_before_momentum_moves() -> None:
    params, twins = parameters(), parameters()
    optimizer, plain = HyperMuon(params), HyperMuon(twins)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.ones(()))
    for value in (1.0, float("inf"), 2.0):
        momentum = optimizer.state[params[0]]["momentum_buffer"].clone()
        weight = params[0].detach().clone()
        scaled_step(scaler, optimizer, params, value)
        if value == float("inf"):
            assert torch.equal(optimizer.state[params[0]]["momentum_buffer"], momentum)
            assert torch.equal(params[0], weight)
            assert optimizer.counters.newton_schulz_calls == 0
            assert scaler.get_scale() == 512.0
            continue
        for param in twins:
            param.grad = torch.full_like(param, value) + torch.arange(param.numel()).view(param.shape)
        plain.step()
    assert_same(params, twins)


def test_gradients_that_the_user_unscaled_are_not_unscaled_twice() -> None:
    [param] = parameters([(4, 4)])
    optimizer = HyperMuon([param])
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    scaler.scale(torch.ones(()))
    param.grad = 256 * torch.eye(4)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    torch.testing.assert_close(optimizer.state[param]["momentum_buffer"], 0.05 * torch.eye(4))


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (5,)])
def test_what_is_no_matrix_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(UnsupportedError, match='is no matrix.*"algorithm": "adamw"'):
        HyperMuon([nn.Parameter(torch.ones(shape))])


def test_three_dims_without_a_split_are_refused() -> None:
    [param] = parameters([(3, 4, 5)])
    param.grad = torch.ones(3, 4, 5)
    with pytest.raises(UnsupportedError, match="Stack"):
        HyperMuon([param]).step()


def test_a_flat_shard_needs_its_shape() -> None:
    """A slice of flattened parameters is a vector, and silently a vector is nothing that Muon can do."""
    flat = nn.Parameter(torch.zeros(128))
    with pytest.raises(UnsupportedError, match="is no matrix"):
        HyperMuon([flat])


def test_complex_and_integer_weights_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="dtype torch.complex64"):
        HyperMuon([nn.Parameter(torch.ones(2, 2, dtype=torch.complex64))])


def test_weights_in_another_memory_format_are_refused() -> None:
    kernel = nn.Parameter(torch.ones(4, 3, 2, 2).to(memory_format=torch.channels_last))
    with pytest.raises(UnsupportedError, match="not contiguous"):
        HyperMuon([kernel])
    with pytest.raises(UnsupportedError, match="not contiguous"):
        HyperMuon([nn.Parameter(torch.ones(4, 3).T)])


def test_sparse_gradients_are_refused() -> None:
    [param] = parameters([(4, 3)])
    param.grad = torch.ones(4, 3).to_sparse()
    with pytest.raises(UnsupportedError, match="sparse"):
        HyperMuon([param]).step()


def test_an_optimizer_without_matrices_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="no parameter goes to Muon"):
        HyperMuon([{"params": parameters(OTHERS), "algorithm": "adamw"}])


@pytest.mark.parametrize(
    ("shape", "ranks", "sentence"),
    [
        ((5, 4), (0, 1), r"weight of global shape \(5, 4\) has the local shape \(5, 4\) on rank 0, .* says \(3, 4\)"),
        ((12,), (0, 1), "is no matrix"),
        ((3, 4), (1, 2), r"weight is distributed over the ranks \(1, 2\), of which rank 0 is none"),
    ],
)
def test_a_shard_that_is_not_that_of_its_layout_is_refused(
    shape: tuple[int, ...], ranks: tuple[int, ...], sentence: str
) -> None:
    param = nn.Parameter(torch.zeros(shape))
    distribution = Distribution(flat((5, 4), 2), ranks)
    param.grad = torch.zeros(shape)
    with pytest.raises((ConfigurationError, UnsupportedError), match=sentence):
        HyperMuon([("weight", param)], distributions={param: distribution}).step()
