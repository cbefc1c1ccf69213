"""DeepSpeed's Muon under ZeRO, where DeepSpeed is installed."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from bench.fsdp_step.model import Transformer, loss_of
from bench.fsdp_step.settings import Options
from bench.fsdp_step.variant import Batch, PeerUnavailableError, take_options
from bench.muon_step.variant import MuonContext, MuonVariant, is_matrix

OPTIONS: dict[str, Any] = {
    "stage": 1,
    "overlap_comm": True,
    "bucket_elements": 8_000_000,
    "compiled": False,  # DeepSpeed compiles its Newton-Schulz; False has torch run it as it is written
}


class _HeadByName(nn.Module):
    """The model, with its head under the name by which DeepSpeed knows what Muon must not have."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.lm_head = model.head  # before the model, whose own name for it then does not count
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """That of the model."""
        logits: torch.Tensor = self.model(tokens)
        return logits


class DeepSpeedMuon(MuonVariant):
    """The engine of `deepspeed.initialize` with the optimizer "Muon"."""

    def __init__(self, context: MuonContext, options: Options) -> None:
        import deepspeed

        # An all-reduce for inference on one node, which would be compiled here and never called.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        self.model = context.model()
        wanted = {name: is_matrix(name, parameter) for name, parameter in self.model.named_parameters()}
        self.options = options
        self.engine, self.optimizer, _, _ = deepspeed.initialize(
            model=_HeadByName(self.model),
            model_parameters=list(self.model.parameters()),
            config=_configuration(context, options),
            dist_init_required=False,
        )
        for name, parameter in self.model.named_parameters():
            assert getattr(parameter, "use_muon", None) is wanted[name], f"DeepSpeed gives {name} another optimizer"
        for group in self.optimizer.param_groups:
            if not group["use_muon"]:
                group.update(fused=True, foreach=False)  # what torch chooses by itself is slower on CPU

    def forward(self, batch: Batch) -> torch.Tensor:
        """The engine's."""
        tokens, targets = batch
        return loss_of(self.engine(tokens), targets)

    def backward(self, loss: torch.Tensor) -> None:
        """The engine's, in which some stages orthogonalize."""
        with self._compilation():
            self.engine.backward(loss)

    def update(self) -> None:
        """The engine's."""
        with self._compilation():
            self.engine.step()

    def _compilation(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self.options["compiled"] else torch.compiler.set_stance("force_eager")

    def full_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Gathered one by one where they are sharded."""
        import deepspeed

        for name, parameter in self.model.named_parameters():
            with deepspeed.zero.GatheredParameters(parameter, enabled=self.options["stage"] == 3):
                yield name, parameter.detach()

    def facts(self) -> dict[str, Any]:
        """Its own configuration."""
        return {
            "stage": self.engine.zero_optimization_stage(),
            "overlap_comm": self.engine.zero_overlap_comm(),
            "optimizer": type(self.engine.basic_optimizer).__name__,
            "compiled": self.options["compiled"],
        }


def _configuration(context: MuonContext, options: Options) -> dict[str, Any]:
    own, adam = context.muon, context.adam
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "optimizer": {
            "type": "Muon",
            "params": {
                "muon_lr": own.lr,
                "adam_lr": adam.lr,
                "momentum": own.momentum,
                "weight_decay": own.weight_decay,
                "betas": [adam.beta1, adam.beta2],
                "eps": adam.eps,
                "ns_method": "standard",  # the direct iteration, in bf16
                "torch_adam": True,  # its own would be compiled here
            },
        },
        "zero_optimization": {
            "stage": options["stage"],
            "overlap_comm": options["overlap_comm"],
            "contiguous_gradients": True,
            "reduce_scatter": options["stage"] != 3,  # stage 3 refuses it with Muon
            "reduce_bucket_size": options["bucket_elements"],
            "allgather_bucket_size": options["bucket_elements"],
        },
    }


def build_deepspeed(context: MuonContext, options: Options) -> MuonVariant:
    """ZeRO with Muon."""
    own = take_options("deepspeed", options, **OPTIONS)
    if importlib.util.find_spec("deepspeed") is None:
        raise PeerUnavailableError(
            "DeepSpeed is not installed; pip install deepspeed into the environment to compare it"
        )
    if context.adam.weight_decay != context.muon.weight_decay:
        raise PeerUnavailableError("DeepSpeed has one weight decay for the matrices and the rest of a parameter group")
    return DeepSpeedMuon(context, own)
