"""Gradients between backward and the optimizer, in the form in which stock Megatron finalizes them.

Megatron's `finalize_model_grads` completes gradients across tensor- and pipeline-parallel ranks: norms under sequence
parallelism, embeddings tied across stages, replicated embedders. It reads and writes `param.main_grad`, and falls back
to gathering `param.grad` in full if that is a DTensor. Ranks that exchange a gradient there hold the same rows of it,
since they have the same place in their data-parallel groups. So it is enough to publish each rank's shard of the
gradient, a plain tensor, as `main_grad`: the unmodified function then works on shards, in place, and nothing is
gathered.

`main_grad` exists from the end of the gradient synchronisation until the gradients are zeroed, and always shares the
memory of `grad`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from hp_plugin.core.layout import local_tensor
from hp_plugin.megatron.fsdp.grad_stats import squared_norms

MAIN_GRAD = "main_grad"


def publish(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Make the local shard of every gradient readable and writable as `param.main_grad`.

    A trainable parameter that got no gradient gets zeros, as in Megatron's own gradient buffers: pipeline stages must
    agree on which tied weights they exchange, and weight decay applies whether or not a parameter was used.
    """
    for parameter in parameters:
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            parameter.grad = _zeros_like(parameter)
        setattr(parameter, MAIN_GRAD, local_tensor(parameter.grad))


def withdraw(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Drop all gradients and their published shards."""
    for parameter in parameters:
        parameter.grad = None
        vars(parameter).pop(MAIN_GRAD, None)


@torch.no_grad()
def scale(parameters: Iterable[torch.nn.Parameter], factor: float | torch.Tensor) -> None:
    """Multiply all gradients by `factor`, a number or a tensor of one element."""
    gradients = [local_tensor(p.grad) for p in parameters if p.grad is not None]
    if gradients:
        if isinstance(factor, torch.Tensor):
            factor = factor.reshape(()).to(gradients[0].device)
        torch._foreach_mul_(gradients, factor)


def check_finite(parameters: Sequence[torch.nn.Parameter]) -> None:
    """Report a NaN or Inf in this rank's shards to Megatron's rerun machinery, which ends or reruns the job.

    Stock Megatron looks at the local gradients before they are reduced; here they are looked at afterwards, when a
    NaN of any rank has reached the ranks that hold its rows. Either way some rank finds it before the optimizer does.
    """
    from megatron.core.rerun_state_machine import get_rerun_state_machine

    squares = squared_norms(p.grad for p in parameters if p.grad is not None)
    if not squares:
        return
    norm = torch.stack(squares).sum().sqrt()
    validate = partial(get_rerun_state_machine().validate_result, result=norm, tolerance=0.001, fatal=True)
    where = "in the norm of this rank's gradient shards after the data-parallel reduction"
    validate(rejection_func=torch.isnan, message=f"found NaN {where}")
    validate(rejection_func=torch.isinf, message=f"found Inf {where}")


def _zeros_like(parameter: torch.nn.Parameter) -> torch.Tensor:
    zeros: Any = torch.zeros_like(local_tensor(parameter).detach())
    if not isinstance(parameter, DTensor):
        return zeros
    return DTensor.from_local(
        zeros,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
