"""Rank functions that train with DeepSpeed's engine, stock or ours, and report what it did in full precision."""

from __future__ import annotations

import contextlib
import copy
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.deepspeed.models import MICRO_BATCH, batch, build_model

STEPS = 6
ADAM = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-4}
"""With Adam's own eps an element whose gradient nearly cancels is moved by its rounding error, times the rate."""


@dataclass
class Run:
    """What one rank saw; the same on all ranks but the losses.

    Attributes:
        losses: of each micro-batch of this rank.
        norms: gradient norm before clipping, of each step.
        rates: learning rate after each step.
        weights: full weights at the end, by name.
        engine: name of the engine's class.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    engine: str = ""


def stock(config: dict[str, Any]) -> dict[str, Any]:
    """The same configuration without our block."""
    config = copy.deepcopy(config)
    config.pop("hyperfsdp", None)
    return config


def base_config(**more: Any) -> dict[str, Any]:
    """ZeRO-3 with everything partitioned, and our block."""
    return {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {**ADAM, "torch_adam": True}},
        "zero_allow_untested_optimizer": True,
        "hyperfsdp": {"supernode_size": 1},
        **more,
    }


def start() -> Any:
    """DeepSpeed, quiet, with ours installed in this process and nothing compiled."""
    import logging

    import deepspeed

    import hp_plugin.deepspeed  # noqa: F401  # this import is what a job adds

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    return deepspeed


def train(*, config: dict[str, Any], style: str = "engine", steps: int = STEPS, **build: Any) -> Run:
    """Train `steps` steps.

    Args:
        config: for `deepspeed.initialize`.
        style: how backward is called: "engine", "direct" (`loss.backward()`), "no_sync" (all but the last micro-batch
            inside it), "told" (as Accelerate: boundary set after forward, one `step()` per step), "unmanaged" (one
            `step()` after all micro-batches, which is the boundary), "coalesced" (all in `coalesce_grad_reduction`).
        steps: of the optimizer.
        **build: see `initialize`.
    """
    deepspeed = start()
    engine = initialize(deepspeed, config, **build)
    run = Run(engine=type(engine).__name__)
    accumulation = engine.gradient_accumulation_steps()
    for step in range(steps):
        if style == "coalesced":
            with engine.coalesce_grad_reduction():
                for micro in range(accumulation):
                    loss = engine(batch(step, micro, engine.global_rank))
                    run.losses.append(loss.item())
                    engine.backward(loss)
            engine.set_gradient_accumulation_boundary(True)
            engine.step()
        else:
            for micro in range(accumulation):
                one_micro_batch(engine, run, style, step, micro, is_last=micro == accumulation - 1)
        norm = engine.get_global_grad_norm()
        run.norms.append(float(norm))
        run.rates.append(engine.get_lr()[0])
    run.weights = full_weights(engine)
    return run


def one_micro_batch(engine: Any, run: Run, style: str, step: int, micro: int, *, is_last: bool) -> None:
    loss = engine(batch(step, micro, engine.global_rank))
    run.losses.append(loss.item())
    if style == "direct":
        loss.backward()
    elif style == "no_sync" and not is_last:
        with engine.no_sync():
            engine.backward(loss)
    else:
        if style == "told":
            engine.set_gradient_accumulation_boundary(is_boundary=is_last)
        engine.backward(loss)
    if style not in ("told", "unmanaged") or is_last:
        engine.step()


def initialize(
    deepspeed: Any,
    config: dict[str, Any],
    *,
    zero_init: bool = False,
    client: str | None = None,
    scheduler: str | None = None,
    model: dict[str, Any] | None = None,
) -> Any:
    """The engine.

    Args:
        deepspeed: the package.
        config: as in the JSON.
        zero_init: build the model under `deepspeed.zero.Init`.
        client: "object": an AdamW of torch; "callable": a function that makes one; "groups": two parameter groups.
        scheduler: "callable": a function that makes a scheduler of torch.
        model: options of the model.
    """
    config = copy.deepcopy(config)
    with deepspeed.zero.Init(config_dict_or_path=config) if zero_init else contextlib.nullcontext():
        module = build_model(**(model or {}))
    arguments: dict[str, Any] = {"model": module, "model_parameters": list(module.parameters())}
    if client is not None:
        config.pop("optimizer")
    if client == "object":
        arguments["optimizer"] = torch.optim.AdamW(module.parameters(), **ADAM)
    elif client == "callable":
        arguments["optimizer"] = lambda parameters: torch.optim.AdamW(parameters, **ADAM)
    elif client == "groups":
        plain = [p for n, p in module.named_parameters() if n.endswith("bias") or "norm" in n]
        others = [p for n, p in module.named_parameters() if not (n.endswith("bias") or "norm" in n)]
        groups = [{"params": others, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
        arguments["optimizer"] = torch.optim.AdamW(groups, **ADAM)
    if scheduler == "callable":
        arguments["lr_scheduler"] = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    engine, *_ = deepspeed.initialize(config=config, **arguments)
    return engine


def full_weights(engine: Any) -> dict[str, torch.Tensor]:
    """Full weights in fp32 on every rank; frozen ones in their own dtype, for which ZeRO has no fp32 value."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    named = dict(engine.module.named_parameters())
    frozen = [parameter for parameter in named.values() if not parameter.requires_grad]
    with deepspeed.zero.GatheredParameters(frozen, enabled=bool(frozen)):
        return {
            name: (safe_get_full_fp32_param(p) if p.requires_grad else p.data).detach().clone()
            for name, p in named.items()
        }
