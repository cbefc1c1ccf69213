"""Megatron's DistributedDataParallel on the benchmark's model, with and without its distributed optimizer.

The classes, buffers and buckets are Megatron's own. On CPU they run under the compatibility layer of
hp_plugin.megatron, which emulates the names of torch.cuda that they read.
"""

from __future__ import annotations

import importlib.util
import logging
import warnings
from typing import Any

import torch
import torch.distributed as dist

from bench.fsdp_step.settings import Options
from bench.fsdp_step.variant import Context, PeerUnavailableError, Variant, take_options


def prepare() -> None:
    """Put the compatibility layer in place; must run before anything imports Megatron."""
    if importlib.util.find_spec("megatron") is None:
        return
    from hp_plugin.megatron import cpu_compat

    cpu_compat.install()


class MegatronDDP(Variant):
    """Megatron's DDP: gradients are added into contiguous buffers and reduced in buckets while backward runs."""

    def __init__(self, context: Context, options: Options, *, distributed_optimizer: bool = False) -> None:
        require_megatron()
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

        initialize_groups()
        config = transformer_config(context)
        ddp_config = DistributedDataParallelConfig(
            overlap_grad_reduce=True,
            overlap_param_gather=distributed_optimizer,
            use_distributed_optimizer=distributed_optimizer,
            bucket_size=options["bucket_elements"],
            grad_reduce_in_fp32=True,
        )
        with quiet():
            self.ddp = DistributedDataParallel(config, ddp_config, context.model())
        self.module = self.ddp
        self.ddp_config = ddp_config
        self._parameters = [p for p in self.ddp.parameters() if p.requires_grad]
        self.ddp.zero_grad_buffer()

    def backward(self, loss: torch.Tensor) -> None:
        """Backward, then Megatron's wait for its reductions."""
        super().backward(loss)
        self.ddp.finish_grad_sync()

    def facts(self) -> dict[str, Any]:
        """Read from Megatron's configuration and buckets."""
        return {
            "buckets": len(self.ddp.bucket_groups),
            "overlap_grad_reduce": self.ddp_config.overlap_grad_reduce,
            "overlap_param_gather": self.ddp_config.overlap_param_gather,
        }


class PlainMegatronDDP(MegatronDDP):
    """With a full optimizer on every rank, which reads Megatron's main gradients."""

    def __init__(self, context: Context, options: Options) -> None:
        super().__init__(context, options)
        self.optimizer = context.adamw(self._parameters)

    def local_gradients(self) -> list[torch.Tensor]:
        """All of them."""
        return [p.main_grad for p in self._parameters]

    def update(self) -> None:
        """As Megatron's fp32 optimizer: main gradients become gradients, and the buffers are cleared."""
        for p in self._parameters:
            p.grad = p.main_grad
        self.optimizer.step()
        for p in self._parameters:
            p.grad = None
        self.ddp.zero_grad_buffer()


class MegatronDistOpt(MegatronDDP):
    """With Megatron's DistributedOptimizer; parameters are gathered in the next forward, also overlapped."""

    def __init__(self, context: Context, options: Options) -> None:
        super().__init__(context, options, distributed_optimizer=True)
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        config = OptimizerConfig(
            optimizer="adam",
            lr=context.learning_rate,
            min_lr=context.learning_rate,
            weight_decay=context.weight_decay,
            adam_beta1=0.9,
            adam_beta2=0.999,
            adam_eps=1e-8,
            clip_grad=0.0,
            use_distributed_optimizer=True,
            overlap_param_gather=True,
            params_dtype=torch.float32,
            log_num_zeros_in_grad=False,
        )
        with quiet():
            self.megatron_optimizer = get_megatron_optimizer(config, [self.ddp])
        for chained in self.megatron_optimizer.chained_optimizers:
            for group in chained.optimizer.param_groups:
                # Megatron's torch fallback leaves the choice to torch, which is slower on CPU, and decays no vectors.
                group.update(fused=True, foreach=False, weight_decay=context.weight_decay)
        self.norm_group = dist.group.WORLD

    def local_gradients(self) -> list[torch.Tensor]:
        """This rank's slice of every bucket, its padding, which is zero, included."""
        rank, world = dist.get_rank(), dist.get_world_size()
        buckets = [bucket for group in self.ddp.bucket_groups for bucket in group.buckets]
        return [bucket.grad_data.view(world, -1)[rank] for bucket in buckets]

    def update(self) -> None:
        """Megatron's step; parameters travel with the next forward."""
        self.megatron_optimizer.step()
        self.ddp.zero_grad_buffer()
        self.megatron_optimizer.zero_grad()


def build_megatron_ddp(context: Context, options: Options) -> Variant:
    """Megatron's DDP with overlapped reductions."""
    return PlainMegatronDDP(context, take_options("megatron_ddp", options, bucket_elements=None))


def build_megatron_distopt(context: Context, options: Options) -> Variant:
    """Megatron's DDP and distributed optimizer with both overlaps."""
    return MegatronDistOpt(context, take_options("megatron_distopt", options, bucket_elements=None))


def require_megatron() -> None:
    """Raises PeerUnavailableError where megatron-core is not installed."""
    if importlib.util.find_spec("megatron") is None:
        raise PeerUnavailableError("megatron-core is not installed; `make setup` installs it where Python is >= 3.12")


def initialize_groups() -> None:
    """Megatron's process groups: data parallelism over all ranks."""
    from megatron.core import parallel_state

    if not parallel_state.is_initialized():
        with quiet():
            parallel_state.initialize_model_parallel()


def transformer_config(context: Context) -> Any:
    """What Megatron wants to know of the model."""
    from megatron.core.transformer import TransformerConfig

    size = context.size
    with quiet():
        return TransformerConfig(num_layers=size.layers, hidden_size=size.dim, num_attention_heads=size.heads)


class quiet(warnings.catch_warnings):  # noqa: N801  # used like a function
    """Megatron's notes about what it found on this machine say nothing about the benchmark."""

    def __enter__(self) -> None:
        super().__enter__()
        warnings.simplefilter("ignore")
        self._level = logging.root.manager.disable
        logging.disable(logging.WARNING)

    def __exit__(self, *exception: Any) -> None:
        logging.disable(self._level)
        super().__exit__(*exception)
