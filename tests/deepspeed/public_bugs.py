"""Rank functions for public faults of DeepSpeed's own engines."""

from __future__ import annotations

import copy
import os
import time
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.deepspeed.models import batch, build_model
from tests.deepspeed.training import Run, base_config, full_weights, initialize, start
from tests.support.told import told


@dataclass
class BugRun(Run):
    """A run, with what its optimizer is left with.

    Attributes:
        skipped: steps that overflowed.
        scale: the loss scale at the end.
        states: dtypes of the optimizer's state, by its name.
        mesh: sizes of the mesh of our engine.
        evaluated: the loss of a forward without backward, before each step.
    """

    skipped: int = 0
    scale: float = 1.0
    states: dict[str, str] = field(default_factory=dict)
    mesh: tuple[int, ...] = ()
    evaluated: list[float] = field(default_factory=list)


def train(
    *,
    config: dict[str, Any],
    steps: int,
    first: int = 0,
    directory: str = "",
    load: bool = False,
    save: bool = False,
    uneven: bool = False,
) -> BugRun:
    """Train on the same data on every rank.

    Args:
        config: for `deepspeed.initialize`.
        steps: of the optimizer.
        first: number of the first step, by which data are chosen.
        directory: of checkpoints.
        load: from there, before the first step, into a model with other weights.
        save: there, after the last step.
        uneven: recompute activations, evaluate between steps, and let ranks arrive at different times.
    """
    engine = initialize(start(), config)
    run = BugRun(engine=type(engine).__name__)
    if load:
        with torch.no_grad():
            for parameter in engine.module.parameters():
                parameter.add_(1.0)
        engine.load_checkpoint(directory)
    if uneven:
        _recompute(engine.module)
    for step in range(first, first + steps):
        if uneven:
            with torch.no_grad():
                run.evaluated.append(engine(batch(step, 1, 0)).item())
            time.sleep(0.03 * ((engine.global_rank * 7 + step) % 4))
        loss = engine(batch(step, 0, 0))
        run.losses.append(loss.item())
        engine.backward(loss)
        engine.step()
        run.norms.append(float(engine.get_global_grad_norm()))
    if save:
        engine.save_checkpoint(directory)
    run.skipped, run.scale = engine.skipped_steps, float(getattr(engine.optimizer, "cur_scale", 1.0))
    run.weights = full_weights(engine)
    if hasattr(engine, "mesh"):
        run.mesh = tuple(engine.mesh.shape)
        for state in engine.optimizer.state.values():
            run.states.update({key: str(value.dtype) for key, value in state.items() if torch.is_tensor(value)})
    return run


def _recompute(model: Any) -> None:
    for block in model.blocks:
        plain = block.forward
        block.forward = lambda hidden, plain=plain: torch.utils.checkpoint.checkpoint(plain, hidden, use_reentrant=True)


def with_a_new_parameter() -> dict[str, Any]:
    """Trains with an engine whose constructor has got one more parameter before those that were there."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    start()
    original: Any = DeepSpeedEngine.__init__
    seen: dict[str, Any] = {}

    def initialize(self: Any, args: Any, model: Any, offload_ratio: float = 0.0, **others: Any) -> None:
        seen["offload_ratio"], seen["class"] = offload_ratio, type(self).__name__
        original(self, args, model, **others)

    before = train(config=base_config(), steps=2)
    DeepSpeedEngine.__init__ = initialize  # type: ignore[method-assign]
    try:
        after = train(config=base_config(), steps=2)
    finally:
        DeepSpeedEngine.__init__ = original  # type: ignore[method-assign]
    return {**seen, "equal": before.losses == after.losses and before.norms == after.norms}


def refused_keys(*, configs: dict[str, dict[str, Any]]) -> dict[str, str]:
    """What `deepspeed.initialize` says to each configuration."""
    deepspeed = start()
    return {name: told(lambda config=config: initialize(deepspeed, config)) for name, config in configs.items()}


def no_sync_is_refused(*, config: dict[str, Any]) -> str:
    """What the engine of `config` says to `no_sync`."""
    engine = initialize(start(), config)

    def enter() -> None:
        with engine.no_sync():
            pass

    return told(enter)


def accumulate_with_accelerate(*, config: dict[str, Any], micro_batches: int, always_sync: bool) -> Run:
    """Accelerate's loop of gradient accumulation, as its documentation has it.

    Args:
        config: of the plugin.
        micro_batches: per step.
        always_sync: leave `no_sync` out, as jobs with stock ZeRO-3 must.
    """
    start()
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    from accelerate import Accelerator, DeepSpeedPlugin

    made = copy.deepcopy(config)
    made["gradient_accumulation_steps"] = micro_batches
    plugin = DeepSpeedPlugin(hf_ds_config=made)
    accelerator = Accelerator(deepspeed_plugin=plugin, gradient_accumulation_steps=micro_batches)
    module = build_model()
    from accelerate.utils import DummyOptim

    engine, optimizer = accelerator.prepare(module, DummyOptim(module.parameters()))
    run = Run(engine=type(engine).__name__)
    for step in range(3):
        for micro in range(micro_batches):
            is_last = micro == micro_batches - 1
            accelerator.gradient_state._set_sync_gradients(is_last)
            loss = engine(batch(step, micro, accelerator.process_index))
            run.losses.append(loss.item())
            if is_last or always_sync:
                accelerator.backward(loss)
            else:
                with engine.no_sync():
                    accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        run.norms.append(float(engine.get_global_grad_norm()))
    run.weights = full_weights(engine)
    return run
