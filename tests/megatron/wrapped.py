"""Rank functions around a tiny GPT model that is wrapped without Megatron's training loop."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from tests.support import init_gloo

VOCABULARY, LENGTH, BATCH, MICRO_BATCHES = 32, 8, 2, 3


def start(
    *,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    context_parallel: int = 1,
    expert_parallel: int = 1,
    expert_tensor_parallel: int | None = None,
    again: bool = False,
) -> None:
    """Process groups and random state, as Megatron's initialisation makes them.

    With `again`, the default group exists and groups of other sizes have been destroyed.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    if not again:
        init_gloo()
    parallel_state.initialize_model_parallel(
        tensor_parallel,
        pipeline_parallel,
        context_parallel_size=context_parallel,
        expert_model_parallel_size=expert_parallel,
        expert_tensor_parallel_size=expert_tensor_parallel,
    )
    model_parallel_cuda_manual_seed(7)


def model(
    *, seed: int = 7, tied: bool = True, per_token: bool = False, context_parallel_size: int = 1, **options: Any
) -> Any:
    """A GPT of two layers, the same on every rank for the same seed.

    Megatron's attention for the CPU knows no context parallelism. With `context_parallel_size` each rank attends to its
    part of the sequence alone; everything else, gradients above all, is as with an attention that communicates.
    """
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    torch.manual_seed(seed)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=12,
        num_attention_heads=2,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        add_bias_linear=False,
        calculate_per_token_loss=per_token,
        gradient_accumulation_fusion=False,
        **options,
    )
    made = GPTModel(
        config,
        get_gpt_layer_local_spec(num_experts=config.num_moe_experts),
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
        share_embeddings_and_output_weights=tied,
    )
    config.context_parallel_size = context_parallel_size
    return made


def wrap(module: Any, *, supernode_size: int, **options: Any) -> Any:
    """`module` in HyperFSDP."""
    from megatron.core.distributed import DistributedDataParallelConfig

    from hp_plugin.megatron.fsdp.data_parallel import WrapperOptions, hyperfsdp_class

    # As Megatron's argument parser has it: under a dynamic loss scale, overflows are found by the optimizer.
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=not module.config.fp16, check_for_nan_in_grad=not module.config.fp16
    )
    settings = WrapperOptions(supernode_size=supernode_size, **options)
    return hyperfsdp_class()(module.config, ddp_config, module, options=settings)


def backward(chunk: Any, *, no_sync: Any, micro_batches: int = MICRO_BATCHES, rank: int | None = None) -> None:
    """Three (or so many) micro-batches of data that differ between ranks; all but the last inside `no_sync`."""
    generator = torch.Generator().manual_seed(100 + (dist.get_rank() if rank is None else rank))
    positions = torch.arange(LENGTH).expand(BATCH, LENGTH)
    for index in range(micro_batches):
        tokens = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator)
        labels = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator)
        with no_sync() if index < micro_batches - 1 else nullcontext():
            chunk(tokens, positions, None, labels=labels).mean().backward()


def gradients(
    *,
    supernode_size: int,
    per_token: bool,
    wrong_factor: float = 1.0,
    options: dict[str, Any] | None = None,
    micro_batches: int = MICRO_BATCHES,
) -> dict[str, float]:
    """By parameter, the largest difference of a gradient to that of Megatron's DDP, relative to its largest element."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    start()
    stock = model(per_token=per_token)
    ddp = DistributedDataParallel(stock.config, DistributedDataParallelConfig(overlap_grad_reduce=True), stock)
    ddp.zero_grad_buffer()
    backward(ddp, no_sync=ddp.no_sync, micro_batches=micro_batches)
    ddp.finish_grad_sync()
    ddp.scale_gradients(0.5)
    expected = {name: parameter.main_grad for name, parameter in stock.named_parameters()}

    mine = model(per_token=per_token)
    chunk = wrap(mine, supernode_size=supernode_size, **(options or {}))
    chunk.zero_grad_buffer()
    backward(chunk, no_sync=chunk.config.no_sync_func, micro_batches=micro_batches)
    chunk.finish_grad_sync(force_all_reduce=False)
    chunk.scale_gradients(torch.tensor([0.5 * wrong_factor]))
    differences = {}
    for name, parameter in mine.named_parameters():
        assert parameter.main_grad.data_ptr() == parameter.grad._local_tensor.data_ptr()
        found = parameter.grad.full_tensor()
        differences[name] = ((found - expected[name]).abs().max() / expected[name].abs().max()).item()
    return differences


def tuned(*, supernode_size: int, **options: Any) -> tuple[dict[str, float], list[Any]]:
    """As `gradients` with options of the engine, and what arrived at the units of another model with them."""
    found = gradients(supernode_size=supernode_size, per_token=False, options=options)
    module = model()
    chunk = wrap(module, supernode_size=supernode_size, **options)
    backward(chunk, no_sync=chunk.no_sync)
    resolved = module._hyperfsdp_unit.root.options
    reshards = [unit["reshard_after_forward"] for unit in module.fsdp_units()]
    return found, [resolved.bucket_bytes, resolved.window, resolved.prefetch, *reshards]


def _unwrapped_by_megatron(chunk: Any) -> Any:
    try:
        from megatron.core.utils import unwrap_model
    except ImportError:  # 0.12 has it in megatron.training, over a list of classes that the parent of ours is on
        from megatron.core.distributed import TorchFullyShardedDataParallel

        return chunk.module if isinstance(chunk, TorchFullyShardedDataParallel) else chunk
    return unwrap_model([chunk])[0]


def interface(*, supernode_size: int) -> dict[str, bool]:
    """Facts about the wrapper; every one must be true."""
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.utils import get_model_config
    from torch.distributed.tensor import DTensor

    start()
    inner = model()
    names = [name for name, _ in inner.named_parameters()]
    attributes = {name: dict(vars(parameter)) for name, parameter in inner.named_parameters()}
    chunk = wrap(inner, supernode_size=supernode_size)
    tokens = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    before = chunk(tokens, tokens, None)
    with torch.no_grad():
        evaluated = chunk(tokens, tokens, None)
    backward(chunk, no_sync=chunk.no_sync)
    chunk.finish_grad_sync()
    published = all(hasattr(p, "main_grad") for p in chunk.parameters())
    chunk.zero_grad_buffer()
    for call in (
        chunk.start_grad_sync,
        chunk.start_param_sync,
        chunk.enable_forward_pre_hook,
        chunk.disable_forward_pre_hook,
        chunk.stop_communication,
    ):
        call()
    chunk.start_param_sync(force_sync=True)
    state = {
        name: tensor._local_tensor.clone() for name, tensor in chunk.state_dict().items() if isinstance(tensor, DTensor)
    }
    with torch.no_grad():
        for parameter in chunk.parameters():
            parameter._local_tensor.zero_()
    chunk.load_state_dict(state, strict=False)
    refused = False
    try:
        chunk.load_state_dict({name: state[name] for name in list(state)[1:]}, strict=True)
    except RuntimeError as error:
        refused = next(iter(state)) in str(error)
    return {
        "is not a DDP": not isinstance(chunk, DistributedDataParallel),
        "is unwrapped": _unwrapped_by_megatron(chunk) is inner,
        "has the configuration": get_model_config(chunk) is inner.config and chunk.ddp_config is not None,
        "keeps names": [name for name, _ in inner.named_parameters()] == names,
        "lists parameters once": [n for n, _ in chunk.named_parameters()] == [f"module.{name}" for name in names],
        "keeps attributes": all(attributes[n].items() <= vars(p).items() for n, p in inner.named_parameters()),
        "shards are fp32 DTensors": all(
            isinstance(p, DTensor) and p.dtype == torch.float32 for p in chunk.parameters()
        ),
        "evaluates": torch.equal(before, evaluated) and not evaluated.requires_grad,
        "publishes gradients": published,
        "drops gradients": all(p.grad is None and not hasattr(p, "main_grad") for p in chunk.parameters()),
        "loads what it gave": torch.equal(chunk(tokens, tokens, None), before),
        "names what is missing": refused,
        "set no_sync_func": inner.config.no_sync_func == chunk.no_sync,
        "force_all_reduce": _refuses_full_gradients(chunk),
    }


def _refuses_full_gradients(chunk: Any) -> bool:
    from hp_plugin.errors import UnsupportedError

    try:
        chunk.finish_grad_sync(force_all_reduce=True)
    except UnsupportedError as error:
        return "--save-wgrads-interval" in str(error)
    return False


def random_init(*, supernode_size: int) -> bool:
    """Whether models that ranks initialised differently have the weights of rank 0 after wrapping."""
    start()
    expected = {name: parameter.detach().clone() for name, parameter in model(seed=50).named_parameters()}
    chunk = wrap(model(seed=50 + dist.get_rank()), supernode_size=supernode_size, random_init=True)
    chunk.broadcast_params()
    return all(torch.equal(p.full_tensor(), expected[n]) for n, p in chunk.module.named_parameters())


def diverged_replicas(*, supernode_size: int) -> bool:
    """Whether `broadcast_params` gives replicas the shards of the first."""
    start()
    chunk = wrap(model(), supernode_size=supernode_size)
    with torch.no_grad():
        for parameter in chunk.parameters():
            parameter._local_tensor.fill_(float(dist.get_rank() + 1))
    chunk.broadcast_params()
    return all(bool((parameter._local_tensor == 1.0).all()) for parameter in chunk.parameters())


def unused_parameter(*, supernode_size: int) -> bool:
    """Whether a parameter that took no part in forward has a zero gradient of its own layout, and frozen ones none."""
    start()
    inner = model()
    inner.unused = torch.nn.Parameter(torch.ones(5, 3))
    inner.frozen = torch.nn.Parameter(torch.ones(5, 3), requires_grad=False)
    chunk = wrap(inner, supernode_size=supernode_size)
    backward(chunk, no_sync=chunk.no_sync)
    chunk.finish_grad_sync()
    zero = inner.unused.grad
    return (
        zero.placements == inner.unused.placements
        and zero._local_tensor.shape == inner.unused._local_tensor.shape
        and not zero._local_tensor.any()
        and inner.unused.main_grad is not None
        and inner.frozen.grad is None
    )


def nan_gradient(*, supernode_size: int) -> None:
    """A NaN of one rank must be found."""
    start()
    chunk = wrap(model(), supernode_size=supernode_size)
    backward(chunk, no_sync=chunk.no_sync)
    next(chunk.parameters()).grad._local_tensor[0] = float("nan")
    chunk.finish_grad_sync()
