"""`ShardOptimizer`: Megatron's optimizer interface over the local fp32 shards of HyperFSDP.

The shards at rest are the fp32 master weights, so there are no main parameters beside them: with bf16 compute the
cast happens when a unit is gathered. Gradients arrive reduced, in fp32, as the shards that `finalize` has published.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import optimizer as stock_optimizer
from megatron.core.optimizer.grad_scaler import ConstantGradScaler, DynamicGradScaler
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch.distributed.device_mesh import DeviceMesh

from hp_plugin.core.layout import local_tensor
from hp_plugin.core.optim import HyperAdamW
from hp_plugin.errors import UnsupportedError
from hp_plugin.megatron.checkpoints import optimizer_parts, optimizer_state
from hp_plugin.megatron.checkpoints.opened import SHARDING_TYPE, forget_opened, with_opened
from hp_plugin.megatron.fsdp.grad_stats import counted_once, squared_norms, sum_over_model, zero_counts
from hp_plugin.megatron.muon.saved_state import refuse_muon
from hp_plugin.megatron.releases.differences import decouples_weight_decay


class ShardOptimizer(MegatronOptimizer):
    """Steps the shards of this rank; norm, clipping and zero count are over all ranks.

    It has the parameters of one mesh. Under expert parallelism there are two, chained by `chained_shards`.

    Args:
        optimizer: Element-wise torch optimizer over `masters`; None on a rank that has no parameter group at all.
        config: Megatron's `OptimizerConfig`.
        model_chunks: The HyperFSDP chunks of this rank.
        parameters: The model's parameters, in the order in which they stand in the optimizer's groups.
        masters: What the optimizer updates for each of them: the parameter itself, or a plain alias of its shard.
        stock: What stock built for them. It has the ranks over which statistics are summed beside the data-parallel
            mesh, and the tensor-parallel groups, by which duplicates are left out.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | None,
        config: Any,
        *,
        model_chunks: list[Any],
        parameters: list[torch.nn.Parameter],
        masters: list[torch.nn.Parameter],
        stock: Any,
    ) -> None:
        super().__init__(optimizer, config)
        self.is_stub_optimizer = optimizer is None
        self.chain_prefix = ""  # what Megatron puts before the keys of this optimizer's state, as one of several
        self.model_chunks = model_chunks
        self.parameters = parameters
        self.masters = masters
        self.grad_stats_parallel_group: dist.ProcessGroup = stock.grad_stats_parallel_group
        self.tp_group: dist.ProcessGroup | None = getattr(stock, "tp_group", None)
        self.expert_tp_group: dist.ProcessGroup | None = getattr(stock, "expert_tp_group", None)
        self.mesh = _mesh_of(stock, model_chunks)
        self.device = model_chunks[0].device
        self.grad_scaler = grad_scaler_of(config)
        self.grad_norms_by_group: dict[str, float] = {}
        self._one = torch.ones(1, dtype=torch.float32, device=self.device)
        self.separate_norms = self._separate_norm_groups()

    @classmethod
    def from_stock(cls, stock: Any, config: Any, *, model_chunks: list[Any]) -> ShardOptimizer:
        """Take groups and process groups from the optimizer that stock built; discard the rest of it."""
        base = stock.optimizer
        groups = [] if base is None else base.param_groups
        parameters = [parameter for group in groups for parameter in group["params"]]
        optimizer: torch.optim.Optimizer | None = None
        masters: list[torch.nn.Parameter] = []
        if base is None:
            pass
        elif config.optimizer == "adam" and decouples_weight_decay(config):
            masters = parameters
            options = dict(lr=config.lr, betas=(config.adam_beta1, config.adam_beta2), eps=config.adam_eps)
            optimizer = HyperAdamW(_copied(groups, masters), weight_decay=config.weight_decay, **options)
        else:
            masters = [torch.nn.Parameter(local_tensor(p).detach(), requires_grad=p.requires_grad) for p in parameters]
            optimizer = _plain_torch_optimizer(config, _copied(groups, masters))
        return cls(optimizer, config, model_chunks=model_chunks, parameters=parameters, masters=masters, stock=stock)

    # ---------------------------------------------------------------- gradients

    def get_parameters(self) -> list[torch.nn.Parameter]:
        """The model's parameters that this optimizer updates."""
        return self.parameters

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients; `set_to_none=False` would keep shards alive for nothing and does the same."""
        for parameter, master in zip(self.parameters, self.masters):
            parameter.grad = None
            master.grad = None

    def get_loss_scale(self) -> torch.Tensor:
        """Tensor of one element on the device: 1 unless a loss scale is in use."""
        return self._one if self.grad_scaler is None else self.grad_scaler.scale

    @torch.no_grad()
    def prepare_grads(self) -> bool:
        """Undo the loss scale. Returns True if some gradient of the model is not finite, so that no step must be made.

        Every rank must call.
        """
        if self.grad_scaler is None:
            return False
        found_inf = self.unscale()
        self.grad_scaler.update(found_inf)
        return found_inf

    @torch.no_grad()
    def unscale(self) -> bool:
        """Undo the loss scale, which there must be. Returns whether some gradient on any rank is not finite.

        Every rank must call.
        """
        with _timed(self.config, "optimizer-unscale-and-check-inf"):
            found = torch.zeros(1, dtype=torch.float32, device=self.device)
            gradients = [local_tensor(p.grad) for p in self.parameters if p.grad is not None]
            if gradients:
                torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, self.grad_scaler.inv_scale)
            for axis in range(self.mesh.ndim):
                dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.mesh.get_group(axis))
            dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.get_grad_stats_parallel_group())
            return found.item() > 0

    def get_grads_for_grad_norm(self, grad_norm_group: str | None = None) -> list[torch.Tensor]:
        """Gradients, as DTensors, that this rank contributes to a norm; see :meth:`norm_of`."""
        counted = (p.grad for p in self.parameters if _norm_group(p) == grad_norm_group and self._counts(p))
        return [gradient for gradient in counted if gradient is not None]

    @torch.no_grad()
    def get_grad_norm(self) -> float:
        """2-norm of the gradients of the whole model. Every rank must call."""
        return self.norm_of(None)

    @torch.no_grad()
    def count_zeros(self) -> float:
        """Number of zeros in the gradients of the whole model. Every rank must call."""
        gradients = [p.grad for p in self.parameters if p.grad is not None and self._counts(p)]
        counts = list(zip(gradients, zero_counts(gradients)))
        return self._sum(counts, dtype=torch.int64).item()

    @torch.no_grad()
    def clip_grad_norm(self, clip_grad: float) -> float:
        """Scale gradients so that their norm is at most `clip_grad`; returns the norm before. Every rank must call."""
        norm = self.norm_of(None)
        self._compute_grad_norms_by_group()
        if clip_grad > 0.0:
            self.clip_to({**self.grad_norms_by_group, None: norm}, clip_grad)
        return norm

    @torch.no_grad()
    def norm_of(self, group: str | None) -> float:
        """2-norm of the gradients of a group with a norm of its own; None: of all others. Every rank must call."""
        gradients = self.get_grads_for_grad_norm(group)
        return self._sum(list(zip(gradients, squared_norms(gradients)))).sqrt().item()

    @torch.no_grad()
    def clip_to(self, norms: Mapping[Any, float], clip_grad: float) -> None:
        """Scale the gradients of each group so that a norm of `norms[group]` becomes at most `clip_grad`. Local."""
        for group, norm in norms.items():
            coefficient = clip_grad / (norm + 1.0e-6)
            gradients = [
                local_tensor(p.grad) for p in self.parameters if p.grad is not None and _norm_group(p) == group
            ]
            if coefficient < 1.0 and gradients:
                torch._foreach_mul_(gradients, coefficient)

    # ---------------------------------------------------------------- the step

    @torch.no_grad()
    def step(self) -> tuple[bool, float | None, float | None]:
        """One update of all shards. Every rank must call.

        Returns:
            Whether an update was made; the gradient norm before clipping; the number of zeros in the gradients, if
            `config.log_num_zeros_in_grad`. After an overflow under a loss scale: False, None, None.
        """
        return take_step(self)

    @torch.no_grad()
    def step_with_ready_grads(self) -> bool:
        """Update the shards with the gradients as they are; always True."""
        if self.optimizer is None:
            return True
        with _timed(self.config, "optimizer-inner-step"):
            for parameter, master in zip(self.parameters, self.masters):
                if master is not parameter:
                    # The shard may have moved since; an alias must never be stale.
                    master.data = local_tensor(parameter).detach()
                    master.grad = None if parameter.grad is None else local_tensor(parameter.grad)
            self.optimizer.step()
        return True

    def reload_model_params(self, state_dict: Any = None) -> None:
        """Nothing to do: what the model holds at rest is what this optimizer updates."""
        if state_dict is not None:
            raise UnsupportedError(
                "--load-main-params-from-ckpt is not supported with --use-hyperfsdp; remove the flag."
            )

    # ---------------------------------------------------------------- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """The torch optimizer's state dict (of this rank's shards) and that of the loss scale."""
        state: dict[str, Any] = {} if self.optimizer is None else self.optimizer.state_dict()
        if self.grad_scaler is None:
            return state
        return {"optimizer": state, "grad_scaler": self.grad_scaler.state_dict()}

    def sharded_state_dict(
        self,
        model_sharded_state_dict: dict[str, Any],
        is_loading: bool = False,
        metadata: dict[str, Any] | None = None,
        sharding_type: str | None = None,
    ) -> dict[str, Any]:
        """The state cut to this rank's rows, in the format of Megatron's own optimizer that `metadata` names.

        Megatron 0.12 names the distributed optimizer's as `sharding_type` when it saves.
        """
        if is_loading:
            metadata = with_opened(metadata)
            refuse_muon(metadata)
        elif sharding_type is not None:
            metadata = {**(metadata or {}), SHARDING_TYPE: sharding_type}
        return optimizer_state.sharded_state_dict(
            self, model_sharded_state_dict, is_loading=is_loading, metadata=metadata
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what a checkpoint delivered for :meth:`sharded_state_dict`, whichever optimizer wrote it."""
        optimizer_state.load_state_dict(self, optimizer_parts.joined(state_dict))
        forget_opened()

    def offload_to_cpu(self) -> None:
        """Refused: shards and their states stay on the device of the mesh."""
        raise UnsupportedError("offloading the optimizer is not supported with --use-hyperfsdp.")

    restore_from_cpu = offload_to_cpu

    # ---------------------------------------------------------------- internals

    def _counts(self, parameter: torch.nn.Parameter) -> bool:
        return counted_once(parameter, self.tp_group, self.expert_tp_group)

    def _sum(self, parts: list[tuple[torch.Tensor, torch.Tensor]], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return sum_over_model(
            parts,
            mesh=self.mesh,
            model_parallel_group=self.get_grad_stats_parallel_group(),
            device=self.device,
            dtype=dtype,
        )

    def _compute_grad_norms_by_group(self) -> dict[str, float]:
        self.grad_norms_by_group = {group: self.norm_of(group) for group in self.separate_norms}
        return self.grad_norms_by_group

    def _separate_norm_groups(self) -> list[str]:
        """Names of parameter groups with a norm of their own that exist anywhere in the model. Every rank calls."""
        names = list(getattr(stock_optimizer, "SEPARATE_GRAD_NORM_GROUPS", ()))
        if not names:
            return []
        mine = {_norm_group(parameter) for parameter in self.parameters}
        flags = torch.tensor([float(name in mine) for name in names], device=self.device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self.get_grad_stats_parallel_group())
        return [name for name, flag in zip(names, flags.tolist()) if flag]


def _mesh_of(stock: Any, model_chunks: list[Any]) -> DeviceMesh:
    """The mesh of the parameters of an optimizer that stock built; right on a stage that has none of them, too."""
    # Stock lists the groups of all ranks on every rank.
    groups = [] if stock.optimizer is None else stock.optimizer.param_groups
    of_experts = any(group.get("is_expert_parallel", False) for group in groups)
    mesh: DeviceMesh = model_chunks[0].expert_mesh if of_experts else model_chunks[0].mesh
    return mesh


def take_step(optimizer: Any) -> tuple[bool, float | None, float | None]:
    """One step of a :class:`ShardOptimizer`, or of several as one; see :meth:`ShardOptimizer.step`."""
    config = optimizer.config
    optimizer.grad_norms_by_group = {}
    if optimizer.prepare_grads():
        return False, None, None
    with _timed(config, "optimizer-clip-main-grad"):
        norm = optimizer.clip_grad_norm(config.clip_grad)
    with _timed(config, "optimizer-count-zeros"):
        zeros = optimizer.count_zeros() if config.log_num_zeros_in_grad else None
    threshold = getattr(config, "grad_norm_skip_threshold", math.inf)
    if math.isfinite(threshold) and norm > threshold:
        return False, norm, zeros
    return optimizer.step_with_ready_grads(), norm, zeros


@contextmanager
def _timed(config: Any, name: str) -> Iterator[None]:
    timers = config.timers
    if timers is not None:
        timers(name, log_level=1).start(barrier=config.barrier_with_L1_time)
    yield
    if timers is not None:
        timers(name).stop()


def _norm_group(parameter: torch.nn.Parameter) -> str | None:
    return getattr(parameter, getattr(stock_optimizer, "GRAD_NORM_GROUP_ATTR", "grad_norm_group"), None)


def _copied(groups: list[dict[str, Any]], masters: list[torch.nn.Parameter]) -> list[dict[str, Any]]:
    """Copies of `groups` with all their options and with `masters`, in order, as parameters."""
    remaining = iter(masters)
    return [{**group, "params": [next(remaining) for _ in group["params"]]} for group in groups]


def _plain_torch_optimizer(config: Any, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, weight_decay=config.weight_decay, momentum=config.sgd_momentum)
    betas = (config.adam_beta1, config.adam_beta2)
    return torch.optim.Adam(groups, lr=config.lr, weight_decay=config.weight_decay, betas=betas, eps=config.adam_eps)


def grad_scaler_of(config: Any) -> Any:
    """The loss scale by stock's rule: a constant one if given, a dynamic one for fp16, else none."""
    if not (config.fp16 or config.bf16):
        return None
    if config.loss_scale:
        return ConstantGradScaler(config.loss_scale)
    if not config.fp16:
        return None
    return DynamicGradScaler(
        initial_scale=config.initial_loss_scale,
        min_scale=config.min_loss_scale,
        growth_factor=2.0,
        backoff_factor=0.5,
        growth_interval=config.loss_scale_window,
        hysteresis=config.hysteresis,
    )
