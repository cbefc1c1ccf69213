"""QK-clip gives the weights that Megatron-LM's own does."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hp_plugin.core.muon.fused import mla_kv_up, mla_q_up, qkv_interleaved
from hp_plugin.core.muon.qk_clip import ClipTarget, QKClip

HEADS, GROUPS, DIM, WIDTH = 4, 2, 3, 5
THRESHOLD = 10.0
MAXIMA = torch.tensor([40.0, 20.0, 3.0, 12.0])


@pytest.mark.parametrize("alpha", [0.5, 0.3])
def test_grouped_queries_are_clipped_as_by_megatron(alpha: float) -> None:
    """`SelfAttention._clip_linear_qkv`: the larger logit of a group decides for its key and all its queries."""
    from megatron.core.transformer.attention import SelfAttention

    stand_in = SimpleNamespace(
        config=SimpleNamespace(qk_clip_alpha=alpha),
        num_query_groups_per_partition=GROUPS,
        query_projection_size=HEADS * DIM,
        kv_projection_size=GROUPS * DIM,
        qk_clip_balancing_eta=(THRESHOLD / MAXIMA.view(GROUPS, -1).amax(1)).clamp(max=1.0).view(-1, 1, 1),
    )
    weight = torch.randn((HEADS + 2 * GROUPS) * DIM, WIDTH)
    expected = SelfAttention._clip_linear_qkv(stand_in, weight.clone())
    clip = QKClip(THRESHOLD, alpha)
    clip.observe("attn", MAXIMA)
    clip.apply_([ClipTarget("attn", weight, qkv_interleaved(GROUPS, HEADS // GROUPS, DIM), HEADS, GROUPS)])
    torch.testing.assert_close(weight, expected)


@pytest.mark.parametrize("alpha", [0.5, 0.3])
def test_latent_attention_is_clipped_as_by_megatron(alpha: float) -> None:
    """`MLASelfAttention._clip_q_proj_weight` and `_clip_kv_proj_weight`."""
    from megatron.core.transformer.multi_latent_attention import MLASelfAttention

    stand_in = SimpleNamespace(
        config=SimpleNamespace(qk_clip_alpha=alpha, qk_head_dim=3, qk_pos_emb_head_dim=2, v_head_dim=4),
        num_attention_heads_per_partition=HEADS,
        qk_clip_balancing_eta=(THRESHOLD / MAXIMA).clamp(max=1.0).view(-1, 1, 1),
    )
    q, kv = torch.randn(HEADS * 5, WIDTH), torch.randn(HEADS * 7, WIDTH)
    expected = (
        MLASelfAttention._clip_q_proj_weight(stand_in, q.clone()),
        MLASelfAttention._clip_kv_proj_weight(stand_in, kv.clone()),
    )
    clip = QKClip(THRESHOLD, alpha)
    clip.observe("attn", MAXIMA)
    clip.apply_(
        [ClipTarget("attn", q, mla_q_up(HEADS, 3, 2), HEADS), ClipTarget("attn", kv, mla_kv_up(HEADS, 3, 4), HEADS)]
    )
    torch.testing.assert_close((q, kv), expected)
