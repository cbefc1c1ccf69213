"""QK-clip against logits computed from the weights; tests/megatron compares it with Megatron's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.profiler import profile

from hp_plugin.core.layout import Layout
from hp_plugin.core.muon.fused import mla_kv_up, mla_q_up, qkv, qkv_interleaved
from hp_plugin.core.muon.qk_clip import ClipTarget, QKClip
from hp_plugin.core.muon.splits import GroupedRows, RowSplit, blocks_of
from hp_plugin.errors import ConfigurationError, UnsupportedError
from tests.support import init_gloo, run_ranks

HEADS, GROUPS, DIM, WIDTH = 4, 2, 3, 5
THRESHOLD = 10.0
MAXIMA = torch.tensor([40.0, 20.0, 3.0, 12.0])  # of query heads


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def block_rows(weight: torch.Tensor, split: Any, name: str, heads: int) -> torch.Tensor:
    """(heads, rows per head, cols) of one block, gathered by its index map."""
    (block,) = [b for b in blocks_of("w", weight.shape, split)[1] if b.name == name]
    rows = torch.cat([torch.arange(start, start + length) for start, length in block.rows])
    return weight[rows].view(heads, -1, weight.shape[1])


def logits(q: torch.Tensor, k: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """(heads, tokens, tokens) from per-head weights; k may have fewer heads."""
    k = k.repeat_interleave(q.shape[0] // k.shape[0], dim=0)
    return (x @ q.mT) @ (x @ k.mT).mT


def largest(values: torch.Tensor) -> torch.Tensor:
    return values.amax(dim=(1, 2))


def test_logits_of_heads_above_the_threshold_are_brought_down_to_it() -> None:
    """Kimi K2 (arXiv 2507.20534): after the clip the same batch has at most tau, other heads are unchanged."""
    split, x = qkv(HEADS, HEADS, DIM), random(7, WIDTH, seed=1)
    weight = (
        random(3 * HEADS * DIM, WIDTH) * torch.tensor([1.0, 3.0, 0.1, 2.0]).repeat_interleave(DIM).repeat(3)[:, None]
    )
    before = weight.clone()
    maxima = largest(logits(*(block_rows(weight, split, n, HEADS) for n in "qk"), x))
    clip = QKClip(THRESHOLD)
    clip.observe("attn", maxima)
    result = clip.apply_([ClipTarget("attn", weight, split, HEADS)])
    after = largest(logits(*(block_rows(weight, split, n, HEADS) for n in "qk"), x))
    assert 0 < result.num_clipped < HEADS
    torch.testing.assert_close(after, maxima.clamp(max=THRESHOLD))
    for head in range(HEADS):
        unchanged = torch.equal(*(block_rows(w, split, "q", HEADS)[head] for w in (weight, before)))
        assert unchanged == bool(maxima[head] <= THRESHOLD)
    assert torch.equal(*(block_rows(w, split, "v", HEADS) for w in (weight, before)))


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.25, 1.0])
def test_alpha_shares_the_factor_between_queries_and_keys(alpha: float) -> None:
    q, k = torch.ones(HEADS * DIM, WIDTH), torch.ones(HEADS * DIM, WIDTH)
    clip = QKClip(THRESHOLD, alpha)
    clip.observe("attn", torch.tensor([5.0, 20.0, 40.0, 10.0]))
    clip.apply_([ClipTarget("attn", q, RowSplit(("q",)), HEADS), ClipTarget("attn", k, RowSplit(("k",)), HEADS)])
    gamma = torch.tensor([1.0, 0.5, 0.25, 1.0])
    torch.testing.assert_close(q[::DIM, 0], gamma**alpha)
    torch.testing.assert_close(k[::DIM, 0], gamma ** (1 - alpha))


def test_the_rope_part_of_latent_attention_is_scaled_in_full_by_the_query() -> None:
    """Kimi K2: q_nope and k_nope by the root of gamma, q_rope by gamma, the shared rope key not at all."""
    heads, nope, rope, x = 2, 3, 2, random(7, WIDTH, seed=1)
    q, kv, k_rope = random(heads * (nope + rope), WIDTH), random(heads * (nope + 4), WIDTH, seed=2), random(rope, WIDTH)
    splits = mla_q_up(heads, nope, rope), mla_kv_up(heads, nope, 4)

    def maxima() -> torch.Tensor:
        names = [(q, splits[0], "q_nope"), (kv, splits[1], "k_nope"), (q, splits[0], "q_rope")]
        q_nope, k_nope, q_rope = (block_rows(*entry, heads) for entry in names)
        return largest(logits(q_nope, k_nope, x) + logits(q_rope, k_rope[None], x))

    before, values = maxima(), block_rows(kv, splits[1], "v", heads).clone()
    tau = float(before.max()) / 4
    clip = QKClip(tau)
    clip.observe("attn", before)
    clip.apply_([ClipTarget("attn", q, splits[0], heads), ClipTarget("attn", kv, splits[1], heads)])
    torch.testing.assert_close(maxima(), before.clamp(max=tau))
    assert torch.equal(block_rows(kv, splits[1], "v", heads), values)


@pytest.mark.parametrize("shared_keys", ["group_max", "queries_only"])
def test_shared_keys(shared_keys: Any) -> None:
    weight, split = torch.ones((HEADS + 2 * GROUPS) * DIM, WIDTH), qkv_interleaved(GROUPS, HEADS // GROUPS, DIM)
    clip = QKClip(THRESHOLD, shared_keys=shared_keys)
    clip.observe("attn", torch.tensor([40.0, 20.0, 10.0, 1.0]))
    result = clip.apply_([ClipTarget("attn", weight, split, HEADS, GROUPS)])
    q, k, v = (block_rows(weight, split, n, h)[:, 0, 0] for n, h in [("q", HEADS), ("k", GROUPS), ("v", GROUPS)])
    if shared_keys == "group_max":  # the first group is scaled by its larger logit
        torch.testing.assert_close(q, torch.tensor([0.5, 0.5, 1.0, 1.0]))
        torch.testing.assert_close(k, torch.tensor([0.5, 1.0]))
        torch.testing.assert_close(result.gamma["attn"], torch.tensor([0.25, 0.25, 1.0, 1.0]))
    else:
        torch.testing.assert_close(q, torch.tensor([0.25, 0.5, 1.0, 1.0]))
        torch.testing.assert_close(k, torch.ones(2))
    torch.testing.assert_close(v, torch.ones(2))


@pytest.mark.parametrize(
    ("sizes", "placements"),
    [
        ((3,), (Shard(0),)),  # uneven, through heads
        ((4,), (Shard(1),)),
        ((2, 2), (_StridedShard(0, split_factor=2), Shard(0))),
        ((2, 3), (Replicate(), Shard(0))),
        ((40,), (Shard(0),)),  # empty shards
    ],
)
def test_every_rank_scales_its_own_rows(sizes: tuple[int, ...], placements: tuple[Placement, ...]) -> None:
    weight, split = random((HEADS + 2 * GROUPS) * DIM, WIDTH), qkv_interleaved(GROUPS, HEADS // GROUPS, DIM)

    def clipped(target: Any) -> None:
        clip = QKClip(THRESHOLD)
        clip.observe("attn", MAXIMA)
        clip.apply_([ClipTarget("attn", target, split, HEADS, GROUPS)])

    whole = weight.clone()
    clipped(whole)
    layout = Layout(tuple(weight.shape), tuple("ab"[: len(sizes)]), sizes, placements)
    for coordinate in layout.coordinates():
        index = [
            torch.cat([torch.arange(0), *(torch.arange(s.start, s.start + s.length) for s in segments)])
            for segments in (layout.local_segments(coordinate, dim) for dim in (0, 1))
        ]
        local = weight[index[0]][:, index[1]]
        clipped((local, layout, coordinate))
        assert torch.equal(local, whole[index[0]][:, index[1]])


def test_biases_are_scaled_like_the_rows_that_they_belong_to() -> None:
    bias, split = torch.ones(3 * HEADS * DIM), qkv(HEADS, HEADS, DIM)
    clip = QKClip(THRESHOLD)
    clip.observe("attn", torch.tensor([40.0, 1.0, 1.0, 1.0]))
    clip.apply_([ClipTarget("attn", bias, split, HEADS)])
    expected = torch.ones(3, HEADS, DIM)
    expected[:2, 0] = 0.5
    torch.testing.assert_close(bias, expected.flatten())


def test_the_maximum_over_micro_batches_counts_and_is_forgotten_after_the_step() -> None:
    weight = torch.ones(HEADS * DIM, WIDTH)
    target = ClipTarget("attn", weight, RowSplit(("q",)), HEADS)
    clip = QKClip(THRESHOLD, alpha=1.0)
    for batch in ([20.0, 1.0, float("nan"), 1.0], [5.0, 1.0, 40.0, 1.0]):
        clip.observe("attn", torch.tensor(batch, dtype=torch.bfloat16))
    result = clip.apply_([target])
    assert result.max_logits["attn"].tolist() == [20.0, 1.0, 40.0, 1.0]
    expected = torch.tensor([0.5, 1.0, 0.25, 1.0])
    torch.testing.assert_close(weight[::DIM, 0], expected)
    assert clip.apply_([target]).num_clipped == 0
    torch.testing.assert_close(weight[::DIM, 0], expected)
    clip.observe("attn", torch.full((HEADS,), 99.0))
    clip.reset()
    assert clip.apply_([target]).max_logits["attn"].tolist() == [-float("inf")] * HEADS


def test_broken_logits_leave_the_weights_alone() -> None:
    weight = torch.ones(HEADS * DIM, WIDTH)
    clip = QKClip(THRESHOLD)
    clip.observe("attn", torch.tensor([float("inf"), float("nan"), -50.0, 0.0]))
    assert clip.apply_([ClipTarget("attn", weight, RowSplit(("q",)), HEADS)]).num_clipped == 0
    assert torch.equal(weight, torch.ones_like(weight))


def _reduce_over_ranks() -> tuple[list[float], int]:
    """Ranks 0 and 1 share the data, each with half of the heads; rank 2 saw nothing."""
    init_gloo()
    rank = dist.get_rank()
    clip = QKClip(THRESHOLD, alpha=1.0)
    if rank < 2:
        clip.observe("attn", torch.tensor([20.0, 40.0]) * (rank + 1), first_head=2 * rank, num_heads=HEADS)
    targets = [ClipTarget(name, torch.ones(HEADS * DIM, WIDTH), RowSplit(("q",)), HEADS) for name in ("attn", "other")]
    with profile() as seen:
        clip.apply_(targets, group=dist.group.WORLD)
    calls = sum(event.count for event in seen.key_averages() if event.key == "c10d::allreduce_")
    dist.destroy_process_group()
    return [float(value) for target in targets for value in target.local[::DIM, 0]], calls


def test_one_all_reduce_finds_the_maxima_of_all_ranks() -> None:
    expected = [0.5, 0.25, 0.25, 0.125] + [1.0] * HEADS
    assert run_ranks(3, _reduce_over_ranks) == [(expected, 1)] * 3


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: QKClip(0.0), ConfigurationError, "must be positive"),
        (lambda: QKClip(float("nan")), ConfigurationError, "must be positive"),
        (lambda: QKClip(1.0, 1.5), ConfigurationError, "from 0 to 1"),
        (lambda: QKClip(1.0, shared_keys="max"), ConfigurationError, "shared_keys is 'max'"),  # type: ignore[arg-type]
        (lambda: QKClip(1.0).observe("a", torch.zeros(2, 2)), ConfigurationError, "one number per head"),
        (lambda: QKClip(1.0).observe("a", torch.zeros(2), first_head=1, num_heads=2), ConfigurationError, "per head"),
        (lambda: ClipTarget("a", torch.ones(4, 2), RowSplit(("q",)), 4, 3), ConfigurationError, "cannot share 3"),
        (lambda: applied(torch.ones(6, 2), RowSplit(("q",)), 4), ConfigurationError, "6 rows, which 4 heads cannot"),
        (lambda: applied(torch.ones(4, 2), GroupedRows(2), 2), ConfigurationError, "no block called q, k"),
        (lambda: applied(torch.ones(4, 2, 2), RowSplit(("q",)), 2), UnsupportedError, "rows of matrices"),
    ],
)
def test_what_cannot_be_right_is_refused(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def applied(weight: torch.Tensor, split: Any, heads: int) -> None:
    QKClip(THRESHOLD).apply_([ClipTarget("attn", weight, split, heads)])


def test_a_weight_is_not_scaled_twice_and_no_logit_is_lost() -> None:
    weight = torch.ones(HEADS * DIM, WIDTH)
    target = ClipTarget("attn", weight, RowSplit(("q",)), HEADS)
    with pytest.raises(ConfigurationError, match="scaled twice"):
        QKClip(THRESHOLD).apply_([target, ClipTarget("attn", weight, RowSplit(("k",)), HEADS)])
    clip = QKClip(THRESHOLD)
    clip.observe("attention", torch.ones(HEADS))
    with pytest.raises(ConfigurationError, match=r"logits of \['attention'\] were observed, but no target"):
        clip.apply_([target])
    clip = QKClip(THRESHOLD)
    clip.observe("attn", torch.ones(HEADS - 1))
    with pytest.raises(ConfigurationError, match="3 heads of attn were observed, but its target has 4"):
        clip.apply_([target])
