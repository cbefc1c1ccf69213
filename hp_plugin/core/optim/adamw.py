"""AdamW on the local shards of parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw
from torch.optim.optimizer import ParamsT, StateDict

from hp_plugin.core.kernels import AdamOptions, AdamShard, fused_adamw
from hp_plugin.core.layout import local_tensor
from hp_plugin.core.transport import announce_update
from hp_plugin.errors import ConfigurationError, UnsupportedError

# Options of torch's AdamW that do not exist here. They stand in every parameter group with their off values, so that a
# distributed checkpoint of this optimizer has all the keys for which a torch.optim.AdamW asks.
_OFF = {
    "amsgrad": False,
    "maximize": False,
    "capturable": False,
    "differentiable": False,
    "decoupled_weight_decay": True,
}


class HyperAdamW(Optimizer):
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101) that steps the part of each parameter that this rank holds.

    The arithmetic is torch's own functional `adamw`, called on plain local tensors, so the result equals, bit for bit,
    that of `torch.optim.AdamW` with the same `foreach` and `fused` on those tensors. AdamW is elementwise: a step
    needs no communication, and a parameter may be divided in any way. A step builds and dispatches no `DTensor`.

    State of each parameter, made at its first step: `step` (0-dim fp32), `exp_avg` and `exp_avg_sq` (shape, dtype and
    placements of the parameter; a `DTensor` if the parameter is one). Ranks whose shard is empty keep empty state and
    count steps too, so that a state dict says the same on every rank.

    Args:
        params: parameters, or parameter groups as of any torch optimizer; each a plain tensor or a `DTensor`.
        lr: learning rate.
        betas: decay rates of the running means of the gradient and of its square.
        eps: added to the denominator.
        weight_decay: decoupled decay, multiplied by `lr`.
        foreach: as of `torch.optim.AdamW`; None leaves the choice to torch.
        fused: as of `torch.optim.AdamW`; None leaves the choice to torch, which is False at present.

    With `foreach` and `fused` both None, a kernel that `HP_KERNELS` switches on for the device takes the place of
    torch's (`docs/kernels.md`); its results differ in the last digits.

    `amsgrad`, `maximize`, `capturable` and `differentiable` do not exist here; a state dict that has one of them on is
    refused.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        foreach: bool | None = None,
        fused: bool | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "foreach": foreach,
            "fused": fused,
            **_OFF,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters to be stepped, with their own options; see `torch.optim.Optimizer.add_param_group`."""
        _check_options({**self.defaults, **param_group})
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates every parameter that has a gradient. No communication.

        Args:
            closure: evaluates the model again, with gradients, and returns the loss.

        Returns:
            What the closure returned, else None.

        Raises:
            ConfigurationError: a gradient is placed differently from its parameter.
            UnsupportedError: a gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._step_group(group)
        return loss

    def _step_group(self, group: dict[str, Any]) -> None:
        for param in group["params"]:
            if param.grad is not None and not self.state[param]:
                self.state[param].update(new_adamw_state(param, fused=bool(group["fused"])))
        step_adamw(group, self.state)

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Loads what `state_dict()` of the same mesh gave; also that of a `torch.optim.AdamW` without extras.

        To load across meshes, use `torch.distributed.checkpoint.state_dict.set_optimizer_state_dict`.

        Raises:
            UnsupportedError: an option is on that HyperAdamW does not have.
            ConfigurationError: the state of a parameter has another local shape than the parameter.
        """
        for group in state_dict["param_groups"]:
            _check_options(group)
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            for name in ("foreach", "fused", *_OFF):
                group.setdefault(name, self.defaults[name])
            for param in group["params"]:
                _check_state(param, self.state.get(param, {}))


def new_adamw_state(param: torch.Tensor, *, fused: bool = False) -> dict[str, Any]:
    """The state of AdamW before its first step: `step`, `exp_avg` and `exp_avg_sq`, see `HyperAdamW`."""
    # The fused kernels read the step on the device; the others would wait for the device to read it there.
    device = local_tensor(param).device if fused else torch.device("cpu")
    return {
        "step": torch.zeros((), dtype=torch.float32, device=device),
        "exp_avg": zeros_like_local(param),
        "exp_avg_sq": zeros_like_local(param),
    }


def step_adamw(group: Mapping[str, Any], states: Mapping[torch.Tensor, dict[str, Any]]) -> None:
    """One step of AdamW for the parameters of a group that have a gradient. No communication, no autograd.

    Args:
        group: Parameters and options as in a parameter group of `HyperAdamW`.
        states: Of each parameter with a gradient, the state that `new_adamw_state` made.
    """
    params: list[torch.Tensor] = []
    grads: list[torch.Tensor] = []
    exp_avgs: list[torch.Tensor] = []
    exp_avg_sqs: list[torch.Tensor] = []
    steps: list[torch.Tensor] = []
    for param in group["params"]:
        if param.grad is None:
            continue
        state, local = states[param], local_tensor(param)
        if local.numel() == 0:
            state["step"] += 1
            continue
        params.append(local)
        grads.append(local_gradient(param))
        exp_avgs.append(local_tensor(state["exp_avg"]))
        exp_avg_sqs.append(local_tensor(state["exp_avg_sq"]))
        steps.append(state["step"])
    if not params:
        return
    announce_update(group["params"])
    if group.get("foreach") is None and group.get("fused") is None:  # the choice is ours
        shards = [AdamShard(*each) for each in zip(params, grads, exp_avgs, exp_avg_sqs, steps)]
        options = AdamOptions(group["lr"], group["betas"], group["eps"], group["weight_decay"])
        left = fused_adamw(shards, options)
        if not left:
            return
        params, grads, exp_avgs, exp_avg_sqs, steps = (list(each) for each in zip(*left))
    beta1, beta2 = group["betas"]
    adamw(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        [],
        steps,
        foreach=group.get("foreach"),
        fused=group.get("fused"),
        has_complex=any(param.is_complex() for param in params),
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


def local_gradient(param: torch.Tensor) -> torch.Tensor:
    """The part of a parameter's gradient that this rank holds; it has one, placed as the parameter.

    Raises:
        ConfigurationError: It is placed otherwise.
        UnsupportedError: It is sparse.
    """
    grad = param.grad
    assert grad is not None
    if isinstance(param, DTensor) and isinstance(grad, DTensor) and grad.placements != param.placements:
        raise ConfigurationError(
            f"a parameter of shape {tuple(param.shape)} is placed as {param.placements}, but its gradient as "
            f"{grad.placements}; reduce or redistribute the gradient before the optimizer step."
        )
    if grad.is_sparse:
        raise UnsupportedError("sparse gradients are not supported; use torch.optim.SparseAdam for them.")
    return local_tensor(grad)


def zeros_like_local(param: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Zeros of the local shape; for a `DTensor` wrapped in its spec, without dispatch or communication.

    Args:
        param: A parameter.
        dtype: Of the zeros; None is that of the parameter.
    """
    zeros = torch.zeros_like(local_tensor(param), dtype=dtype, memory_format=torch.preserve_format, requires_grad=False)
    if not isinstance(param, DTensor):
        return zeros
    spec = param._spec
    if dtype is not None and dtype != param.dtype and spec.tensor_meta is not None:
        spec = dataclasses.replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=dtype))
    return DTensor(zeros, spec, requires_grad=False)


def _check_options(options: dict[str, Any]) -> None:
    lr, betas, eps, decay = (options.get(name) for name in ("lr", "betas", "eps", "weight_decay"))
    if isinstance(lr, torch.Tensor):
        raise UnsupportedError("HyperAdamW needs lr as a number, but got a tensor; pass float(lr).")
    for name, value in (("lr", lr), ("eps", eps), ("weight_decay", decay)):
        if value is not None and not value >= 0:
            raise ConfigurationError(f"{name} is {value}, but must not be negative.")
    if betas is not None and not all(0 <= beta < 1 for beta in betas):
        raise ConfigurationError(f"betas are {tuple(betas)}, but each must be at least 0 and below 1.")
    if options.get("foreach") and options.get("fused"):
        raise ConfigurationError("foreach and fused are both on; choose one of them.")
    if options.get("decoupled_weight_decay") is False:
        raise UnsupportedError(
            "the options are those of Adam with L2 regularisation, not of AdamW; use torch.optim.Adam."
        )
    for name in ("amsgrad", "maximize", "capturable", "differentiable"):
        if options.get(name):
            raise UnsupportedError(
                f"HyperAdamW has no option {name!r}, which is on here; use torch.optim.AdamW for it."
            )


def _check_state(param: torch.Tensor, state: dict[str, Any]) -> None:
    for name in ("exp_avg", "exp_avg_sq"):
        if name in state and local_tensor(state[name]).shape != local_tensor(param).shape:
            raise ConfigurationError(
                f"the loaded {name} of a parameter of shape {tuple(param.shape)} has the local shape "
                f"{tuple(local_tensor(state[name]).shape)}, but this rank holds {tuple(local_tensor(param).shape)}; "
                "load across meshes with torch.distributed.checkpoint.state_dict.set_optimizer_state_dict."
            )
