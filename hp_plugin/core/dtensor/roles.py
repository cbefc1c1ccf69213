"""What the planner knows of names: which products of a transformer are column- and which are row-parallel."""

from __future__ import annotations

from torch import nn

ATTENTION_COLUMN = frozenset(
    ("q_proj", "k_proj", "v_proj", "wq", "wk", "wv", "q", "k", "v", "query", "key", "value", "to_q", "to_k", "to_v")
)
MLP_COLUMN = frozenset(
    ("gate_proj", "up_proj", "w1", "w3", "fc1", "c_fc", "fc_in", "linear1", "up", "gate", "dense_h_to_4h")
)
FUSED_QKV = frozenset(("c_attn", "qkv", "qkv_proj", "wqkv", "Wqkv", "in_proj", "to_qkv"))
GROUPED_QKV = frozenset(("linear_qkv",))
"""Fused query groups, each with its queries, key and value side by side, as Megatron has them."""
FUSED_GATE_UP = frozenset(("gate_up_proj", "w13"))
FC1 = "linear_fc1"
"""In Megatron: gate and up, or one product, as the model's configuration says."""
ROW = frozenset(
    (
        "o_proj",
        "wo",
        "o",
        "out_proj",
        "c_proj",
        "proj",
        "out",
        "dense",
        "down_proj",
        "w2",
        "fc2",
        "fc_out",
        "linear2",
        "down",
        "dense_4h_to_h",
        "linear_proj",
        "linear_fc2",
    )
)
HEAD = frozenset(("lm_head", "output", "head", "embed_out", "unembed", "unembedding", "output_layer"))
HEAD_NORMS = frozenset(("q_norm", "k_norm", "q_layernorm", "k_layernorm", "query_norm", "key_norm"))
ROUTER = frozenset(("gate", "router"))
EXPERTS = "experts"
HEAD_COUNTS = (
    *("num_heads", "n_heads", "n_head", "num_attention_heads", "n_local_heads"),
    *("num_kv_heads", "n_kv_heads", "n_kv_head", "n_local_kv_heads", "num_key_value_heads"),
)
"""Integers of an attention module that count the heads it holds."""
EXPERT_COUNTS = ("num_experts", "n_experts", "num_local_experts")
"""Integers of a module of experts that count those it holds."""
FUSED_WIDTHS = ("split_size",)
"""Integers of an attention module with one fused product that are the width of q, of k and of v."""


def is_linear(module: nn.Module) -> bool:
    """Whether the module is a product with a weight of shape (out, in): torch's, or Megatron's parallel ones."""
    return isinstance(module, nn.Linear) or type(module).__name__ in ("ColumnParallelLinear", "RowParallelLinear")


def gives_bias_beside(module: nn.Module) -> bool:
    """Whether a product returns its bias instead of adding it, as Megatron's do."""
    return bool(getattr(module, "skip_bias_add", False))


def is_vocabulary_embedding(module: nn.Module) -> bool:
    """Whether the module looks up rows of its weight by ids: torch's embedding, or Megatron's parallel one."""
    return isinstance(module, nn.Embedding) or type(module).__name__ == "VocabParallelEmbedding"


def sequence_dim(model: nn.Module) -> int:
    """The dim of the sequence in activations between layers: 0 in Megatron's models, 1 elsewhere."""
    return 0 if any(type(module).__name__ == "VocabParallelEmbedding" for module in model.modules()) else 1


def is_transposed_linear(module: nn.Module) -> bool:
    """Whether the module is a product with a weight of shape (in, out): the `Conv1D` of transformers' GPT-2."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def is_norm(module: nn.Module) -> bool:
    """Whether the module normalises over the last dim: `LayerNorm`, `RMSNorm` and those named like them."""
    return "Norm" in type(module).__name__


def is_position_embedding(name: str) -> bool:
    """Whether an embedding is indexed by something else than tokens."""
    last = name.rpartition(".")[2].lower()
    return "pos" in last or "type" in last or last == "wpe"
