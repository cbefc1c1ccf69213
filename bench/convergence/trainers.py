"""A model, its optimizer and its clipping under each engine, with one way to step them all."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import hp_plugin
from bench.convergence.model import GPT, Size
from bench.convergence.variants import Variant

LEARNING_RATE = 3e-4
MAX_NORM = 1.0


class Trainer:
    """One run on this rank; subclasses choose the engine.

    Gradients are added up inside a supernode (by a DDP on each rank) and reduced between all with the last micro-batch.

    Args:
        variant: The run.
        model: The model on this rank, in fp32.
        size: Its sizes.
        mixed: bf16 compute, fp32 masters and sums.
    """

    def __init__(self, variant: Variant, model: GPT, *, size: Size, mixed: bool) -> None:
        self.variant = variant
        self.plain = model
        self.size = size
        self.mixed = mixed
        self.model: Any = self.parallelize(model)
        self.optimizer = self.make_optimizer()

    def parallelize(self, model: GPT) -> nn.Module:
        """The model as the engine wants it called."""
        raise NotImplementedError

    def make_optimizer(self) -> torch.optim.Optimizer:
        """AdamW over the parameters."""
        return torch.optim.AdamW(self.plain.parameters(), lr=LEARNING_RATE, foreach=True)

    def clip(self) -> None:
        """Clips the gradients by their global norm."""
        nn.utils.clip_grad_norm_(self.plain.parameters(), MAX_NORM)

    def announce(self, *, is_last: bool) -> None:
        """Tells the engine whether the next backward is the step's last."""
        raise NotImplementedError

    def finish_gradients(self) -> None:
        """Makes `.grad` final after the last backward."""

    def step(self, micro_batches: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
        """Trains on the micro-batches of this rank and gives their mean loss. Every rank must call."""
        kept = [shard.clone() for shard in self._shards()] if self.variant.fault == "shard_stale" else []
        total = 0.0
        for index, (tokens, targets) in enumerate(micro_batches):
            self.announce(is_last=index == len(micro_batches) - 1)
            loss = self.model(tokens, targets) / len(micro_batches)
            total += float(loss.detach())
            (loss * self._share_that_counts(index, len(micro_batches))).backward()
        self.finish_gradients()
        self.clip()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if kept:
            torch._foreach_copy_(self._shards(), kept)
        return total

    def _share_that_counts(self, index: int, count: int) -> float:
        """The faults that lose gradients: a loss that is multiplied by 0 has none. The others keep their mean."""
        if self.variant.fault == "replica_dropped":
            return 0.0 if dist.get_rank() >= dist.get_world_size() // 2 else 2.0
        if self.variant.fault == "micro_batch_dropped":
            return 0.0 if index == 0 else count / (count - 1)
        return 1.0

    def _shards(self) -> list[torch.Tensor]:
        """What the stale rank fails to store: its shards; nothing on other ranks."""
        if dist.get_rank() != dist.get_world_size() - 1:
            return []
        return [p._local_tensor for p in self.plain.parameters() if isinstance(p, DTensor)]

    def weights(self) -> Iterator[torch.Tensor]:
        """All weights, whole, in the order of the plain model. Every rank must call."""
        for parameter in self.plain.parameters():
            value = parameter.detach()
            yield value.full_tensor() if isinstance(value, DTensor) else value


class _DDP(Trainer):
    def parallelize(self, model: GPT) -> nn.Module:
        return DistributedDataParallel(model, bucket_cap_mb=self.variant.bucket_mb)

    def announce(self, *, is_last: bool) -> None:
        self.model.require_backward_grad_sync = is_last  # what its no_sync() sets


class _MegatronDDP(Trainer):
    def parallelize(self, model: GPT) -> nn.Module:
        from hp_plugin.megatron import cpu_compat

        cpu_compat.install()
        from megatron.core import parallel_state
        from megatron.core.distributed import DistributedDataParallel as MegatronDDP
        from megatron.core.distributed import DistributedDataParallelConfig
        from megatron.core.transformer import TransformerConfig

        logging.getLogger("megatron").setLevel(logging.WARNING)
        parallel_state.initialize_model_parallel()
        size = self.size
        config = TransformerConfig(
            num_layers=size.layers, hidden_size=size.dim, num_attention_heads=size.heads, add_bias_linear=True
        )
        return MegatronDDP(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)

    def announce(self, *, is_last: bool) -> None:
        for group in self.model.bucket_groups:
            group.is_last_microbatch = is_last  # what its no_sync() sets

    def finish_gradients(self) -> None:
        self.model.finish_grad_sync()
        for parameter in self.plain.parameters():
            parameter.grad = parameter.main_grad  # type: ignore[attr-defined]

    def step(self, micro_batches: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
        self.model.zero_grad_buffer()
        return super().step(micro_batches)


class _FSDP2(Trainer):
    shard: Callable[..., Any] = staticmethod(torch_fsdp.fully_shard)
    policy: type = torch_fsdp.MixedPrecisionPolicy

    def parallelize(self, model: GPT) -> nn.Module:
        shape = self.variant.mesh
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard")[-len(shape) :])
        dtypes: dict[str, Any] = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if self.mixed else {}
        for block in model.blocks:
            self.shard(block, mesh=mesh, mp_policy=self.policy(**dtypes))
        self.shard(model, mesh=mesh, mp_policy=self.policy(**dtypes))
        return model

    def announce(self, *, is_last: bool) -> None:
        self.model.set_requires_all_reduce(is_last)


class _Ours(_FSDP2):
    shard: Callable[..., Any] = staticmethod(hp_plugin.fully_shard)
    policy: type = hp_plugin.MixedPrecisionPolicy

    def make_optimizer(self) -> torch.optim.Optimizer:
        return hp_plugin.HyperAdamW(self.plain.parameters(), lr=LEARNING_RATE, foreach=True)

    def clip(self) -> None:
        hp_plugin.clip_grad_norm_(self.plain.parameters(), MAX_NORM)


_TRAINERS: dict[str, type[Trainer]] = {"ddp": _DDP, "megatron_ddp": _MegatronDDP, "fsdp2": _FSDP2, "ours": _Ours}


def make_trainer(variant: Variant, model: GPT, *, size: Size, mixed: bool) -> Trainer:
    """The trainer of `variant`; see `Trainer` for the arguments.

    Raises:
        ValueError: bf16 compute is asked of a DDP.
    """
    if mixed and variant.engine in ("ddp", "megatron_ddp"):
        raise ValueError(f"{variant.engine} has no bf16 compute with fp32 masters here; compare with fsdp2")
    return _TRAINERS[variant.engine](variant, model, size=size, mixed=mixed)
