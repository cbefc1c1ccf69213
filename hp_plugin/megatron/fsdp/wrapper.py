"""`HyperFSDP`: the class that Megatron's training loop sees in the place of `DistributedDataParallel`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import TorchFullyShardedDataParallel
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch.distributed.device_mesh import DeviceMesh

from hp_plugin.core.fsdp import MixedPrecisionPolicy, fully_shard
from hp_plugin.core.fsdp.counters import Counters
from hp_plugin.core.fsdp.experts import expert_modules, expert_reshard, is_expert
from hp_plugin.core.layout import local_tensor
from hp_plugin.errors import UnsupportedError
from hp_plugin.megatron import reporting
from hp_plugin.megatron.checkpoints import model_state
from hp_plugin.megatron.fsdp import finalize
from hp_plugin.megatron.fsdp.data_parallel import (
    WrapperOptions,
    compute_dtype,
    is_first_chunk,
    options_from_arguments,
    unit_modules,
)
from hp_plugin.megatron.fsdp.meshes import (
    Meshes,
    data_parallel_group,
    expert_data_parallel_group,
    make_meshes,
)
from hp_plugin.megatron.releases.differences import unwrapped


class HyperFSDP(TorchFullyShardedDataParallel):
    """One model chunk, fully sharded inside a supernode and replicated between supernodes.

    A subclass of Megatron's wrapper around torch FSDP2 only so that every release's `unwrap_model` takes it off;
    nothing of that class is used. It is no `DistributedDataParallel`, whose buffers Megatron would look for.

    Every rank of the default group must construct the same number of chunks in the same order, since the first
    one creates process groups.

    Args:
        config: The model's `TransformerConfig`. `config.no_sync_func` is set: sums of micro-batches are kept sharded
            and are reduced between supernodes once per step.
        ddp_config: Megatron's `DistributedDataParallelConfig`; `grad_reduce_in_fp32` and `check_for_nan_in_grad` count.
        module: The model, possibly inside `Float16Module`, with its full weights (of this tensor-parallel rank).
        disable_bucketing: True for the later chunks of an interleaved pipeline; has no other effect.
        pg_collection: Process groups; Megatron's global ones if None.
        options: Where they do not come from Megatron's arguments.
    """

    def __init__(
        self,
        config: Any,
        ddp_config: Any,
        module: torch.nn.Module,
        disable_bucketing: bool = False,
        pg_collection: Any = None,
        *,
        options: WrapperOptions | None = None,
        **_: Any,
    ) -> None:
        _BaseDataParallel.__init__(self, config=config, module=module)
        options = options_from_arguments() if options is None else options
        self.ddp_config = ddp_config
        self.force_all_reduce = False
        self.remove_forward_pre_hook_handles: dict[Any, Any] = {}
        model = unwrapped(module)
        self.device = _device(model)
        self.process_group = data_parallel_group(pg_collection)
        first = _first_chunk(config, model, later=disable_bucketing)
        self.meshes: Meshes = (
            make_meshes(config, pg_collection, options, self.device) if first is None else first.meshes
        )
        self.device_mesh = self.mesh
        self.compute_dtype = compute_dtype(list(model.named_parameters()), config.params_dtype)
        if options.random_init:
            _broadcast([p for p in model.parameters() if not is_expert(p)], self.process_group)
            if self.expert_mesh is not None:
                experts = [p for p in model.parameters() if is_expert(p)]
                _broadcast(experts, expert_data_parallel_group(pg_collection))
        self._shard(model, options)
        self._set_no_sync_func(first)
        model.sharded_state_dict = partial(model_state.sharded_state_dict, model, dtype=self.compute_dtype)

    @property
    def _root(self) -> Any:
        """The model inside all wrappers, which is the root unit. Not an attribute, which would be a second child."""
        return unwrapped(self.module)

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh of all parameters but those of experts under expert parallelism."""
        return self.meshes.dense

    @property
    def expert_mesh(self) -> DeviceMesh | None:
        """The mesh of the parameters of experts; None where :attr:`mesh` is theirs too."""
        return self.meshes.expert

    # ---------------------------------------------------------------- construction

    def _shard(self, model: torch.nn.Module, options: WrapperOptions) -> None:
        reduce_dtype = options.reduce_dtype or self.compute_dtype
        if options.reduce_dtype is None and (self.ddp_config.grad_reduce_in_fp32 or reduce_dtype == torch.float16):
            # Gradients under a loss scale are near the end of fp16's range; a sum over ranks would overflow.
            reduce_dtype = torch.float32
        policy = MixedPrecisionPolicy(
            param_dtype=self.compute_dtype,
            reduce_dtype=reduce_dtype,
            cast_forward_inputs=False,
            master_dtype=torch.float32,
        )
        settings: dict[str, Any] = dict(
            mesh=self.mesh,
            mp_policy=policy,
            transport=options.transport,
            optimizer_sharding=options.optimizer_sharding,
            deterministic=options.deterministic,
            bucket_bytes=options.bucket_bytes,
            window=options.window,
            prefetch=options.prefetch,
        )
        reporting.show_log()
        if self.expert_mesh is not None:
            reshard = expert_reshard(options.reshard_after_forward, self.expert_mesh.size(-1))
            for unit in expert_modules(model):
                fully_shard(unit, reshard_after_forward=reshard, **{**settings, "mesh": self.expert_mesh})
        for unit in unit_modules(model, lambda module: isinstance(module, TransformerLayer)):
            fully_shard(unit, reshard_after_forward=options.reshard_after_forward, **settings)
        fully_shard(model, **settings)
        # Experts see the tokens of all data-parallel ranks, so their gradients are means over as many ranks as all
        # others, though they are added up over fewer. Where the loss is a sum over tokens, finalize_model_grads divides
        # by the number of tokens of all ranks.
        self._root.set_gradient_divide_factor(1.0 if self.config.calculate_per_token_loss else float(self.mesh.size()))

    def _set_no_sync_func(self, first: HyperFSDP | None) -> None:
        if self.config.virtual_pipeline_model_parallel_size is None:
            self.config.no_sync_func = self.no_sync
        else:  # one entry per chunk; a second model with the same configuration starts over
            self.config.no_sync_func = ([] if first is None else list(self.config.no_sync_func)) + [self.no_sync]

    # ---------------------------------------------------------------- gradients

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside reduce within the supernode only and add up there."""
        self._root.set_requires_all_reduce(False)
        try:
            yield
        finally:
            self._root.set_requires_all_reduce(True)

    def zero_grad_buffer(self) -> None:
        """Drop all gradients, at the start of a step."""
        finalize.withdraw(self.module.parameters())

    def start_grad_sync(self, *unused: Any) -> None:
        """Nothing to start: every backward pass outside :meth:`no_sync` reduces as it goes."""

    def finish_grad_sync(self, force_all_reduce: bool = False, **_: Any) -> None:
        """Publish this rank's shards of the reduced gradients as `main_grad`, where Megatron finalizes them.

        Raises:
            UnsupportedError: `force_all_reduce`, which asks for full gradients.
        """
        if force_all_reduce:
            raise UnsupportedError(
                "--save-wgrads-interval asks for full gradients, which HyperFSDP never holds; remove the flag."
            )
        parameters = list(self.module.parameters())
        finalize.publish(parameters)
        if self.ddp_config.check_for_nan_in_grad:
            finalize.check_finite(parameters)

    def scale_gradients(self, scaling_factor: float | torch.Tensor) -> None:
        """Multiply all gradients, for losses that are divided by a number of tokens at the end."""
        finalize.scale(self.module.parameters(), scaling_factor)

    # ---------------------------------------------------------------- parameters

    def start_param_sync(self, *unused: Any, force_sync: bool = False, force_dispatch: bool = False) -> None:
        """Nothing to gather: every unit is gathered when its forward begins."""

    def enable_forward_pre_hook(self) -> None:
        """Nothing to do: the hooks that gather parameters are always on."""

    def disable_forward_pre_hook(self, param_sync: bool = True) -> None:
        """Nothing to do: parameters can be read at rest at any time."""

    def stop_communication(self) -> None:
        """Nothing is in flight between two steps."""

    @torch.no_grad()
    def broadcast_params(self) -> None:
        """Make the shards of all supernodes equal to those of the first. Every rank of the chunk's mesh must call.

        With `--data-parallel-random-init` the constructor has already spread the weights of data-parallel rank 0, so
        that a model is initialised as by stock Megatron.
        """
        for mesh in filter(None, self.meshes):
            shards = [local_tensor(p) for p in self.module.parameters() if p.device_mesh is mesh]
            for axis in range(mesh.ndim - 1):
                _broadcast(shards, mesh.get_group(axis))

    def counters(self) -> Counters:
        """What the engine did for this chunk and for what it waited; a live object."""
        counters: Counters = self._root.fsdp_counters()
        return counters

    # ---------------------------------------------------------------- state dicts

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """As the model's own, cut to this rank's rows; see `model_state`."""
        return self._root.sharded_state_dict(prefix=prefix, sharded_offsets=sharded_offsets, metadata=metadata)

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> Any:
        """Write a loaded state dict into the shards; see `model_state.load_state_dict`."""
        return model_state.load_state_dict(self._root, state_dict, strict=strict)


def _device(model: torch.nn.Module) -> torch.device:
    """The device of the model's parameters; of a stage without parameters, the current accelerator or the CPU."""
    for parameter in model.parameters():
        if not parameter.is_meta:
            return parameter.device
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def _first_chunk(config: Any, model: torch.nn.Module, *, later: bool = False) -> HyperFSDP | None:
    """The chunk of this interleaved pipeline that was wrapped first, None for the first one itself.

    Chunks share their configuration, and through it a list of `no_sync` methods. Its meshes serve all of them, so that
    process groups are made once.
    """
    entries = config.no_sync_func if isinstance(config.no_sync_func, list) else []
    if is_first_chunk(model, later=later) or not entries:
        return None
    owner = getattr(entries[0], "__self__", None)
    return owner if isinstance(owner, HyperFSDP) else None


@torch.no_grad()
def _broadcast(tensors: Any, group: dist.ProcessGroup) -> None:
    source = dist.get_global_rank(group, 0)
    for tensor in tensors:
        if tensor.numel():
            dist.broadcast(tensor.detach(), src=source, group=group)
