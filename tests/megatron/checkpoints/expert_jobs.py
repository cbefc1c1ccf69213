"""Rank functions: state dicts of a small expert-parallel model and its optimizer, written and read without a job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.megatron.optimized import optimizer_config, take_steps, wrapped_in_ddp
from tests.megatron.wrapped import model, start, wrap

EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_token_dispatcher_type": "alltoall"}


def made(kind: str, expert_parallel: int, *, seed: int, supernode_size: int) -> tuple[Any, Any]:
    """A chunk and its optimizer, "ours" or "stock"."""
    from megatron.core.optimizer import get_megatron_optimizer

    from hp_plugin.megatron.fsdp.optimizer import build_optimizer

    module = model(seed=seed, gated_linear_unit=True, expert_model_parallel_size=expert_parallel, **EXPERTS)
    if kind == "stock":
        chunk = wrapped_in_ddp(module)
        return chunk, get_megatron_optimizer(optimizer_config(), [chunk])
    chunk = wrap(module, supernode_size=supernode_size)
    return chunk, build_optimizer(get_megatron_optimizer, optimizer_config(), [chunk])


def described(chunk: Any, optimizer: Any, *, is_loading: bool) -> dict[str, Any]:
    """The state dict of a checkpoint, as Megatron's training loop makes it."""
    from megatron.core import parallel_state
    from megatron.core.utils import unwrap_model

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    metadata = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True, "dp_cp_group": group}
    state = {"model": unwrap_model([chunk])[0].sharded_state_dict(metadata=dict(metadata))}
    state["optimizer"] = optimizer.sharded_state_dict(state, is_loading, metadata=dict(metadata))
    return state


def round_trip(
    *, directory: str, saver: tuple[str, int], loaders: list[tuple[str, int]], supernode_size: int
) -> dict[str, Any]:
    """Saves after two steps, reads into fresh models, and goes on for two steps.

    Args:
        directory: An empty one.
        saver: Kind and number of expert-parallel ranks.
        loaders: The same.
        supernode_size: Of ours.

    Returns:
        Norms of the next steps of the saver under "saved", and of each loader under its description.
    """
    from megatron.core import dist_checkpointing, parallel_state

    start(expert_parallel=saver[1])
    chunk, optimizer = made(*saver, seed=7, supernode_size=supernode_size)
    take_steps(chunk, optimizer, steps=2)
    Path(directory).mkdir(exist_ok=True)
    dist_checkpointing.save(described(chunk, optimizer, is_loading=False), directory)
    norms = {"saved": [norm for _, norm, _ in take_steps(chunk, optimizer, steps=2)]}
    for kind, expert_parallel in loaders:
        parallel_state.destroy_model_parallel()
        start(expert_parallel=expert_parallel, again=True)
        chunk, optimizer = made(kind, expert_parallel, seed=50, supernode_size=supernode_size)
        loaded = dist_checkpointing.load(described(chunk, optimizer, is_loading=True), directory)
        chunk.module.load_state_dict(loaded["model"]) if kind == "stock" else chunk.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
        norms[f"{kind} {expert_parallel}"] = [norm for _, norm, _ in take_steps(chunk, optimizer, steps=2)]
    return norms
