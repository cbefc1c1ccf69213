"""`--hyperfsdp-migrate observe`: stock Megatron trains, and after a few steps rank 0 says what HyperFSDP would do.

Memory of stock is what its buffers and optimizers really hold, and its step is timed. What ours would take is the
closed form of `model` for the meshes that the same options would give; links are measured with a few
all-reduces.
Every rank takes part in the one report, between two training steps.
"""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from hp_plugin.core.fsdp.experts import expert_modules, is_expert
from hp_plugin.core.topology import Topology, measure_link
from hp_plugin.megatron import reporting
from hp_plugin.megatron.fsdp.data_parallel import (
    WrapperOptions,
    options_from_arguments,
    unit_modules,
)
from hp_plugin.megatron.observation.model import (
    Bytes,
    Memory,
    Operands,
    Part,
    Precision,
    memory,
    operands,
    predicted,
    ring,
    traffic,
)

Groups: TypeAlias = dict[tuple[int, ...], dist.ProcessGroup]

_WARM_UP, _TIMED = 1, 4
"""Steps that are not timed, and that are."""


def watch_steps(original: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's `train_step`, timed; after the last timed one comes the report."""
    signature = inspect.signature(original)
    seconds: list[float] = []

    @functools.wraps(original)
    def train_step(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        result = original(*args, **kwargs)
        _synchronize()
        seconds.append(time.perf_counter() - start)
        if len(seconds) == _enough():
            given = signature.bind(*args, **kwargs).arguments
            report(given["model"], given["optimizer"], seconds[min(_WARM_UP, len(seconds) - 1) :])
        return result

    return train_step


def report(model: Any, optimizer: Any, seconds: Sequence[float]) -> None:
    """Print what HyperFSDP would do. Every rank must call.

    Args:
        model: The chunks of this rank, in Megatron's DDP.
        optimizer: Megatron's optimizer.
        seconds: What the timed steps took on this rank.
    """
    from megatron.core.num_microbatches_calculator import get_num_microbatches
    from megatron.training import get_args

    args = get_args()
    chunks = model if isinstance(model, list) else [model]
    options = options_from_arguments()
    topology = Topology.detect(options.supernode_size)
    parts, groups = _parts(chunks, options, topology)
    precision = _precision(chunks, options)
    used = [
        operands(part, precision, micro_batches=get_num_microbatches(), reshard=bool(options.reshard_after_forward))
        for part in parts
    ]
    stock_reduced = _stock_operands(chunks)
    wires = _wires(chunks, list(zip(parts, used)), groups, stock_reduced)
    found = {
        "stock": asdict(_stock_memory(chunks, optimizer)),
        "ours": asdict(memory(parts, precision)),
        "stock_bytes": asdict(_stock_traffic(stock_reduced, topology)),
        "our_bytes": asdict(_sum(traffic(part, use, _crosses(topology)) for part, use in zip(parts, used))),
        "step": sorted(seconds)[len(seconds) // 2],
        **wires,
    }
    of_all: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, found)
    if dist.get_rank() == 0:
        for line in lines(of_all, overlaps=bool(args.overlap_grad_reduce), layout=_layout(parts, topology)):
            reporting.say(line)


def lines(of_all: Sequence[dict[str, Any]], *, overlaps: bool, layout: str) -> list[str]:
    """The report: memory of the rank that needs the most, mean bytes, and the slowest rank's times."""
    stock = max((Memory(**rank["stock"]) for rank in of_all), key=lambda each: each.total)
    ours = max((Memory(**rank["ours"]) for rank in of_all), key=lambda each: each.total)
    step, stock_wire, our_wire = (max(rank[name] for rank in of_all) for name in ("step", "stock_wire", "our_wire"))
    best, worst = predicted(step, stock_wire, our_wire, stock_overlaps=overlaps)
    now = (
        f"a step takes {step * 1e3:.1f} ms; gradients and weights take {stock_wire * 1e3:.1f} ms by the measured links"
    )
    then = (
        f"with HyperFSDP {our_wire * 1e3:.1f} ms, hence a step between {best * 1e3:.1f} ms, with all of it behind "
        f"computation, and {worst * 1e3:.1f} ms, with none"
    )
    found = [
        f"{layout}. The stock back end trains; nothing of it is changed.",
        f"memory per rank without activations, stock: {_memory(stock)}",
        f"memory per rank without activations, HyperFSDP: {_memory(ours)}",
        f"bytes that a rank sends per step, stock: {_bytes(of_all, 'stock_bytes')}",
        f"bytes that a rank sends per step, HyperFSDP: {_bytes(of_all, 'our_bytes')}",
        f"{now}; {then}.",
        "to switch over, remove --hyperfsdp-migrate observe and resume from the last checkpoint.",
    ]
    return [f"observe: {line}" for line in found]


# ------------------------------------------------------------------------------------------------ what stock does


def _stock_memory(chunks: Sequence[Any], optimizer: Any) -> Memory:
    weights = sum(parameter.numel() * parameter.element_size() for chunk in chunks for parameter in chunk.parameters())
    gradients = sum(buffer.grad_data.numel() * buffer.grad_data.element_size() for buffer in _buffers(chunks))
    return Memory(weights, gradients, sum(tensor.numel() * tensor.element_size() for tensor in _states(optimizer)))


def _buffers(chunks: Sequence[Any]) -> list[Any]:
    return [buffer for chunk in chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]


def _states(optimizer: Any) -> Iterator[torch.Tensor]:
    """Every tensor with elements of weights that an optimizer holds beside them: moments, and fp32 copies."""
    seen: set[int] = set()
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = getattr(part, "optimizer", None)
        if inner is None:
            continue
        tensors = [value for values in inner.state.values() for value in values.values()]
        for name in ("fp32_from_float16_groups", "shard_fp32_from_float16_groups"):
            tensors += [master for group in getattr(part, name, None) or [] for master in group]
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and tensor.dim() and id(tensor) not in seen:
                seen.add(id(tensor))
                yield tensor


def _stock_operands(chunks: Sequence[Any]) -> list[tuple[dist.ProcessGroup, int]]:
    """Groups and bytes: the same amount as an all-reduce, whether one or a reduce-scatter and a gather of weights."""
    found = []
    instances = getattr(chunks[0], "inter_dist_opt_group", None)
    for buffer in _buffers(chunks):
        gradients = buffer.grad_data.numel() * buffer.grad_data.element_size()
        if buffer.param_data is None:
            found.append((buffer.data_parallel_group, gradients))
        else:
            weights = buffer.param_data.numel() * buffer.param_data.element_size()
            found.append((buffer.data_parallel_group, (gradients + weights) // 2))
            if instances is not None:
                found.append((instances, gradients // buffer.data_parallel_group.size()))
    return found


def _stock_traffic(reduced: Sequence[tuple[dist.ProcessGroup, int]], topology: Topology) -> Bytes:
    return _sum(
        ring(dist.get_process_group_ranks(group), 2 * operand, _crosses(topology)) for group, operand in reduced
    )


# ------------------------------------------------------------------------------------------------ what ours would do


def _parts(chunks: Sequence[Any], options: WrapperOptions, topology: Topology) -> tuple[list[Part], Groups]:
    """Units of this rank by mesh, and the groups of the meshes. Every rank must call: process groups are made."""
    from megatron.core.transformer.transformer_layer import TransformerLayer
    from megatron.core.utils import unwrap_model

    from hp_plugin.megatron.fsdp.meshes import make_meshes

    models = [unwrap_model(chunk) for chunk in chunks]
    device = next((parameter.device for model in models for parameter in model.parameters()), torch.device("cpu"))
    meshes = make_meshes(chunks[0].config, getattr(models[0], "pg_collection", None), options, device)
    dense: list[int] = []
    experts: list[int] = []
    root = 0
    for model in models:
        units = unit_modules(model, lambda module: isinstance(module, TransformerLayer))
        sizes = [_elements(unit, experts=False) for unit in units]
        dense += sizes
        root += _elements(model, experts=False) - sum(sizes)
        if meshes.expert is not None:
            experts += [_elements(unit, experts=True) for unit in expert_modules(model)]
    groups: Groups = {}
    found = [Part(tuple(dense), root, *_ranks(meshes.dense, groups))]
    if meshes.expert is not None:
        found.append(Part(tuple(experts), 0, *_ranks(meshes.expert, groups)))
    return found, groups


def _elements(module: torch.nn.Module, *, experts: bool) -> int:
    return sum(parameter.numel() for parameter in module.parameters() if is_expert(parameter) == experts)


def _ranks(mesh: Any, groups: Groups) -> list[tuple[int, ...]]:
    """Global ranks of the shard group of this rank, and of those that hold the same shard."""
    found = []
    for axis in ("dp_shard", "dp_replicate"):
        group = mesh.get_group(axis)
        ranks = tuple(dist.get_process_group_ranks(group))
        groups[ranks] = group
        found.append(ranks)
    return found


def _precision(chunks: Sequence[Any], options: WrapperOptions) -> Precision:
    dtype = chunks[0].config.params_dtype
    reduce = options.reduce_dtype or (torch.float32 if chunks[0].ddp_config.grad_reduce_in_fp32 else dtype)
    return Precision(compute=dtype.itemsize, reduce=reduce.itemsize)


def _wires(
    chunks: Sequence[Any],
    ours: Sequence[tuple[Part, Operands]],
    groups: Groups,
    stock_reduced: Sequence[tuple[dist.ProcessGroup, int]],
) -> dict[str, float]:
    """Seconds of wire per step by the measured links. Every rank must call, in the same order."""
    device = next((parameter.device for chunk in chunks for parameter in chunk.parameters()), torch.device("cpu"))
    links: dict[tuple[int, ...], Any] = {}

    def seconds(group: dist.ProcessGroup, operand: float) -> float:
        ranks = tuple(dist.get_process_group_ranks(group))
        if len(ranks) < 2:
            return 0.0
        if ranks not in links:
            links[ranks] = measure_link(group, device)
        link = links[ranks]
        return 0.0 if link is None or not operand else link.latency + operand / link.bandwidth

    stock = sum(seconds(group, size) for group, size in stock_reduced)
    wire = 0.0
    for part, use in ours:
        # A gather or a reduce-scatter moves half of what an all-reduce of the same operand moves.
        wire += seconds(groups[part.shard_ranks], (use.gathered + use.scattered) / 2)
        wire += seconds(groups[part.replica_ranks], use.reduced)
    return {"stock_wire": stock, "our_wire": wire}


def _crosses(topology: Topology) -> Callable[[int, int], bool]:
    return lambda one, other: not topology.is_within_supernode((one, other))


def _sum(parts: Iterator[Bytes]) -> Bytes:
    return sum(parts, Bytes())


# ------------------------------------------------------------------------------------------------ words


def _layout(parts: Sequence[Part], topology: Topology) -> str:
    dense = parts[0]
    return (
        f"{topology.num_supernodes} supernodes; HyperFSDP would shard over {len(dense.shard_ranks)} ranks with "
        f"{len(dense.replica_ranks)} replicas"
    )


def _memory(found: Memory) -> str:
    parts = {"weights": found.weights, "gradients": found.gradients, "optimizer": found.states}
    if found.passing:
        parts["while layers compute"] = found.passing
    return f"{_size(found.total)} ({', '.join(f'{name} {_size(size)}' for name, size in parts.items())})"


def _bytes(of_all: Sequence[dict[str, Any]], name: str) -> str:
    intra, inter = (sum(rank[name][tier] for rank in of_all) / len(of_all) for tier in ("intra", "inter"))
    return f"{_size(intra)} inside supernodes, {_size(inter)} between them"


def _size(number: float) -> str:
    for limit, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if number >= limit:
            return f"{number / limit:.2f} {unit}"
    return f"{number:.0f} B"


def _enough() -> int:
    """How many steps are watched: a short job has fewer."""
    from megatron.training import get_args

    args = get_args()
    return max(1, min(_WARM_UP + _TIMED, (args.train_iters or _WARM_UP + _TIMED) - (args.iteration or 0)))


def _synchronize() -> None:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        torch.accelerator.synchronize()
