"""DeepSpeed ZeRO-3 over all ranks, where DeepSpeed is installed."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
import torch.distributed as dist

from bench.fsdp_step.settings import Options
from bench.fsdp_step.variant import Context, PeerUnavailableError, Variant, take_options


class DeepSpeedZero3(Variant):
    """The engine of `deepspeed.initialize`, stage 3, fp32."""

    def __init__(self, context: Context, options: Options) -> None:
        import deepspeed

        model = context.model()
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {
                "stage": 3,
                "overlap_comm": True,
                "contiguous_gradients": True,
                "reduce_scatter": True,
                "reduce_bucket_size": options["reduce_bucket_elements"],
                "stage3_prefetch_bucket_size": options["prefetch_elements"],
                "stage3_param_persistence_threshold": options["persistence_elements"],
            },
        }
        optimizer = context.adamw(model.parameters())
        self.engine, self.optimizer, _, _ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=config, dist_init_required=False
        )
        self.module = self.engine
        self.norm_group = dist.group.WORLD

    def backward(self, loss: torch.Tensor) -> None:
        """The engine's."""
        self.engine.backward(loss)

    def update(self) -> None:
        """The engine's."""
        self.engine.step()

    def local_gradients(self) -> list[torch.Tensor]:
        """This rank's part of each gradient."""
        from deepspeed.utils import safe_get_local_grad

        gradients = [safe_get_local_grad(p) for p in self.engine.module.parameters()]
        return [gradient for gradient in gradients if gradient is not None]

    def facts(self) -> dict[str, Any]:
        """Its own configuration."""
        return {"stage": self.engine.zero_optimization_stage(), "overlap_comm": self.engine.zero_overlap_comm()}


def build_deepspeed_zero3(context: Context, options: Options) -> Variant:
    """ZeRO-3."""
    defaults = {"reduce_bucket_elements": 1_000_000, "prefetch_elements": 1_000_000, "persistence_elements": 10_000}
    own = take_options("deepspeed_zero3", options, **defaults)
    if importlib.util.find_spec("deepspeed") is None:
        raise PeerUnavailableError(
            "DeepSpeed is not installed; pip install deepspeed into the environment to compare it"
        )
    return DeepSpeedZero3(context, own)
