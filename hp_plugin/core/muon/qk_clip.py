"""QK-clip: keeps attention logits bounded by scaling the query and key weights of the heads that exceed a threshold.

Published as a part of MuonClip (Kimi K2, arXiv 2507.20534). With S the largest logit of a head over the step's batch
(after the softmax scale) and tau the threshold, gamma = min(1, tau / S). After the optimizer's update:

| weight | factor |
|---|---|
| queries "q", and "q_nope" of latent attention | gamma^alpha |
| keys "k", and "k_nope" of latent attention | gamma^(1 - alpha) |
| rope queries "q_rope" of latent attention | gamma |
| rope key "k_rope", which all heads share | 1 |

so that the head's logits are scaled by gamma. Quoted names are blocks of a split (`splits.py`, `fused.py`); a weight
that is one block is described by `RowSplit(("q",))`. Where a norm follows the projection (QK-norm), scaling its weight
changes nothing: use one or the other.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from hp_plugin.core.layout import Layout, local_tensor
from hp_plugin.core.muon.blocks import Block, MatrixView, Split
from hp_plugin.errors import ConfigurationError, UnsupportedError

Weight = torch.Tensor | tuple[torch.Tensor, Layout, Sequence[int]]
"""A whole tensor, a `DTensor`, or a local shard with its layout and this rank's mesh coordinate."""

SharedKeys = Literal["group_max", "queries_only"]

_QUERIES, _KEYS, _ROPE_QUERIES = ("q", "q_nope"), ("k", "k_nope"), ("q_rope",)


@dataclass(frozen=True, eq=False)
class ClipTarget:
    """A weight (or bias) with rows of query or key heads.

    Attributes:
        attention: The name under which maxima are observed. Several targets may share it.
        weight: What is scaled: the fp32 master where there is one. Two dims (rows, inputs) or, for a bias, one.
        split: Which rows are queries and keys: its blocks are named as in the table above; others are left alone. The
            rows of a block belong to its heads in equal consecutive ranges.
        num_heads: Query heads, of the whole weight.
        num_kv_heads: Key heads. None: as many.
    """

    attention: str
    weight: Weight
    split: Split
    num_heads: int
    num_kv_heads: int | None = None

    def __post_init__(self) -> None:
        if self.num_heads < 1 or self.num_heads % self.key_heads:
            raise ConfigurationError(
                f"{self.attention} has {self.num_heads} query heads, which cannot share {self.key_heads} key heads."
            )

    @property
    def key_heads(self) -> int:
        """Key heads."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @functools.cached_property
    def local(self) -> torch.Tensor:
        """The part of the weight that this rank holds; shares its memory."""
        return self.weight[0] if isinstance(self.weight, tuple) else local_tensor(self.weight)

    @functools.cached_property
    def factor_index(self) -> torch.Tensor:
        """For each local row, the index of its factor in `_factors`; int64, on the weight's device."""
        layout, coordinate = _layout(self.weight)
        if len(layout.global_shape) not in (1, 2):
            raise UnsupportedError(
                f"a weight of {self.attention} has the shape {layout.global_shape}; QK-clip scales rows of matrices."
            )
        rows = self._global_index(layout.global_shape[0], (*layout.global_shape, 1)[1])
        segments = () if coordinate is None else layout.local_segments(coordinate, 0)
        local = [index for start, length in segments for index in rows[start : start + length]]
        if len(local) != self.local.shape[0]:
            raise ConfigurationError(
                f"a weight of {self.attention} has {self.local.shape[0]} local rows, but its layout says {len(local)}."
            )
        return torch.tensor(local, dtype=torch.int64, device=self.local.device)

    def _global_index(self, rows: int, cols: int) -> list[int]:
        index = [2 * self.num_heads + self.key_heads] * rows  # the factor 1
        found = False
        for block in self.split(MatrixView("matrix", 1, rows, cols)):
            kinds = {_QUERIES: 0, _KEYS: self.num_heads, _ROPE_QUERIES: self.num_heads + self.key_heads}
            for names, first in kinds.items():
                if block.name in names:
                    found = True
                    heads = self.key_heads if names == _KEYS else self.num_heads
                    self._assign(index, block, first, heads)
        if not found:
            raise ConfigurationError(
                f"the split {self.split} of a weight of {self.attention} has no block called q, k, q_nope, k_nope or "
                'q_rope; for a weight that is all queries use RowSplit(("q",)).'
            )
        return index

    def _assign(self, index: list[int], block: Block, first: int, heads: int) -> None:
        rows = [row for start, length in block.rows for row in range(start, start + length)]
        if len(rows) % heads:
            raise ConfigurationError(
                f"block {block.name!r} of a weight of {self.attention} has {len(rows)} rows, which {heads} heads "
                "cannot share equally."
            )
        for position, row in enumerate(rows):
            index[row] = first + position // (len(rows) // heads)


@dataclass(frozen=True)
class ClipResult:
    """What a call of `QKClip.apply_` saw, as tensors: reading them waits for the device.

    Attributes:
        max_logits: By attention: the largest logit of each query head over all ranks; -inf where none was observed.
        gamma: By attention: what each query head's logits were scaled by.
    """

    max_logits: dict[str, torch.Tensor]
    gamma: dict[str, torch.Tensor]

    @property
    def num_clipped(self) -> int:
        """Number of query heads that were scaled."""
        return sum(int((gamma < 1).sum()) for gamma in self.gamma.values())


class QKClip:
    """Collects the largest logits of a step and clips by them.

    Call `observe` in every micro-batch and `apply_` once after the optimizer's update, or `reset` if the update is
    skipped, as after an overflow.

    Args:
        threshold: tau; Kimi K2 used 100.
        alpha: Share of the queries in the scaling, 0 to 1.
        shared_keys: What is done where several query heads share a key head. "group_max": the group's largest logit
            decides for its key and all its queries, as in Megatron-LM (`SelfAttention.clip_qk`). "queries_only": each
            query head is scaled by its own gamma in full and the shared key is left alone, as the published rule does
            with the rope part of latent attention; no head is scaled for the sake of another.
    """

    def __init__(self, threshold: float, alpha: float = 0.5, *, shared_keys: SharedKeys = "group_max") -> None:
        if not threshold > 0:
            raise ConfigurationError(f"the threshold of QK-clip is {threshold}, but must be positive.")
        if not 0 <= alpha <= 1:
            raise ConfigurationError(f"alpha of QK-clip is {alpha}, but must be from 0 to 1.")
        if shared_keys not in ("group_max", "queries_only"):
            raise ConfigurationError(f"shared_keys is {shared_keys!r}; it must be 'group_max' or 'queries_only'.")
        self.threshold = threshold
        self.alpha = alpha
        self.shared_keys = shared_keys
        self._maxima: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def observe(
        self, attention: str, max_logits: torch.Tensor, *, first_head: int = 0, num_heads: int | None = None
    ) -> None:
        """Takes the largest logits of one micro-batch. Local, without waiting for the device.

        Args:
            attention: Name of the attention module.
            max_logits: (heads,): the largest logit of each head over batch and positions, softmax scale included.
                NaN is taken for "not observed".
            first_head: Of the heads that this rank computes, if it has a slice of them (tensor parallelism).
            num_heads: Heads of the whole weight. None: `max_logits` has them all.
        """
        total = max_logits.numel() if num_heads is None else num_heads
        if max_logits.dim() != 1 or first_head < 0 or first_head + max_logits.numel() > total:
            raise ConfigurationError(
                f"max_logits of {attention} has the shape {tuple(max_logits.shape)} and starts at head {first_head} of "
                f"{total}; give one number per head."
            )
        kept = self._maxima.get(attention)
        if kept is None:
            kept = torch.full((total,), -torch.inf, dtype=torch.float32, device=max_logits.device)
            self._maxima[attention] = kept
        if kept.numel() != total:
            raise ConfigurationError(f"{attention} had {kept.numel()} heads before and now has {total}.")
        part = kept[first_head : first_head + max_logits.numel()]
        torch.fmax(part, max_logits.detach().float(), out=part)

    def reset(self) -> None:
        """Forgets what was observed."""
        self._maxima.clear()

    @torch.no_grad()
    def apply_(self, targets: Sequence[ClipTarget], *, group: dist.ProcessGroup | None = None) -> ClipResult:
        """Scales the weights, each rank its own rows, and forgets what was observed.

        Args:
            targets: All weights to scale. Build them once and pass the same objects in every step.
            group: Ranks that saw different data or hold different heads: data, context and, where `first_head` is
                used, tensor parallelism. They must all call, with targets of the same attentions in the same order; a
                rank that observed nothing takes part too. One all-reduce in total. None: no communication.

        Heads whose largest logit is not finite are left alone: the step is broken, and zeroing them would not mend it.

        Raises:
            ConfigurationError: A tensor is named twice, or an observed attention has no target or other heads.
        """
        heads = _heads(targets)
        unknown = sorted(self._maxima.keys() - heads.keys())
        if unknown:
            raise ConfigurationError(
                f"logits of {unknown} were observed, but no target has these names: {list(heads)}."
            )
        maxima = self._reduced(heads, targets[0].local.device if targets else torch.device("cpu"), group)
        self.reset()
        gammas: dict[str, torch.Tensor] = {}
        for target in targets:
            queries, keys, rope = self._factors(maxima[target.attention], target.key_heads)
            gammas[target.attention] = rope
            table = torch.cat([queries, keys, rope, rope.new_ones(1)]).to(target.local.device)
            factors = table[target.factor_index]
            target.local.mul_(factors if target.local.dim() == 1 else factors.unsqueeze(1))
        return ClipResult(maxima, gammas)

    def _reduced(
        self, heads: dict[str, int], device: torch.device, group: dist.ProcessGroup | None
    ) -> dict[str, torch.Tensor]:
        parts = []
        for name, count in heads.items():
            kept = self._maxima.get(name)
            if kept is None:
                kept = torch.full((count,), -torch.inf, dtype=torch.float32, device=device)
            if kept.numel() != count:
                raise ConfigurationError(f"{kept.numel()} heads of {name} were observed, but its target has {count}.")
            parts.append(kept.to(device))
        packed = torch.cat(parts) if parts else torch.empty(0, device=device)
        if group is not None and packed.numel():
            dist.all_reduce(packed, op=dist.ReduceOp.MAX, group=group)
        return dict(zip(heads, packed.split(list(heads.values())), strict=True))

    def _factors(self, maxima: torch.Tensor, key_heads: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Factors of the query heads, the key heads and the rope queries; the last is what logits are scaled by."""
        shared = maxima.numel() // key_heads
        if shared > 1 and self.shared_keys == "queries_only":
            gamma = self._gamma(maxima)
            return gamma, gamma.new_ones(key_heads), gamma
        grouped = self._gamma(maxima.view(key_heads, shared).amax(dim=1))
        gamma = grouped.repeat_interleave(shared)
        return gamma**self.alpha, grouped ** (1 - self.alpha), gamma

    def _gamma(self, maxima: torch.Tensor) -> torch.Tensor:
        exceeds = torch.isfinite(maxima) & (maxima > self.threshold)
        return torch.where(exceeds, self.threshold / maxima, torch.ones_like(maxima))


def _heads(targets: Sequence[ClipTarget]) -> dict[str, int]:
    """Query heads by attention, in the order of the targets."""
    heads: dict[str, int] = {}
    seen: set[int] = set()
    for target in targets:
        if heads.setdefault(target.attention, target.num_heads) != target.num_heads:
            raise ConfigurationError(f"targets of {target.attention} differ in their numbers of heads.")
        if id(target.local) in seen:
            raise ConfigurationError(
                f"a weight of {target.attention} is named by two targets and would be scaled twice."
            )
        seen.add(id(target.local))
    return heads


def _layout(weight: Weight) -> tuple[Layout, Sequence[int] | None]:
    """The weight's layout and this rank's coordinate; None if it has no part of the mesh."""
    if isinstance(weight, tuple):
        return weight[1], weight[2]
    if isinstance(weight, DTensor):
        return Layout.from_dtensor(weight), weight.device_mesh.get_coordinate()
    return Layout(tuple(weight.shape), (), (), ()), ()
