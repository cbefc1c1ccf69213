"""Fused weights of known models: golden index maps, and the operations with which the models take them apart."""

from __future__ import annotations

import pytest
import torch

from hp_plugin.core.muon.blocks import Split
from hp_plugin.core.muon.fused import (
    gate_up,
    mla_kv_down,
    mla_kv_up,
    mla_q_up,
    mla_qkv_down,
    qkv,
    qkv_interleaved,
)
from hp_plugin.core.muon.splits import blocks_of
from hp_plugin.errors import ConfigurationError


def rows_of(split: Split, rows: int) -> dict[str, list[int]]:
    """By block: the rows that it takes."""
    _, blocks = blocks_of("w", (rows, 2), split)
    return {b.name: [row for start, length in b.rows for row in range(start, start + length)] for b in blocks}


@pytest.mark.parametrize(
    ("split", "rows", "expected"),
    [
        (qkv(2, 1, 2), 8, {"q": [0, 1, 2, 3], "k": [4, 5], "v": [6, 7]}),
        (
            qkv_interleaved(2, 2, 1),
            8,
            {"q": [0, 1, 4, 5], "k": [2, 6], "v": [3, 7]},
        ),
        (
            qkv_interleaved(2, 2, 1, gated=True),
            12,
            {"q": [0, 1, 6, 7], "gate": [2, 3, 8, 9], "k": [4, 10], "v": [5, 11]},
        ),
        (qkv_interleaved(3, 1, 1), 9, {"q": [0, 3, 6], "k": [1, 4, 7], "v": [2, 5, 8]}),
        (gate_up(), 4, {"gate": [0, 1], "up": [2, 3]}),
        (mla_q_up(2, 2, 1), 6, {"q_nope": [0, 1, 3, 4], "q_rope": [2, 5]}),
        (mla_kv_up(2, 1, 2), 6, {"k_nope": [0, 3], "v": [1, 2, 4, 5]}),
        (mla_kv_down(4, 2), 6, {"kv": [0, 1, 2, 3], "k_rope": [4, 5]}),
        (mla_qkv_down(2, 4, 2), 8, {"q": [0, 1], "kv.latent": [2, 3, 4, 5], "kv.k_rope": [6, 7]}),
        # Rank 0 holds q row 0 and rows 0 to 2 of the rest, rank 1 q row 1 and rows 3 to 5: latent 3, then rope.
        (
            mla_qkv_down(2, 4, 2, tensor_parallel=2),
            8,
            {"q": [0, 4], "kv.latent": [1, 2, 3, 5], "kv.k_rope": [6, 7]},
        ),
    ],
)
def test_index_maps(split: Split, rows: int, expected: dict[str, list[int]]) -> None:
    """Golden maps, gated attention's among them (NVIDIA/Megatron-LM#4731)."""
    assert rows_of(split, rows) == expected


@pytest.mark.parametrize("gated", [False, True])
def test_megatron_takes_the_same_rows_apart(gated: bool) -> None:
    """The operations of `SelfAttention.get_query_key_value_tensors`, on the numbers of the rows."""
    groups, heads_per_group, head_dim = 3, 4, 5
    per_group = ((2 if gated else 1) * heads_per_group + 2) * head_dim
    mixed = torch.arange(groups * per_group).view(groups, per_group)
    queries = heads_per_group * head_dim
    sizes = [queries, queries, head_dim, head_dim] if gated else [queries, head_dim, head_dim]
    names = ["q", "gate", "k", "v"] if gated else ["q", "k", "v"]
    expected = {n: part.flatten().tolist() for n, part in zip(names, mixed.split(sizes, dim=1), strict=True)}
    assert rows_of(qkv_interleaved(groups, heads_per_group, head_dim, gated=gated), groups * per_group) == expected


def test_latent_attention_takes_the_same_rows_apart() -> None:
    """The operations of Megatron's `MLASelfAttention`: a head's rows are nope then rope, and key then value."""
    heads, nope, rope, value = 3, 4, 2, 5
    q = torch.arange(heads * (nope + rope)).view(heads, nope + rope)
    kv = torch.arange(heads * (nope + value)).view(heads, nope + value)
    q_nope, q_rope = q.split([nope, rope], dim=-1)
    k_nope, v = kv.split([nope, value], dim=-1)
    assert rows_of(mla_q_up(heads, nope, rope), q.numel()) == {
        "q_nope": q_nope.flatten().tolist(),
        "q_rope": q_rope.flatten().tolist(),
    }
    assert rows_of(mla_kv_up(heads, nope, value), kv.numel()) == {
        "k_nope": k_nope.flatten().tolist(),
        "v": v.flatten().tolist(),
    }


@pytest.mark.parametrize("tensor_parallel", [1, 2, 4])
def test_the_fused_down_projection_is_interleaved_by_rank(tensor_parallel: int) -> None:
    """Each rank stores its slice of the query rows, then its slice of latent and rope key together."""
    q_rank, kv_rank, rope = 8, 12, 4
    q, rest = torch.arange(q_rank), q_rank + torch.arange(kv_rank + rope)
    stored = torch.cat([torch.cat(parts) for parts in zip(q.chunk(tensor_parallel), rest.chunk(tensor_parallel))])
    found = rows_of(mla_qkv_down(q_rank, kv_rank, rope, tensor_parallel=tensor_parallel), stored.numel())
    assert torch.equal(stored[found["q"]], q)
    assert torch.equal(stored[found["kv.latent"]], rest[:kv_rank])
    assert torch.equal(stored[found["kv.k_rope"]], rest[kv_rank:])


def test_a_gate_that_is_not_declared_is_refused() -> None:
    """NVIDIA/Megatron-LM#4731: [2048, 256, 256] on 4608 rows; with the gate the sizes add up."""
    with pytest.raises(ConfigurationError, match="= 2560 rows, but the matrix has 4608"):
        rows_of(qkv_interleaved(1, 8, 256), 4608)
    assert len(rows_of(qkv_interleaved(1, 8, 256, gated=True), 4608)["gate"]) == 2048


def test_rows_that_ranks_cannot_share_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="q_lora_rank = 6 rows cannot be divided over 4 ranks"):
        mla_qkv_down(6, 4, 4, tensor_parallel=4)
