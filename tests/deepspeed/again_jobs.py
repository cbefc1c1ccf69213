"""Rank functions on what is asked of an engine between micro-batches, and on a model that gets a second engine."""

from __future__ import annotations

from typing import Any

import torch

from tests.deepspeed.models import batch, build_model
from tests.deepspeed.training import ADAM, Run, base_config, full_weights, initialize, one_micro_batch, start
from tests.support.told import told

ACCUMULATION = 3


def _config(supernode_size: int, **more: Any) -> dict[str, Any]:
    return base_config(hyperfsdp={"supernode_size": supernode_size}, gradient_accumulation_steps=ACCUMULATION, **more)


def gradients_so_far(*, supernode_size: int) -> None:
    """Gradients that are read between micro-batches are those of all so far; reading, or dropping, spoils nothing."""
    import torch.distributed as dist
    from deepspeed.utils import safe_get_full_grad, safe_get_local_grad, safe_set_full_grad

    deepspeed = start()
    engine = initialize(deepspeed, _config(supernode_size))
    plain = build_model()
    named, own = dict(engine.module.named_parameters()), dict(plain.named_parameters())
    world = dist.get_world_size()

    def micro_batch(micro: int) -> None:
        engine.backward(engine(batch(0, micro, dist.get_rank())))
        for rank in range(world):
            (plain(batch(0, micro, rank)) / (ACCUMULATION * world)).backward()

    def assert_equal_gradients() -> None:
        for name, parameter in named.items():
            torch.testing.assert_close(safe_get_full_grad(parameter), own[name].grad, rtol=0, atol=2e-7)

    for micro in range(ACCUMULATION):
        micro_batch(micro)
        if micro != 1:  # two partial sums are read at once
            assert_equal_gradients()
        engine.step()
    assert engine.global_steps == 1
    plain = build_model()
    plain.load_state_dict(full_weights(engine))
    own = dict(plain.named_parameters())

    # What was accumulated can be changed, ...
    micro_batch(0)
    changed = own["head.weight"]
    assert changed.grad is not None
    changed.grad.mul_(2.0)
    safe_set_full_grad(named["head.weight"], changed.grad)
    micro_batch(1)
    assert_equal_gradients()
    # ... and dropped.
    with engine.no_sync():
        micro_batch(2)
    engine.zero_grad()
    plain.zero_grad()
    assert safe_get_full_grad(named["head.weight"]) is None and safe_get_local_grad(named["head.weight"]) is None
    micro_batch(0)
    assert_equal_gradients()


def backward_without_division(*, supernode_size: int) -> None:
    """With `scale_wrt_gas=False`, as Accelerate calls backward, gradients are sums over micro-batches, not means."""
    import torch.distributed as dist
    from deepspeed.utils import safe_get_full_grad

    deepspeed = start()
    engine = initialize(deepspeed, _config(supernode_size))
    plain, world = build_model(), dist.get_world_size()
    for micro in range(ACCUMULATION):
        loss = engine(batch(0, micro, dist.get_rank()))
        assert torch.equal(engine.backward(loss, scale_wrt_gas=False), loss)
        for rank in range(world):
            (plain(batch(0, micro, rank)) / world).backward()
        if micro < ACCUMULATION - 1:
            engine.step()
    for name, parameter in engine.module.named_parameters():
        torch.testing.assert_close(
            safe_get_full_grad(parameter), plain.get_parameter(name).grad, rtol=0, atol=ACCUMULATION * 2e-7
        )


def contexts_in_contexts(*, supernode_size: int) -> None:
    """`no_sync` and `coalesce_grad_reduction` raise what DeepSpeed raises where they cannot be used."""
    deepspeed = start()
    engine = initialize(deepspeed, _config(supernode_size))
    with engine.no_sync():
        assert told(engine.no_sync().__enter__).startswith("AssertionError: no_sync context manager reentry")
        assert "AssertionError: coalesce_grad_reduction cannot be nested" in told(
            engine.coalesce_grad_reduction().__enter__
        )
    with engine.coalesce_grad_reduction():
        assert told(engine.no_sync().__enter__).startswith("AssertionError: no_sync context manager reentry")
    if hasattr(type(engine), "managed_gradient_accumulation"):  # not before DeepSpeed 0.19
        unmanaged = initialize(deepspeed, _config(supernode_size, managed_gradient_accumulation=False))
        said = told(unmanaged.coalesce_grad_reduction().__enter__)
        assert "not supported with managed_gradient_accumulation=False" in said


def other_parameters_in_every_micro_batch(*, supernode_size: int) -> None:
    """What is trained may change between micro-batches, as in ZeRO: each gradient is the sum over its own ones."""
    import torch.distributed as dist
    from deepspeed.utils import safe_get_full_grad

    deepspeed = start()
    engine = initialize(deepspeed, _config(supernode_size))
    plain = build_model()
    optimizer = torch.optim.AdamW(plain.parameters(), **ADAM)
    pairs = list(zip(engine.module.parameters(), plain.parameters(), strict=True))
    world = dist.get_world_size()
    for step in range(2):
        for micro in range(ACCUMULATION):
            for index, pair in enumerate(pairs):
                for parameter in pair:
                    parameter.requires_grad_(index % 2 == micro % 2)
            engine.backward(engine(batch(step, micro, dist.get_rank())))
            for rank in range(world):
                (plain(batch(step, micro, rank)) / (ACCUMULATION * world)).backward()
            if micro == ACCUMULATION - 1:
                for parameter, own in pairs:
                    torch.testing.assert_close(safe_get_full_grad(parameter), own.grad, rtol=0, atol=2e-7)
            engine.step()
        optimizer.step()
        optimizer.zero_grad()
    for _, own in pairs:
        own.requires_grad_(True)
    for parameter, _ in pairs:
        parameter.requires_grad_(True)
    for name, weight in full_weights(engine).items():
        torch.testing.assert_close(weight, plain.get_parameter(name).detach(), rtol=0, atol=2e-6)


def second_engine(*, supernode_size: int, has_client: bool, **more: Any) -> None:
    """A second engine on a model goes on from its weights with an optimizer of its own, as one on a new model does."""
    deepspeed = start()
    config = _config(supernode_size, **more)

    def build(model: Any) -> Any:
        if not has_client:
            return deepspeed.initialize(config=config, model=model, model_parameters=list(model.parameters()))[0]
        given = {key: value for key, value in config.items() if key != "optimizer"}
        return deepspeed.initialize(config=given, model=model, optimizer=torch.optim.AdamW(model.parameters(), **ADAM))[
            0
        ]

    def train(engine: Any, first: int) -> Run:
        run = Run()
        for step in range(first, first + 2):
            for micro in range(ACCUMULATION):
                one_micro_batch(engine, run, "engine", step, micro, is_last=micro == ACCUMULATION - 1)
            run.norms.append(float(engine.get_global_grad_norm()))
        run.weights = full_weights(engine)
        return run

    first = build(build_model())
    trained = train(first, 0)
    fresh = build_model()
    fresh.load_state_dict(trained.weights)
    expected = train(build(fresh), 2)
    # Left in the middle of a step, whose gradients are dropped.
    first.backward(first(batch(9, 0, first.global_rank)))
    hooks = len(first.module._forward_hooks), len(first.module._forward_pre_hooks)
    again = build(first.module)
    # Nothing of the first engine runs any more, or keeps its optimizer alive.
    assert (len(again.module._forward_hooks), len(again.module._forward_pre_hooks)) == hooks
    assert again is not first and again.module is first.module and again.global_steps == 0
    assert_equal_runs(train(again, 2), expected)

    assert "called again with the model of this engine" in told(
        lambda: first.backward(torch.zeros((), requires_grad=True))
    )
    outer = torch.nn.Sequential(first.module)
    assert "the engine of another module" in told(lambda: build(outer))
    config["hyperfsdp"] = {"supernode_size": supernode_size, "mode": "validation"}
    assert "compares with the unsharded model" in told(lambda: build(first.module))
    config["hyperfsdp"] = {"supernode_size": 1}
    assert "and this one differs" in told(lambda: build(first.module))
    config["hyperfsdp"], config["bf16"] = {"supernode_size": supernode_size}, {"enabled": not more}
    assert "to compute in" in told(lambda: build(first.module))


def assert_equal_runs(run: Run, expected: Run) -> None:
    """Bit for bit."""
    assert run.losses == expected.losses and run.norms == expected.norms
    for name, weight in run.weights.items():
        assert torch.equal(weight, expected.weights[name]), name
