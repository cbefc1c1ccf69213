"""How known models store fused weights, as split descriptors.

Sizes are those of the whole (global) weight, not of one rank's shard. What is said of
Megatron-LM is as of its commit d98e8a6.
"""

from __future__ import annotations

from hp_plugin.core.muon.splits import Interleaved, Nested, RowSplit, nested, positive
from hp_plugin.errors import ConfigurationError


def qkv(num_heads: int, num_kv_heads: int, head_dim: int) -> RowSplit:
    """Fused QKV with all queries first, then all keys, then all values, as Hugging Face models store it."""
    return RowSplit(("q", "k", "v"), (num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim))


def qkv_interleaved(num_query_groups: int, heads_per_group: int, head_dim: int, *, gated: bool = False) -> Interleaved:
    """Fused QKV by query group, as Megatron's `linear_qkv` and GPT-NeoX's `query_key_value` store it.

    Args:
        num_query_groups: Key-value heads of the whole model, not of a tensor-parallel rank.
        heads_per_group: Query heads per group; 1 without grouped-query attention.
        head_dim: Rows per head.
        gated: A gate as large as the queries follows them (Megatron's `attention_output_gate`).

    Within a group: the queries, the gate if any, one key head, one value head. Source: Megatron-LM,
    `SelfAttention.get_query_key_value_tensors`.
    """
    queries = positive("heads_per_group", heads_per_group) * positive("head_dim", head_dim)
    if gated:
        return Interleaved(num_query_groups, ("q", "gate", "k", "v"), (queries, queries, head_dim, head_dim))
    return Interleaved(num_query_groups, ("q", "k", "v"), (queries, head_dim, head_dim))


def gate_up() -> RowSplit:
    """Fused gate and up projection: the first half of the rows is the gate."""
    return RowSplit(("gate", "up"))


def mla_q_up(num_heads: int, nope_dim: int, rope_dim: int) -> Interleaved:
    """Latent attention's queries (`linear_q_up_proj`, `linear_q_proj`, `q_b_proj`): per head nope, then rope."""
    return Interleaved(num_heads, ("q_nope", "q_rope"), (nope_dim, rope_dim))


def mla_kv_up(num_heads: int, nope_dim: int, v_dim: int) -> Interleaved:
    """Latent attention's projection of the latent (`linear_kv_up_proj`, `kv_b_proj`): per head key, then value."""
    return Interleaved(num_heads, ("k_nope", "v"), (nope_dim, v_dim))


def mla_kv_down(kv_lora_rank: int, rope_dim: int) -> RowSplit:
    """Latent attention's `linear_kv_down_proj` or `kv_a_proj_with_mqa`: the latent, then the rope key of all heads."""
    return RowSplit(("kv", "k_rope"), (kv_lora_rank, rope_dim))


def mla_qkv_down(q_lora_rank: int, kv_lora_rank: int, rope_dim: int, *, tensor_parallel: int = 1) -> Nested:
    """Megatron's fused down projection (`linear_qkv_down_proj`) of queries and of keys and values.

    Args:
        q_lora_rank: Rows of the query's latent.
        kv_lora_rank: Rows of the latent of keys and values.
        rope_dim: Rows of the rope key that all heads share.
        tensor_parallel: Ranks over which the rows are divided. Each holds its part of the query rows, then its part of
            the others (`FusedMLASelfAttention._qkv_down_projection`), so the whole weight is interleaved by rank.
    """
    for what, size in (("q_lora_rank", q_lora_rank), ("kv_lora_rank + rope_dim", kv_lora_rank + rope_dim)):
        if size % positive("tensor_parallel", tensor_parallel):
            raise ConfigurationError(f"{what} = {size} rows cannot be divided over {tensor_parallel} ranks.")
    sizes = (q_lora_rank // tensor_parallel, (kv_lora_rank + rope_dim) // tensor_parallel)
    return nested(
        Interleaved(tensor_parallel, ("q", "kv"), sizes), kv=RowSplit(("latent", "k_rope"), (kv_lora_rank, rope_dim))
    )
