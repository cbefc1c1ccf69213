"""Rank functions in fp16: overflows, what users read of the scale, and checkpoints."""

from __future__ import annotations

from typing import Any

import torch

from tests.deepspeed.helpers import SCHEDULED
from tests.deepspeed.models import batch
from tests.deepspeed.training import Run, base_config, full_weights, initialize, start
from tests.support.told import told

DYNAMIC = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 1, "min_loss_scale": 64}


def config(**fp16: Any) -> dict[str, Any]:
    return base_config(fp16={**DYNAMIC, **fp16}, scheduler=SCHEDULED, gradient_clipping=0.5)


def step_with(engine: Any, step: int, *, factor: float = 1.0) -> None:
    """One step whose loss is multiplied by `factor`."""
    loss = engine(batch(step, 0, engine.global_rank))
    engine.backward(loss * factor)
    engine.step()


def facts_of(engine: Any) -> dict[str, Any]:
    """What a job reads after a step."""
    return {
        "scale": engine.optimizer.cur_scale,
        "skipped": engine.skipped_steps,
        "overflow": engine.optimizer.overflow,
        "applied": engine.was_step_applied(),
        "steps": engine.global_steps,
        "rate": engine.get_lr()[0],
    }


def overflow_on_one_rank() -> dict[str, Any]:
    """Good step, bad step on rank 1 alone, then three good ones: what is read after each."""
    import torch.distributed as dist

    engine = initialize(start(), config())
    assert engine.fp16_enabled() and not engine.bfloat16_enabled()
    found: dict[str, Any] = {"start": facts_of(engine)}
    step_with(engine, 0)
    found["good"] = facts_of(engine)
    before = full_weights(engine)
    step_with(engine, 1, factor=float("inf") if dist.get_rank() == 1 else 1.0)
    found["bad"] = facts_of(engine)
    after = full_weights(engine)
    found["unchanged"] = all(torch.equal(before[name], after[name]) for name in before)
    for step in range(2, 5):
        step_with(engine, step)
    found["later"] = facts_of(engine)
    assert engine.optimizer.loss_scale == engine.optimizer.cur_scale  # as monitors read it
    found["masters"] = {weight.dtype for weight in after.values()} == {torch.float32}
    found["minimum"] = told(lambda: [step_with(engine, step, factor=float("inf")) for step in range(5, 9)])
    return found


def backward_styles() -> dict[str, Any]:
    """`engine.scale(loss).backward()` is `engine.backward(loss)`, a bare `loss.backward()` is refused."""
    deepspeed = start()
    runs = {}
    for style in ("engine", "scaled"):
        engine = initialize(deepspeed, {**config(loss_scale=128.0), "gradient_accumulation_steps": 2})
        run = Run()
        for step in range(2):
            for micro in range(2):
                loss = engine(batch(step, micro, engine.global_rank))
                if style == "engine":
                    returned = engine.backward(loss)
                    torch.testing.assert_close(returned, loss / 2)  # unscaled, as DeepSpeed returns it
                else:
                    engine.scale(loss).backward()
                engine.step()
            run.norms.append(engine.get_global_grad_norm())
        run.weights = full_weights(engine)
        runs[style] = run
    refused = ""
    try:
        engine(batch(9, 0, 0)).backward()
    except RuntimeError as error:
        refused = str(error)
    equal = all(torch.equal(runs["engine"].weights[n], w) for n, w in runs["scaled"].weights.items())
    return {"equal": equal, "norms": [runs[s].norms for s in runs], "refused": refused}


def written_scale() -> list[float]:
    """A job may write the scale, which holds from the next step on, and masters move as without it."""
    engine = initialize(start(), config(loss_scale_window=100))
    found = []
    step_with(engine, 0)
    engine.optimizer.loss_scale = 1024.0
    step_with(engine, 1)
    found.append(engine.optimizer.cur_scale)
    engine.optimizer.override_loss_scale(2048)
    loss = engine(batch(2, 0, engine.global_rank))
    engine.backward(loss)
    found.append(engine.loss_scaler.applied)
    return found


def save_and_continue(*, directory: str) -> dict[str, Any]:
    """Two good steps, one overflow, saved; then two more steps without a break."""
    engine = initialize(start(), config())
    for step in range(2):
        _same_data(engine, step)
    step_with(engine, 2, factor=float("inf"))
    engine.save_checkpoint(directory)
    return _go_on(engine)


def load_and_continue(*, directory: str) -> dict[str, Any]:
    """The same from the checkpoint, in a job whose scale begins elsewhere."""
    engine = initialize(start(), config(initial_scale_power=10))
    engine.load_checkpoint(directory)
    assert engine.skipped_steps == 1
    return _go_on(engine)


def _go_on(engine: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"state": engine.loss_scaler.loss_scale.state_dict(), "scales": []}
    for step in range(3, 7):
        _same_data(engine, step)
        found["scales"].append(engine.optimizer.cur_scale)
    found["weights"] = full_weights(engine)
    return found


def _same_data(engine: Any, step: int) -> None:
    loss = engine(batch(step, 0, 0))
    engine.backward(loss)
    engine.step()


def cast_inputs() -> dict[str, Any]:
    """What `auto_cast` does to fp32 inputs of a module."""
    deepspeed = start()
    found = {}
    for auto_cast in (True, False):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        block = config(auto_cast=auto_cast)
        engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=block)
        try:
            found[auto_cast] = str(engine(torch.randn(2, 4)).dtype)
        except RuntimeError:
            found[auto_cast] = "refused by torch"
    return found


def initialize_in_fp16() -> str:
    """What is said in a job where DeepSpeed holds the device incapable of fp16."""
    from deepspeed.accelerator import get_accelerator

    deepspeed = start()
    accelerator: Any = get_accelerator()
    accelerator.is_fp16_supported = lambda: False
    return told(lambda: initialize(deepspeed, config()))
