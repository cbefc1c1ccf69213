"""Rank functions that step the same model with Megatron's own optimizer on DDP and with ours on shards."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

from tests.megatron.wrapped import backward, model, start, wrap

STEPS = 3
_SIZES = {"expert_parallel": "expert_model_parallel_size", "context_parallel": "context_parallel_size"}
"""Of the model's configuration, by the argument of `start`."""


def optimizer_config(**options: Any) -> Any:
    """Megatron's configuration, with clipping that bites."""
    from megatron.core.optimizer import OptimizerConfig

    settings = {
        "optimizer": "adam",
        "lr": 1e-2,
        "min_lr": 1e-3,
        "weight_decay": 0.1,
        "clip_grad": 0.5,
        "log_num_zeros_in_grad": True,
        "use_distributed_optimizer": False,
    }
    return OptimizerConfig(**{**settings, **options})


def wrapped_in_ddp(module: Any) -> Any:
    """`module` in Megatron's DDP, with gradients summed in fp32."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    config = DistributedDataParallelConfig(overlap_grad_reduce=True, grad_reduce_in_fp32=True)
    return DistributedDataParallel(module.config, config, module)


def both(*, supernode_size: int, options: dict[str, Any], model_options: dict[str, Any]) -> tuple[Any, ...]:
    """(chunk, optimizer) of stock and of ours."""
    from megatron.core.optimizer import get_megatron_optimizer

    from hp_plugin.megatron.fsdp.optimizer import build_optimizer

    config = optimizer_config(**options)
    frozen = model_options.pop("frozen", False)

    def make() -> Any:
        made = model(**model_options)
        dtype = torch.bfloat16 if config.bf16 else torch.float16 if config.fp16 else torch.float32
        if frozen:
            made.decoder.layers[0].self_attention.linear_proj.weight.requires_grad_(False)
        return made.to(dtype)

    stock = wrapped_in_ddp(make())
    ours = wrap(make(), supernode_size=supernode_size)
    theirs, mine = get_megatron_optimizer(config, [stock]), build_optimizer(get_megatron_optimizer, config, [ours])
    return (stock, theirs), (ours, mine)


def take_steps(chunk: Any, optimizer: Any, *, steps: int = STEPS) -> list[tuple[Any, Any, Any]]:
    """What `step()` returned, and as numbers; gradients come from the wrapper's own synchronisation."""
    returned = []
    for _ in range(steps):
        chunk.zero_grad_buffer()
        optimizer.zero_grad()
        scale = optimizer.get_loss_scale().item()
        no_sync = chunk.no_sync
        backward(_Scaled(chunk, scale), no_sync=no_sync)
        chunk.finish_grad_sync()
        returned.append(optimizer.step())
    return returned


class _Scaled:
    """A model whose losses are multiplied, as the schedules multiply them by the loss scale."""

    def __init__(self, chunk: Any, scale: float) -> None:
        self._chunk, self._scale = chunk, scale

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._chunk(*args, **kwargs).float() * self._scale


def compare(
    *,
    supernode_size: int,
    options: dict[str, Any],
    model_options: dict[str, Any] | None = None,
    parallel: dict[str, int] | None = None,
) -> dict[str, float]:
    """Largest relative differences of norms, zero counts and weights after three steps, and whether all succeeded."""
    start(**(parallel or {}))
    sizes = {_SIZES[name]: size for name, size in (parallel or {}).items() if name in _SIZES}
    (stock, theirs), (ours, mine) = both(
        supernode_size=supernode_size, options=options, model_options={**sizes, **(model_options or {})}
    )
    expected, found = take_steps(stock, theirs), take_steps(ours, mine)
    norms = [abs(b[1] - a[1]) / a[1] if a[1] else float(b[1] != a[1]) for a, b in zip(expected, found, strict=True)]
    weights = dict(stock.module.named_parameters())
    differences = [
        ((p.full_tensor() - weights[n].float()).abs().max() / weights[n].float().abs().max()).item()
        for n, p in ours.module.named_parameters()
    ]
    return {
        "norm": max(norms),
        "smallest norm": min(float(a[1] or 0.0) for a in expected),
        "zeros": max(abs((b[2] or 0) - (a[2] or 0)) for a, b in zip(expected, found, strict=True)),
        "weight": max(differences),
        "success": float([a[0] for a in expected] == [b[0] for b in found]),
        "steps made": float(sum(b[0] for b in found)),
    }


def groups(*, supernode_size: int) -> dict[str, Any]:
    """Whether groups carry stock's options and parameters, with a decoupled learning rate and no decay on norms."""
    start()
    options = {"decoupled_lr": 5e-3, "decoupled_min_lr": 1e-4}
    (stock, theirs), (ours, mine) = both(supernode_size=supernode_size, options=options, model_options={"tied": False})

    def described(chunk: Any, groups: list[dict[str, Any]]) -> list[Any]:
        names = {id(parameter): name for name, parameter in chunk.module.named_parameters()}
        return [
            ({k: v for k, v in group.items() if k != "params"}, [names[id(p)] for p in group["params"]])
            for group in groups
        ]

    expected, found = described(stock, theirs.param_groups), described(ours, mine.param_groups)
    return {
        "parameters": [names for _, names in expected] == [names for _, names in found],
        "options": all(a.items() <= b.items() for (a, _), (b, _) in zip(expected, found, strict=True)),
        "number": len(found),
        "multipliers": sorted((group["wd_mult"], group["max_lr"]) for group in mine.param_groups),
        "no stub": not mine.is_stub_optimizer,
        "scale": mine.get_loss_scale().tolist() == [1.0] and mine.scale_loss(torch.tensor(2.0)).item() == 2.0,
        "same parameters": {id(p) for p in mine.get_parameters()} == {id(p) for p in ours.parameters()},
    }


def skipped(*, threshold: float) -> tuple[list[bool], bool]:
    """Whether steps were made under a limit on the norm, and whether weights moved."""
    start()
    _, (ours, mine) = both(supernode_size=2, options={"grad_norm_skip_threshold": threshold}, model_options={})
    before = [parameter._local_tensor.clone() for parameter in ours.parameters()]
    made = [success for success, _, _ in take_steps(ours, mine)]
    moved = any(not torch.equal(a, p._local_tensor) for a, p in zip(before, ours.parameters(), strict=True))
    return made, moved


def overflow() -> dict[str, Any]:
    """A loss scale that overflows is lowered, nothing is updated, and all ranks agree."""
    start()
    options = {"fp16": True, "initial_loss_scale": 2.0**40, "hysteresis": 1, "loss_scale_window": 100}
    _, (ours, mine) = both(supernode_size=1, options=options, model_options={"fp16": True})
    before = [parameter._local_tensor.clone() for parameter in ours.parameters()]
    scale = mine.get_loss_scale().item()
    returned = take_steps(ours, mine, steps=1)
    return {
        "returned": returned,
        "unmoved": all(torch.equal(a, p._local_tensor) for a, p in zip(before, ours.parameters(), strict=True)),
        "scale": mine.get_loss_scale().item() / scale,
    }


def overflow_of_experts() -> dict[str, Any]:
    """The same where rank 1 alone finds an infinity, in the gradient of one of its experts."""
    start(expert_parallel=2)
    options = {"fp16": True, "initial_loss_scale": 1024.0, "hysteresis": 1, "loss_scale_window": 100}
    experts = {"num_moe_experts": 4, "moe_router_topk": 2, "expert_model_parallel_size": 2}
    _, (ours, mine) = both(supernode_size=2, options=options, model_options={"fp16": True, **experts})
    before = [parameter._local_tensor.clone() for parameter in ours.parameters()]
    ours.zero_grad_buffer()
    backward(_Scaled(ours, 1024.0), no_sync=ours.no_sync)
    ours.finish_grad_sync()
    if dist.get_rank() == 1:
        expert = next(parameter for name, parameter in ours.named_parameters() if "local_experts" in name)
        expert.main_grad[0, 0] = float("inf")
    returned = mine.step()
    return {
        "returned": returned,
        "unmoved": all(torch.equal(a, p._local_tensor) for a, p in zip(before, ours.parameters(), strict=True)),
        "scales": [part.get_loss_scale().item() / 1024.0 for part in mine.parts],
    }


def stage_without_parameters() -> dict[str, Any]:
    """Rank 1's pipeline stage has no parameters; it takes part in norms and counts all the same."""
    from megatron.core.optimizer import get_megatron_optimizer

    from hp_plugin.megatron.fsdp.optimizer import build_optimizer

    start(pipeline_parallel=2)
    inner = model()
    if dist.get_rank() == 1:
        config = inner.config
        inner = torch.nn.Module()
        inner.config = config
    chunk = wrap(inner, supernode_size=1)
    optimizer = build_optimizer(get_megatron_optimizer, optimizer_config(), [chunk])
    for index, parameter in enumerate(chunk.parameters()):
        parameter.grad = torch.distributed.tensor.DTensor(
            torch.full_like(parameter._local_tensor, float(index)), parameter._spec, requires_grad=False
        )
    chunk.finish_grad_sync()
    numel = [float(parameter.numel()) for parameter in chunk.parameters()]
    success, norm, zeros = optimizer.step()
    return {
        "success": success,
        "norm": norm,
        "zeros": zeros,
        "expected norm": math.sqrt(sum(index**2 * n for index, n in enumerate(numel))),
        "expected zeros": numel[0] if numel else None,
    }


def statistics_are_counted_once(*, supernode_size: int, tensor_parallel: int) -> tuple[float, float]:
    """The norm of all-ones gradients, and the number of elements of the whole model, each counted once."""
    from megatron.core.optimizer import get_megatron_optimizer
    from torch.distributed.tensor import DTensor

    from hp_plugin.megatron.fsdp.optimizer import build_optimizer

    start(tensor_parallel=tensor_parallel)
    whole = model(tensor_model_parallel_size=tensor_parallel)
    numel = sum(
        p.numel() * (tensor_parallel if getattr(p, "tensor_model_parallel", False) else 1) for p in whole.parameters()
    )
    chunk = wrap(whole, supernode_size=supernode_size)
    optimizer = build_optimizer(get_megatron_optimizer, optimizer_config(clip_grad=0.0), [chunk])
    for parameter in chunk.parameters():
        parameter.grad = DTensor(torch.ones_like(parameter._local_tensor), parameter._spec, requires_grad=False)
    return optimizer.get_grad_norm() ** 2, float(numel)


def dispatches_of_a_step() -> int:
    """How many operations a step dispatches on DTensors."""
    from torch.distributed.tensor import DTensor
    from torch.utils._python_dispatch import TorchDispatchMode

    start()
    _, (ours, mine) = both(supernode_size=2, options={}, model_options={})
    take_steps(ours, mine, steps=1)
    seen = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal seen
            seen += any(issubclass(kind, DTensor) for kind in types)
            return func(*args, **(kwargs or {}))

    backward(ours, no_sync=ours.no_sync)
    ours.finish_grad_sync()
    with Watch():
        mine.step()
    return seen
