"""One training loop for every back end, run on ranks, giving a `Record`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from tests.fsdp.comparison import Record, full, full_values
from tests.fsdp.models import loss_of, make_model, micro_batch
from tests.fsdp.variants import Variant
from tests.support import init_gloo

# eps is far above rounding noise, so that a gradient's last digits cannot become a visible part of a step.
OPTIMIZER = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-5, "weight_decay": 0.1}
MAX_NORM = 0.5  # the norms of these models lie above: clipping acts in every step


def train_variants(*, replicate: int, shard: int, variants: list[Variant]) -> list[Record | None]:
    """Train every variant on this rank's place in one (replicate, shard) mesh.

    Returns:
        A record per variant on the first rank of every replica, None on the others, whose records are the same by
        construction: `full` gathers over the shard group.
    """
    init_gloo()
    mesh = init_device_mesh("cpu", (replicate, shard), mesh_dim_names=("dp_replicate", "dp_shard"))
    keep = mesh.get_local_rank("dp_shard") == 0
    records = []
    for variant in variants:
        try:
            record = train(variant, mesh)
        except Exception as error:
            error.args = (f"{variant}: {error}",)
            raise
        records.append(record if keep else None)
    return records


def train_single(*, variants: list[Variant]) -> list[Record]:
    """Train every variant of back end "single" in this process, without process groups."""
    return [train(variant, None) for variant in variants]


def train(variant: Variant, mesh: DeviceMesh | None) -> Record:
    """Train one variant from its initial weights. Every rank of `mesh` must call."""
    trainer = TRAINERS[variant.backend](variant, mesh)
    return continue_training(trainer, range(variant.steps))


def continue_training(trainer: Trainer, steps: Iterable[int]) -> Record:
    """Run `steps` (numbers that choose the data) with `trainer` as it is, and record them."""
    variant, record = trainer.variant, Record()
    for step in steps:
        with FAULTS[variant.fault](trainer) if variant.fault else contextlib.nullcontext():
            loss = sum(trainer.forward_backward(step, index) for index in range(variant.micro_batches))
            gradients = full_values({name: _gradient(p, name) for name, p in trainer.named_parameters()})
            norm = trainer.clip()
            trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        record.losses.append(trainer.mean_over_ranks(loss))
        record.norms.append(float(full(norm)))
        record.gradients.append(gradients)
        record.weights.append(trainer.weights())
    return record


def _gradient(parameter: nn.Parameter, name: str) -> Tensor:
    if parameter.grad is None:
        raise AssertionError(f"{name} has no gradient after backward")
    return parameter.grad


class Trainer:
    """Model, optimizer and rank-dependent facts of one run; subclasses choose the data-parallel back end.

    Args:
        variant: what to train.
        mesh: 2-D mesh (dp_replicate, dp_shard), or None in a single process.
    """

    def __init__(self, variant: Variant, mesh: DeviceMesh | None) -> None:
        self.variant = variant
        self.mesh = mesh
        self.shares = mesh.size() if mesh is not None else 1
        self.share = dist.get_rank() if mesh is not None else 0
        self.model: nn.Module = self.parallelize(make_model(variant.model))
        self.optimizer = self.make_optimizer()
        self.loss_scale = 1.0  # for faults
        self.dropped: set[int] = set()  # micro-batches whose backward a fault leaves out

    def parallelize(self, model: nn.Module) -> nn.Module:
        raise NotImplementedError

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), foreach=False, **OPTIMIZER)

    def clip(self) -> Tensor:
        return torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM, foreach=False)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters under the names of the plain model."""
        return self.model.named_parameters()

    def weights(self) -> dict[str, Tensor]:
        """Full weights by plain name."""
        return full_values(dict(self.named_parameters()))

    def before_micro_batch(self, *, last: bool) -> None:
        """Tell the back end whether this backward is the last of the step."""

    def forward_backward(self, step: int, index: int) -> float:
        """One micro-batch; returns its part of the step's loss."""
        count = self.variant.micro_batches
        self.before_micro_batch(last=index == count - 1)
        inputs, targets = micro_batch(
            self.variant.model, step=step, index=index, count=count, share=self.share, shares=self.shares
        )
        loss = loss_of(self.variant.model, self.model(inputs), targets) / count
        if index not in self.dropped:
            (loss * self.loss_scale).backward()
        return float(loss.detach())

    def mean_over_ranks(self, value: float) -> float:
        total = torch.tensor(value, dtype=torch.float64)
        if self.mesh is not None:
            dist.all_reduce(total)
        return float(total) / self.shares


class SingleTrainer(Trainer):
    """One process. With `mixed`, weights are cast to bfloat16 for compute and gradients summed in float32."""

    def parallelize(self, model: nn.Module) -> nn.Module:
        return model

    def forward_backward(self, step: int, index: int) -> float:
        variant, total = self.variant, 0.0
        for share in range(variant.shares):
            inputs, targets = micro_batch(
                variant.model, step=step, index=index, count=variant.micro_batches, share=share, shares=variant.shares
            )
            loss = loss_of(variant.model, self._output(inputs), targets) / variant.micro_batches
            (loss / variant.shares if not variant.mixed else loss).backward()
            total += float(loss.detach()) / variant.shares
        return total

    def _output(self, inputs: Tensor) -> Tensor:
        if not self.variant.mixed:
            return self.model(inputs)
        # Each backward leaves a bfloat16 gradient per share; the division by the shares follows in float32.
        weights = {name: _cast(p, self.variant.shares) for name, p in self.model.named_parameters()}
        inputs = inputs.to(torch.bfloat16) if inputs.is_floating_point() else inputs
        return torch.func.functional_call(self.model, weights, (inputs,), tie_weights=True)


def _cast(parameter: nn.Parameter, shares: int) -> Tensor:
    return _CastToBfloat16.apply(parameter, shares)


class _CastToBfloat16(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, shares: int) -> Tensor:
        ctx.shares = shares
        return parameter.to(torch.bfloat16)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.float() / ctx.shares, None


class DDPTrainer(Trainer):
    """torch's DistributedDataParallel over all ranks."""

    def parallelize(self, model: nn.Module) -> nn.Module:
        return DistributedDataParallel(model)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.model.module.named_parameters()

    def before_micro_batch(self, *, last: bool) -> None:
        self.model.require_backward_grad_sync = last  # what no_sync() sets


class ShardedTrainer(Trainer):
    """What torch's FSDP2 and this project have in common."""

    def parallelize(self, model: nn.Module) -> nn.Module:
        assert self.mesh is not None
        mesh = self.mesh["dp_shard"] if self.variant.one_dim else self.mesh
        for module in _units(model, self.variant.units):
            self.fully_shard(module, mesh)
        self.fully_shard(model, mesh)
        return model

    def fully_shard(self, module: nn.Module, mesh: DeviceMesh) -> None:
        raise NotImplementedError

    def before_micro_batch(self, *, last: bool) -> None:
        model: Any = self.model
        if self.variant.mode == "all_reduce_last":
            model.set_requires_all_reduce(last)
        elif self.variant.mode == "sync_last":
            model.set_requires_gradient_sync(last)


def _units(model: Any, kind: str) -> Iterator[nn.Module]:
    if kind == "blocks":
        yield from model.units()
    elif kind == "fine":
        for block in model.units():
            yield from (block.norm1, block.attention, block.mlp, block)


class FSDP2Trainer(ShardedTrainer):
    """torch.distributed.fsdp.fully_shard with torch.optim.AdamW."""

    def fully_shard(self, module: nn.Module, mesh: DeviceMesh) -> None:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        policy = mixed if self.variant.mixed else MixedPrecisionPolicy()
        fully_shard(module, mesh=mesh, reshard_after_forward=self.variant.reshard, mp_policy=policy)

    def forward_backward(self, step: int, index: int) -> float:
        with _averages_on_gloo():
            return super().forward_backward(step, index)


@contextlib.contextmanager
def _averages_on_gloo() -> Iterator[None]:
    """Give gloo the mean that FSDP2 of torch 2.7 asks of it and that it lacks. Later releases do not ask."""
    original = dist.reduce_scatter_tensor

    def reduce_scatter_tensor(output: Tensor, *args: Any, op: Any = dist.ReduceOp.SUM, **kwargs: Any) -> Any:
        if op != dist.ReduceOp.AVG:
            return original(output, *args, op=op, **kwargs)
        original(output, *args, op=dist.ReduceOp.SUM, **kwargs)
        output.div_(dist.get_world_size(kwargs.get("group")))
        return None

    dist.reduce_scatter_tensor = reduce_scatter_tensor
    try:
        yield
    finally:
        dist.reduce_scatter_tensor = original


class HyperTrainer(ShardedTrainer):
    """This project's fully_shard, HyperAdamW and clip_grad_norm_."""

    def fully_shard(self, module: nn.Module, mesh: DeviceMesh) -> None:
        from hp_plugin import MixedPrecisionPolicy, fully_shard

        mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, master_dtype=torch.float32)
        policy = mixed if self.variant.mixed else MixedPrecisionPolicy()
        fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=self.variant.reshard,
            mp_policy=policy,
            ignored_params=_norm_parameters(module) if self.variant.fault == "norms_unsynchronised" else None,
        )

    def make_optimizer(self) -> torch.optim.Optimizer:
        from hp_plugin import HyperAdamW

        return HyperAdamW(self.model.parameters(), **OPTIMIZER)

    def clip(self) -> Tensor:
        from hp_plugin import clip_grad_norm_

        return clip_grad_norm_(self.model.parameters(), MAX_NORM)


def _norm_parameters(module: nn.Module) -> set[nn.Parameter]:
    norms = [m for m in module.modules() if isinstance(m, nn.LayerNorm)]
    return {parameter for norm in norms for parameter in norm.parameters()}


TRAINERS: dict[str, type[Trainer]] = {
    "single": SingleTrainer,
    "ddp": DDPTrainer,
    "fsdp2": FSDP2Trainer,
    "hyper": HyperTrainer,
}


# ---- faults: wrong runs that the comparison must notice -----------------------------------------------------------


@contextlib.contextmanager
def _doubled_gradients(trainer: Trainer) -> Iterator[None]:
    trainer.loss_scale = 2.0
    yield


@contextlib.contextmanager
def _dropped_replica(trainer: Trainer) -> Iterator[None]:
    """The last replica takes part in every collective, but with zeros."""
    assert trainer.mesh is not None
    if trainer.mesh.get_local_rank("dp_replicate") == trainer.mesh.size(0) - 1:
        trainer.loss_scale = 0.0
    yield


@contextlib.contextmanager
def _skipped_all_reduce(trainer: Trainer) -> Iterator[None]:
    """All-reduces over the replicate group do nothing, but the mean is still divided by all ranks."""
    assert trainer.mesh is not None
    replicas = trainer.mesh.get_group("dp_replicate")
    original = dist.all_reduce

    def all_reduce(tensor: Tensor, *args: Any, group: Any = None, async_op: bool = False, **kwargs: Any) -> Any:
        if group is replicas:
            return _Done() if async_op else None
        return original(tensor, *args, group=group, async_op=async_op, **kwargs)

    dist.all_reduce = all_reduce
    try:
        yield
    finally:
        dist.all_reduce = original


class _Done:
    def wait(self) -> None:
        pass


@contextlib.contextmanager
def _unsynchronised_norms(trainer: Trainer) -> Iterator[None]:
    """Nothing to do here: `HyperTrainer.fully_shard` leaves the norms' parameters out of every reduction."""
    yield


@contextlib.contextmanager
def _dropped_micro_batch(trainer: Trainer) -> Iterator[None]:
    """The first micro-batch contributes no gradient, on any rank."""
    trainer.dropped = {0}
    yield


@contextlib.contextmanager
def _stale_shard(trainer: Trainer) -> Iterator[None]:
    """The last rank keeps its old shard of one parameter through the step."""
    parameter = next(trainer.model.parameters())
    local: Tensor = parameter._local_tensor  # type: ignore[attr-defined]
    before = local.clone()
    yield
    if dist.get_rank() == dist.get_world_size() - 1:
        with torch.no_grad():
            local.copy_(before)


FAULTS: dict[str, Callable[[Trainer], contextlib.AbstractContextManager[None]]] = {
    "gradients_doubled": _doubled_gradients,
    "replica_dropped": _dropped_replica,
    "all_reduce_skipped": _skipped_all_reduce,
    "norms_unsynchronised": _unsynchronised_norms,
    "micro_batch_dropped": _dropped_micro_batch,
    "shard_stale": _stale_shard,
}
