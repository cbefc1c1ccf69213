"""`HyperFSDPEngine`: DeepSpeed's engine with its model sharded by `fully_shard` instead of by ZeRO."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from hp_plugin.core.optim.clip import clip_grads_with_norm_
from hp_plugin.core.topology import Topology, mesh_from_group
from hp_plugin.deepspeed import adoption, checkpoint, operations, optimizers, precision, refusals, reporting, weights
from hp_plugin.deepspeed.access import mark_parameters
from hp_plugin.deepspeed.experts import Experts
from hp_plugin.deepspeed.observation import CommunicationLog
from hp_plugin.deepspeed.replacements import Replacements, check_live
from hp_plugin.deepspeed.scaler import EngineScaler, LossScale
from hp_plugin.deepspeed.schema import HyperFSDPConfig, read_block
from hp_plugin.deepspeed.sharding import shard_model
from hp_plugin.deepspeed.validation import Validation, copy_of
from hp_plugin.errors import ConfigurationError, UnsupportedError

MESH_AXES = ("dp_replicate", "dp_shard")


class HyperFSDPEngine(DeepSpeedEngine):
    """What `deepspeed.initialize` returns for a configuration with the block `"hyperfsdp"`.

    The configuration says ZeRO stage 3, for the frameworks that read it; this engine's own copy says stage 0, so that
    none of ZeRO's machinery starts: sharding, gathering and reduction are the units' own. Every rank must construct it.

    Attributes:
        hyperfsdp: The block, validated.
        mesh: The device mesh `("dp_replicate", "dp_shard")` over DeepSpeed's data-parallel group.
        experts: Those of layers of `deepspeed.moe`, whose parameters have meshes of their own.
        compute_dtype: fp16 or bf16; None in fp32.
        loss_scaler: Of fp16, else None.
    """

    hyperfsdp: HyperFSDPConfig
    mesh: DeviceMesh
    experts: Experts
    has_moe_layers: bool
    compute_dtype: torch.dtype | None
    loss_scaler: EngineScaler | None
    inside_no_sync_ctxt: bool
    _former: HyperFSDPEngine | None
    _all_parameters: list[nn.Parameter] | None
    _was_trainable: list[bool] | None
    _validation: Validation | None

    def __init__(self, args: Any, model: nn.Module, *positional: Any, **keywords: Any) -> None:
        config = keywords["config_class"]
        options = read_block(config._param_dict)
        assert options is not None  # the patch point has seen it
        refusals.check_config(config._param_dict)
        if keywords.get("optimizer") is not None and isinstance(keywords["optimizer"], torch.optim.Optimizer):
            optimizers.check_client(keywords["optimizer"])
        for sentence in operations.stale_locks():
            reporting.say(sentence)
        reporting.show_log()
        # Attributes of a torch module exist only after its constructor; these are read inside ours.
        own: dict[str, Any] = self.__dict__
        own["hyperfsdp"] = options
        own["_replacements"] = Replacements()
        own["compute_dtype"] = precision.compute_dtype(config)
        own["loss_scaler"] = None
        own["_is_unreduced"] = False
        own["_has_seen_backward"] = False
        own["_validation"] = None
        own["_has_given_up_model"] = False
        own["_all_parameters"] = own["_was_trainable"] = None
        own["_communication_log"] = CommunicationLog()
        own["_former"] = former = adoption.former_engine(model)
        if former is not None:
            adoption.check_same(former, model, options=options, compute_dtype=self.compute_dtype)
            keywords["dont_change_device"] = True  # torch cannot move what hooks of units refer to
        if model_parameters := keywords.get("model_parameters"):
            keywords["model_parameters"] = list(model_parameters)
        config.zero_optimization_stage, config.zero_enabled, config.zero_config.stage = 0, False, 0
        config.zero_config.overlap_comm = False  # stage 0 with it is refused where the caller owns the boundary
        with precision.fp32_inside(config):
            super().__init__(args, model, *positional, **keywords)
        if self.compute_dtype == torch.float16 and self.basic_optimizer is not None:
            self.loss_scaler = EngineScaler(LossScale.of(config.float16_config), self.basic_optimizer)
            self.torch_autocast_z0_gradscaler = self.loss_scaler
        self._support_torch_style_backward = True
        self._replacements.forget()
        del own["_former"]

    # ---------------------------------------------------------------- construction

    def _broadcast_model(self) -> None:
        """Spreads the weights of the first rank, then shards them. The last thing that configures the model."""
        if self.mp_world_size > 1:
            raise UnsupportedError(
                f"the mpu that was given has {self.mp_world_size} model-parallel ranks, over which HyperFSDP does not "
                "sum norms; leave mpu out: weights are sharded over the same ranks."
            )
        if self._former is not None:
            adoption.take_over(self, self._former)
            return
        super()._broadcast_model()
        options = self.hyperfsdp
        if options.mode == "validation":
            alone = copy_of(self.module)
            self.__dict__["_validation"] = Validation(
                alone, steps=options.validation_steps, compute_dtype=self.compute_dtype
            )
        topology = Topology.detect(options.supernode_size)
        reporting.say(topology.describe())
        self.mesh = mesh_from_group(
            self.seq_data_parallel_group,
            topology,
            shard_size=options.shard_size,
            device_type=self.device.type,
        )
        self.__dict__["experts"] = Experts.of(
            self.module,
            dense=self.mesh,
            data_parallel=self.seq_data_parallel_group,
            topology=topology,
            shard_size=options.shard_size,
        )
        policy = precision.policy_for(self.compute_dtype)
        self.__dict__["_replacements"] = shard_model(
            self.module, options, mesh=self.mesh, policy=policy, experts=self.experts
        )
        mark_parameters(self)
        units = self.module.fsdp_units()
        reporting.say(f"HyperFSDP: {len(units)} units over {dict(zip(MESH_AXES, self.mesh.shape))}")

    def give_up_model(self) -> None:
        """Leaves the model to a later engine; every rank must call. This one refuses to train from then on."""
        self.zero_grad()
        for name in ("module_forward_pre_hook", "module_forward_post_hook"):
            hook = self.__dict__.get(name)
            if hook is not None:
                hook.remove()
        self._has_given_up_model = True

    def _check_has_model(self) -> None:
        if self._has_given_up_model:
            raise ConfigurationError(
                "deepspeed.initialize was called again with the model of this engine, which therefore cannot be used "
                "any more; use the engine that the later call returned."
            )

    def _is_supported_optimizer(self, optimizer_name: str) -> bool:
        return optimizers.is_known(optimizer_name) or super()._is_supported_optimizer(optimizer_name)

    def _configure_optimizer(self, client_optimizer: Any, model_parameters: list[Any]) -> None:
        if isinstance(client_optimizer, torch.optim.Optimizer):
            self._replacements.apply_to(client_optimizer)
        # DeepSpeed would give experts parameter groups of their own, which ZeRO needs and we do not.
        has_experts, self.has_moe_layers = self.has_moe_layers, False
        try:
            super()._configure_optimizer(client_optimizer, self._replacements.follow_all(model_parameters))
        finally:
            self.has_moe_layers = has_experts
        optimizers.check_client(self.basic_optimizer)
        check_live(self.basic_optimizer, self.module)
        optimizers.complete_for_engine(self.basic_optimizer)

    def _configure_basic_optimizer(self, model_parameters: list[Any]) -> torch.optim.Optimizer:
        optimizer = optimizers.build_optimizer(
            self.optimizer_name(), model_parameters, self.optimizer_params() or {}, model=self.module
        )
        if not self.client_lr_scheduler:
            optimizers.check_scheduler(optimizer, self.scheduler_name(), self.scheduler_params() or {})
        return optimizer

    # ---------------------------------------------------------------- gradients

    def _choose_tiers(self) -> None:
        """Decides how far the backward that begins now reduces: inside the supernode, or between them too.

        It is decided here and not in forward: Accelerate says which micro-batch is the last one after its forward.
        """
        self._check_has_model()
        crosses = self.is_gradient_accumulation_boundary() and not self.inside_no_sync_ctxt
        self.module.set_requires_all_reduce(crosses)
        # With a breakdown of times, backward leaves the wait for what still travels to allreduce_gradients.
        self.module.set_is_last_backward(not (crosses and self.wall_clock_breakdown()))
        self._is_unreduced = not crosses
        if not crosses:
            self._was_trainable = self._trainable()
        self._has_seen_backward = True

    def _trainable(self) -> list[bool]:
        if self._all_parameters is None:
            self._all_parameters = list(self.module.parameters())
        return [parameter.requires_grad for parameter in self._all_parameters]

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """See DeepSpeed. Between micro-batches `requires_grad` of parameters may change, on every rank alike."""
        if self._is_unreduced and self._trainable() != self._was_trainable:
            self._finish_reduction()  # what waits is of other parameters than the next sum
        output = super().forward(*inputs, **kwargs)
        if self._validation is not None and self.module.training:
            self._validation.saw(inputs, kwargs, output)
        return output

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """See DeepSpeed. Every micro-batch is reduced inside the supernode, the last of a step between them too."""
        self._choose_tiers()
        # DeepSpeed's hook on what it is given must come before the one on the output of forward, which would divide by
        # the number of micro-batches otherwise; on one and the same tensor hooks run in the order of registration.
        with precision.fp32_inside(self._config):
            return super().backward(loss.view_as(loss), *args, **kwargs)

    def _do_optimizer_backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """DeepSpeed 0.17 calls this, and knows no scaler of stage 0; later releases ask for one themselves."""
        loss = loss if self.loss_scaler is None else self.loss_scaler.scale(loss)
        return super()._do_optimizer_backward(loss, *args, **kwargs)

    def _backward_prologue(self, *args: Any, **kwargs: Any) -> Any:
        self._choose_tiers()
        if not getattr(self, "_running_engine_backward", True):
            # loss.backward(): the epilogue is to come behind the end of the units' own backward. That arranges for its
            # callback later than this line, so ours asks for another one.
            queue = torch.autograd.Variable._execution_engine.queue_callback
            queue(lambda: queue(self._backward_post_hook))
        # DeepSpeed 0.17 would not divide a loss inside no_sync by the number of micro-batches, as later releases do.
        inside, self.inside_no_sync_ctxt = self.inside_no_sync_ctxt, False
        try:
            return super()._backward_prologue(*args, **kwargs)
        finally:
            self.inside_no_sync_ctxt = inside

    def allreduce_gradients(self, bucket_size: int = 0) -> None:
        """Reduces at the end of a step what backward passes inside `no_sync` have left; else all is under way."""
        if self.is_gradient_accumulation_boundary() and (self._is_unreduced or self.wall_clock_breakdown()):
            self._finish_reduction()

    def complete_gradients(self) -> None:
        """Makes `.grad` the sum of all micro-batches so far; every rank must call.

        Between micro-batches sums wait for their reduction between supernodes. What is reduced early is added to by
        later micro-batches, at the price of one more reduction.
        """
        if self._is_unreduced:
            self._finish_reduction()

    def zero_grad(self) -> None:
        """Drops gradients, also what micro-batches inside `no_sync` have left; every rank must call."""
        self.complete_gradients()
        super().zero_grad()

    def _finish_reduction(self) -> None:
        self.module.reduce_pending_gradients()
        self._is_unreduced = False

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside reduce within the supernode only. Every rank must use it alike."""
        if self.inside_no_sync_ctxt:
            # The error, and its words, that DeepSpeed has for it.
            raise AssertionError("no_sync context manager reentry is unsupported: no_sync() is open already")
        self.inside_no_sync_ctxt = True
        try:
            yield
        finally:
            self.inside_no_sync_ctxt = False

    @contextlib.contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """As `no_sync`, and at the end of the block all of it is reduced between supernodes at once."""
        # Both with the error, and its words, that DeepSpeed has for it.
        if not getattr(self, "managed_gradient_accumulation", lambda: True)():  # older releases always manage it
            raise AssertionError(
                "coalesce_grad_reduction is not supported with managed_gradient_accumulation=False; the caller already "
                "owns the accumulation boundary via step()"
            )
        if self.inside_no_sync_ctxt:
            raise AssertionError("coalesce_grad_reduction cannot be nested inside another no_sync context")
        with self.no_sync():
            yield
        self._finish_reduction()

    # ---------------------------------------------------------------- step

    def _take_model_step(self, *args: Any, **kwargs: Any) -> None:
        self._check_has_model()
        if not self._has_seen_backward and any(p.grad is not None for p in self.module.parameters()):
            raise ConfigurationError(
                "gradients were made past the engine, which neither scaled the loss nor knew how far to reduce them; "
                "call engine.backward(loss). loss.backward() needs DeepSpeed 0.18 or later and an output of tensors, "
                "tuples, lists and dicts."
            )
        self._has_seen_backward = False
        if self._is_unreduced or self.wall_clock_breakdown():
            self._finish_reduction()  # after backward passes that were all inside no_sync, for instance
        optimizer: Any = self.optimizer
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        norm = self.experts.total_grad_norm(parameters)
        optimizer.overflow = not torch.isfinite(norm).item()
        scale = 1.0 if self.loss_scaler is None else self.loss_scaler.applied
        if not optimizer.overflow and self.loss_scaler is not None:
            self.loss_scaler.unscale(parameters)
            norm = norm / scale
        compared = self._compared_step(norm, scale)
        optimizer._global_grad_norm = math.inf if optimizer.overflow else float(norm)
        if self.loss_scaler is not None:
            self.loss_scaler.finish_step(optimizer.overflow)
        with (
            compared,
            precision.fp32_inside(self._config),
            _without_step(optimizer) if optimizer.overflow else contextlib.nullcontext(),
        ):
            if self.gradient_clipping() > 0.0 and not optimizer.overflow:
                clip_grads_with_norm_(parameters, self.gradient_clipping(), norm)
            super()._take_model_step(*args, **kwargs)
        self._communication_log.record(self.module.fsdp_counters())

    def _compared_step(self, norm: torch.Tensor, scale: float) -> contextlib.AbstractContextManager[None]:
        """What stands around a step in validation mode."""
        validation, optimizer = self._validation, self.optimizer
        if validation is None or validation.is_over:
            self._validation = None
            return contextlib.nullcontext()
        if optimizer.overflow:
            validation.forget()
            return contextlib.nullcontext()
        return validation.step(
            self.module, self.basic_optimizer, norm=float(norm), clip=self.gradient_clipping(), scale=scale
        )

    def clip_fp32_gradients(self) -> None:
        """Nothing: gradients were clipped by their norm over all shards before."""

    # ---------------------------------------------------------------- weights and checkpoints

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any] | None:
        return weights.full_state_dict(
            self.module, dtype=self.compute_dtype, experts=self.experts, skip_frozen=exclude_frozen_parameters
        )

    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any] | None:
        return self._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters)

    def save_16bit_model(
        self, save_dir: str, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Writes the full weights in the compute dtype, from rank 0; every rank must call.

        Returns:
            False, and nothing is written, where `stage3_gather_16bit_weights_on_model_save` is off.
        """
        return weights.save_full_weights(self, save_dir, save_filename, skip_frozen=exclude_frozen_parameters)

    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Writes `save_dir/tag`, which loads on any number of ranks and supernodes; every rank must call.

        Args:
            save_dir: On a file system that all ranks share.
            tag: Name of the folder, the same on every rank; None is `global_step<N>`.
            client_state: The caller's own values, which each rank gets back as it gave them.
            save_latest: Whether `save_dir/latest` shall name this checkpoint.
            exclude_frozen_parameters: Leave out parameters that do not require a gradient.

        Returns:
            True.

        Raises:
            HyperParallelError: A rank could not write; what was there before is unchanged.
        """
        self._check_has_model()
        return checkpoint.save(
            self, save_dir, tag, client_state or {}, save_latest=save_latest, skip_frozen=exclude_frozen_parameters
        )

    def load_checkpoint(
        self,
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Reads a checkpoint of this engine on any mesh, of ZeRO-1, 2 or 3 on any number of ranks, or a universal one.

        Every rank must call. What the folder holds is recognised; see docs/deepspeed.md for what of each is loaded.

        Args:
            load_dir: What `save_checkpoint` was given.
            tag: Of the checkpoint; None is what `load_dir/latest` names, or `latest_universal`.
            load_module_strict: Whether the model's parameter names must be those of the checkpoint.
            load_optimizer_states: Load the state of the optimizer too, converted where another one wrote it.
            load_lr_scheduler_states: Load the learning-rate scheduler too.
            load_module_only: Load weights alone: neither optimizer, scheduler nor counters.
            custom_load_fn: Refused.

        Returns:
            The folder and this rank's client state, or (None, None) where there is no checkpoint to resume from.

        Raises:
            ConfigurationError: There is no checkpoint of that tag, or it does not fit the model or the optimizer.
            UnsupportedError: It is one that cannot be read, or `custom_load_fn` was given.
        """
        self._check_has_model()
        if custom_load_fn is not None:
            raise UnsupportedError(
                "custom_load_fn gets full weights, which HyperFSDP never has in one place; load without it, or write "
                "weights with deepspeed.zero.GatheredParameters."
            )
        return checkpoint.load(
            self,
            load_dir,
            tag,
            strict=load_module_strict,
            optimizer=load_optimizer_states and not load_module_only,
            scheduler=load_lr_scheduler_states and not load_module_only,
            counters=not load_module_only,
        )

    # ---------------------------------------------------------------- refused

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Refused: compiling across the hooks of units is not supported."""
        raise UnsupportedError(
            "engine.compile() is not supported with HyperFSDP: it would compile across the hooks that gather weights; "
            "call torch.compile on functions inside the model's blocks instead."
        )

    def offload_states(self, *args: Any, **kwargs: Any) -> None:
        """Refused: shards stay on the device."""
        raise UnsupportedError(
            "offload_states() is not supported with HyperFSDP; save a checkpoint and destroy the engine."
        )

    def reload_states(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: nothing was offloaded."""


@contextlib.contextmanager
def _without_step(optimizer: Any) -> Iterator[None]:
    """Inside, `optimizer.step()` does nothing: a gradient is not finite. A scheduler may have put a step of its own."""
    own = optimizer.__dict__.get("step")
    optimizer.step = lambda *args, **kwargs: None
    try:
        yield
    finally:
        del optimizer.step
        if own is not None:
            optimizer.step = own
