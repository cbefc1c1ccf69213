"""Megatron's Muon: its DDP, its layer-wise distributed optimizer, and the optimizer of NVIDIA's emerging-optimizers."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from bench.fsdp_step.model import loss_of
from bench.fsdp_step.peers.megatron import initialize_groups, quiet, require_megatron, transformer_config
from bench.fsdp_step.settings import Options
from bench.fsdp_step.variant import Batch, PeerUnavailableError, take_options
from bench.muon_step.variant import MuonContext, MuonVariant

OPTIONS: dict[str, Any] = {
    "bucket_elements": 8_000_000,
    "overlap_param_gather": True,
    "param_layout": True,  # matrices lie whole in one rank's part of the buffers; without: all-reduce, then all-gather
}


class MegatronMuon(MuonVariant):
    """As Megatron's training loop builds it for `--optimizer muon` with the layer-wise distributed optimizer."""

    def __init__(self, context: MuonContext, options: Options) -> None:
        initialize_groups()
        self.model = context.model()
        for weight in (self.model.embedding.weight, self.model.head.weight):
            weight.is_embedding_or_output_parameter = True  # type: ignore[attr-defined]  # as Megatron's layers set it
        with quiet():
            self.ddp = self._wrap(context, options)
            self.optimizer = self._make_optimizer(context, options)
        for group in self._adam_groups():
            # Megatron's torch fallback leaves the choice to torch, which is slower on CPU, and decays no vectors.
            group.update(fused=True, foreach=False, weight_decay=context.adam.weight_decay)
        self.ddp.zero_grad_buffer()

    def _wrap(self, context: MuonContext, options: Options) -> Any:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer.layer_wise_optimizer import (
            LayerWiseDistributedOptimizer,
            tag_params_for_buffer_routing,
        )

        config = DistributedDataParallelConfig(
            overlap_grad_reduce=True,
            overlap_param_gather=options["overlap_param_gather"],
            use_distributed_optimizer=options["param_layout"],
            bucket_size=options["bucket_elements"],
            grad_reduce_in_fp32=True,
        )
        layout = {}
        if options["param_layout"]:
            tag_params_for_buffer_routing([self.model])
            layout["full_param_layout"] = LayerWiseDistributedOptimizer.compute_full_param_layout(
                list(self.model.parameters()), config.bucket_size, int(context.mesh.size()), config
            )
        return DistributedDataParallel(transformer_config(context), config, self.model, **layout)

    def _make_optimizer(self, context: MuonContext, options: Options) -> Any:
        import megatron.core.optimizer as megatron_optimizer

        own, adam = context.muon, context.adam
        config = megatron_optimizer.OptimizerConfig(
            optimizer="muon",
            lr=own.lr,
            min_lr=own.lr,
            weight_decay=own.weight_decay,
            muon_momentum=own.momentum,
            muon_nesterov=True,
            muon_coefficient_type="simple",  # the classic quintic, by emerging-optimizers' name
            muon_num_ns_steps=own.steps,
            muon_scale_mode="shape_scaling",  # sqrt(max(1, rows / columns))
            muon_fp32_matmul_prec="medium",  # bf16
            adam_beta1=adam.beta1,
            adam_beta2=adam.beta2,
            adam_eps=adam.eps,
            clip_grad=0.0,
            use_layer_wise_distributed_optimizer=True,
            overlap_param_gather=options["overlap_param_gather"],
            params_dtype=torch.float32,
            log_num_zeros_in_grad=False,
        )
        with mock.patch.object(megatron_optimizer, "LayerWiseDistributedOptimizer", _layer_wise_of_fp32()):
            optimizer = megatron_optimizer.get_megatron_optimizer(config, [self.ddp])
        for group in optimizer.param_groups:
            if group.get("optimizer") == "adam":
                group["lr"] = group["max_lr"] = group["min_lr"] = adam.lr
        return optimizer

    def _adam_groups(self) -> list[dict[str, Any]]:
        return [group for group in self.optimizer.param_groups if group.get("optimizer") == "adam"]

    def forward(self, batch: Batch) -> torch.Tensor:
        """Of the DDP; it waits for parameters where they are gathered late."""
        tokens, targets = batch
        return loss_of(self.ddp(tokens), targets)

    def backward(self, loss: torch.Tensor) -> None:
        """Backward, then Megatron's wait for its reductions."""
        loss.backward()
        self.ddp.finish_grad_sync()

    def update(self) -> None:
        """Megatron's step; parameters travel in it, or with the next forward."""
        self.optimizer.step()
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()

    def full_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """After Megatron's gather, which would come with the next forward."""
        if self.ddp.ddp_config.overlap_param_gather:
            self.ddp.start_param_sync(force_sync=True)
        for name, parameter in self.model.named_parameters():
            yield name, parameter.detach()

    def facts(self) -> dict[str, Any]:
        """Read from Megatron's configuration, buckets and optimizers."""
        config = self.ddp.ddp_config
        return {
            "buckets": len(self.ddp.bucket_groups),
            "overlap_grad_reduce": config.overlap_grad_reduce,
            "overlap_param_gather": config.overlap_param_gather,
            "reduces_to_owners": config.use_distributed_optimizer,
            "emerging_optimizers": importlib.metadata.version("emerging-optimizers"),
            "own_matrices": sum(len(g["params"]) for g in self.optimizer.param_groups if "momentum" in g),
        }


def _layer_wise_of_fp32() -> type:
    """Megatron's layer-wise optimizer, which by itself wraps its children for bf16 parameters alone, for fp32 ones."""
    from megatron.core.optimizer import FP32Optimizer, LayerWiseDistributedOptimizer

    class LayerWiseOfFp32(LayerWiseDistributedOptimizer):
        def __init__(
            self, optimizers: Any, config: Any, groups: Any, *, init_state_fn_list: Any, model_chunks: Any
        ) -> None:
            wrapped = [FP32Optimizer(each, config, make) for each, make in zip(optimizers, init_state_fn_list)]
            super().__init__(wrapped, config, groups, init_state_fn_list, model_chunks)

    return LayerWiseOfFp32


def build_megatron(context: MuonContext, options: Options) -> MuonVariant:
    """Megatron's DDP with its layer-wise Muon."""
    own = take_options("megatron", options, **OPTIONS)
    require_megatron()
    if importlib.util.find_spec("emerging_optimizers") is None:
        raise PeerUnavailableError(
            "emerging-optimizers is not installed, and Megatron's Muon needs it; pip install emerging-optimizers into "
            "the environment to compare it"
        )
    return MegatronMuon(context, own)
