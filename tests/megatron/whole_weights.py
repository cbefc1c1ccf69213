"""The weights of a job as those of one process: under the names that the whole model has, put together over all ranks.

Made from the modules and from the marks that Megatron puts on parameters, without its checkpoint code or ours, so that
two runs can be compared whatever their parallel layouts are.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

TIED, EMBEDDING = "output_layer.weight", "embedding.word_embeddings.weight"
_LAYER = re.compile(r"(.*\blayers\.)(\d+)$")
_EXPERT = re.compile(r"(.*\blocal_experts\.)(\d+)\.(.*)")


def whole_weights(chunks: Sequence[Any]) -> dict[str, Any]:
    """The weights of which this rank holds a part, whole. Every rank must call.

    Args:
        chunks: Model chunks of this rank, wrapped or not, in HyperFSDP or in stock's DDP.

    Returns:
        By name in the whole model: layers and experts have the numbers that they have there, and the copy of a tied
        embedding on the last pipeline stage has the embedding's.
    """
    from torch.distributed.tensor import DTensor

    found = {}
    for chunk in map(_model, chunks):
        layers = _renamed_layers(chunk)
        for name, parameter in chunk.named_parameters():
            tensor = parameter.detach()
            tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            gated = name.endswith("linear_fc1.weight") and chunk.config.gated_linear_unit
            tensor = _over_tensor_parallel_ranks(
                tensor, parameter, pieces=2 if gated else 1, of_expert="experts." in name
            )
            found[_whole_name(name, layers, chunk)] = tensor.clone()
    return found


def merged(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The weights of all ranks; those that several have must be equal, bit for bit."""
    import torch

    whole: dict[str, Any] = {}
    for rank, weights in enumerate(ranks):
        for name, tensor in weights.items():
            assert torch.equal(whole.setdefault(name, tensor), tensor), f"rank {rank} has another copy of {name}"
    return whole


def _model(chunk: Any) -> Any:
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def _renamed_layers(chunk: Any) -> dict[str, str]:
    """Prefixes of the layers of a pipeline stage -> those of the whole model."""
    found = {}
    for name, module in chunk.named_modules():
        match = _LAYER.match(name)
        if match and hasattr(module, "layer_number"):
            found[f"{name}."] = f"{match[1]}{module.layer_number - 1}."
    return found


def _whole_name(name: str, layers: dict[str, str], chunk: Any) -> str:
    from megatron.core import parallel_state

    for local, whole in layers.items():
        if name.startswith(local):
            name = whole + name.removeprefix(local)
            break
    match = _EXPERT.match(name)
    if match:
        size, rank = (
            parallel_state.get_expert_model_parallel_world_size(),
            parallel_state.get_expert_model_parallel_rank(),
        )
        name = f"{match[1]}{int(match[2]) + rank * (chunk.config.num_moe_experts // size)}.{match[3]}"
    return EMBEDDING if name == TIED and chunk.share_embeddings_and_output_weights else name


def _over_tensor_parallel_ranks(tensor: Any, parameter: Any, *, pieces: int, of_expert: bool) -> Any:
    """`tensor` of all tensor-parallel ranks, each of which has one part of each piece."""
    import torch
    from megatron.core import parallel_state
    from torch import distributed as dist

    ranks = parallel_state.get_expert_tensor_parallel_group() if of_expert else None
    ranks = parallel_state.get_tensor_model_parallel_group() if ranks is None else ranks
    if ranks.size() == 1 or not getattr(parameter, "tensor_model_parallel", False):
        return tensor
    parts = [torch.empty_like(tensor) for _ in range(ranks.size())]
    dist.all_gather(parts, tensor.contiguous(), group=ranks)
    dim = parameter.partition_dim
    cut = [part.chunk(pieces, dim) for part in parts]
    return torch.cat([part[piece] for piece in range(pieces) for part in cut], dim)
