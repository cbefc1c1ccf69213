"""Rules of common operations: the placements of outputs, from those of inputs, without looking at values.

A rule looks at one axis at a time. It is believed where values agree, and then decides among several placements that
explain a constant; it also gives the placement that a message names as expected. An operation without a rule, or inputs
with several placements, leave it to values alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hp_plugin.core.dtensor.placement import COPY, PARTIAL, REPLICATE, AxisPlacement, shard
from hp_plugin.core.dtensor.validation.arrangement import Grid, Placing
from hp_plugin.core.dtensor.validation.calls import Call
from hp_plugin.core.dtensor.validation.checker import Cell
from hp_plugin.core.dtensor.validation.reference import OperationRecord


@dataclass(frozen=True)
class _Input:
    """One tensor on one axis: `at` is None for a constant that is whole, which fits wherever the others lie."""

    at: AxisPlacement | None
    whole: tuple[int, ...]

    @property
    def is_sum(self) -> bool:
        return self.at == PARTIAL

    @property
    def is_shard(self) -> bool:
        return self.at is not None and self.at.is_shard

    @property
    def dim(self) -> int:
        assert self.at is not None
        return self.at.dim


Inputs = Sequence[_Input]
Rule = Callable[[Inputs, tuple[int, ...]], AxisPlacement | None]


def predict(
    name: str, call: Call, cells: Sequence[Cell | None], record: OperationRecord, grid: Grid
) -> list[Placing | None] | None:
    """The placement of each output; None where no rule says.

    Args:
        name: of the operation.
        call: with this rank's tensors.
        cells: what is known of its inputs.
        record: of one process.
        grid: the axes.
    """
    rule = _RULES.get(name.strip("_") if name.startswith("__") else name.rstrip("_"))
    if rule is None or not call.inputs or any(cell is not None and len(cell.placings) > 1 for cell in cells):
        return None
    result: list[Placing | None] = []
    for output, whole in zip(call.outputs, record.outputs, strict=True):
        placing: list[AxisPlacement] = []
        for axis, size in enumerate(grid.sizes):
            if size == 1:
                placing.append(REPLICATE)
                continue
            inputs = [
                _Input(_on(cell, axis, flows=flows), tuple(w.value.shape))
                for cell, flows, w in zip(cells, call.flows, record.inputs, strict=True)
            ]
            found = rule(inputs, tuple(whole.value.shape))
            if found is None:
                break
            placing.append(found)
        complete = len(placing) == len(grid.sizes)
        if complete and not output.requires_grad:
            placing = [REPLICATE if p == COPY else p for p in placing]
        result.append(tuple(placing) if complete else None)
    return result if any(placing is not None for placing in result) else None


def _on(cell: Cell | None, axis: int, *, flows: bool) -> AxisPlacement | None:
    if cell is None:
        return None
    placement = cell.placings[0][axis]
    # Without a gradient, a value that all ranks have fits everywhere.
    return None if placement in (REPLICATE, COPY) and not flows else placement


def _whole_or(inputs: Inputs) -> AxisPlacement | None:
    """Of inputs that are all whole: `copy` if one is, and none is `replicate`."""
    kinds = {i.at for i in inputs if i.at is not None}
    if kinds <= {REPLICATE}:
        return REPLICATE
    return COPY if kinds == {COPY} else None


def _pointwise(inputs: Inputs, out: tuple[int, ...]) -> AxisPlacement | None:
    divided = {shard(i.dim + len(out) - len(i.whole), blocks=i.at.blocks) for i in inputs if i.is_shard and i.at}
    if any(i.is_sum for i in inputs):
        return None
    if not divided:
        return _whole_or(inputs)
    if len(divided) > 1 or any(i.at == REPLICATE for i in inputs):
        return None
    return divided.pop()


def _added(inputs: Inputs, out: tuple[int, ...]) -> AxisPlacement | None:
    if all(i.is_sum for i in inputs):
        return PARTIAL
    return _pointwise(inputs, out)


def _multiplied(inputs: Inputs, out: tuple[int, ...]) -> AxisPlacement | None:
    if sum(i.is_sum for i in inputs) == 1 and all(i.is_sum or i.at in (None, COPY) for i in inputs):
        return PARTIAL
    return _pointwise(inputs, out)


def _divided_by(inputs: Inputs, out: tuple[int, ...]) -> AxisPlacement | None:
    return _multiplied(inputs, out) if inputs[0].is_sum else _pointwise(inputs, out)


def _moved(inputs: Inputs, out: tuple[int, ...]) -> AxisPlacement | None:
    """Elements change places: sums and copies stay what they are; where shards go is seen from the sizes."""
    kinds = {i.at for i in inputs if i.at is not None}
    if not kinds:
        return REPLICATE
    if len(kinds) == 1:
        [at] = kinds
        if at is not None and not at.is_shard:
            return at
    return None


def _viewed(inputs: Inputs, out: tuple[int, ...]) -> AxisPlacement | None:
    [given] = inputs[:1]
    if not given.is_shard or given.at is None:
        return _moved(inputs, out)
    before = math.prod(given.whole[: given.dim]) * given.at.blocks
    length = math.prod(given.whole[given.dim + 1 :])
    for dim in range(len(out)):
        outer, inner = math.prod(out[:dim]), math.prod(out[dim + 1 :])
        if outer and before % outer == 0 and inner <= length * (given.whole[given.dim] // given.at.blocks):
            blocks = before // outer
            if out[dim] % blocks == 0 and out[dim] > 1 and blocks < out[dim]:
                return shard(dim, blocks=blocks)
    return None


def _last_dim(inputs: Inputs, out: tuple[int, ...]) -> AxisPlacement | None:
    """Softmax and norms over the last dim, which must be whole."""
    first = inputs[0]
    if first.is_shard and (first.dim == len(first.whole) - 1 or len(first.whole) != len(out)):
        return None
    return _pointwise([first, *(i for i in inputs[1:] if i.at is not None)], out)


def _linear(inputs: Inputs, out: tuple[int, ...]) -> AxisPlacement | None:
    x, weight, *bias = inputs
    last = len(x.whole) - 1
    if weight.is_shard and weight.dim == 1:
        return PARTIAL if x.at == shard(last) and all(b.is_sum for b in bias) else None
    if weight.is_shard:
        if x.at not in (None, COPY) or any(b.at != weight.at for b in bias):
            return None
        return shard(len(out) - 1, blocks=weight.at.blocks if weight.at else 1)
    others = [weight, *bias]
    if x.is_shard:
        return x.at if x.dim != last and all(o.at in (None, COPY) for o in others) else None
    if x.is_sum:
        return PARTIAL if weight.at in (None, COPY) and all(b.is_sum for b in bias) else None
    return _whole_or(inputs)


def _product(inputs: Inputs, out: tuple[int, ...]) -> AxisPlacement | None:
    """matmul, mm, bmm of two tensors of at least two dims."""
    if len(inputs) != 2 or min(len(i.whole) for i in inputs) < 2:
        return None
    left, right = inputs
    a = left.dim - len(left.whole) if left.is_shard else None
    b = right.dim - len(right.whole) if right.is_shard else None
    if a is None and b is None:
        if left.is_sum or right.is_sum:
            both = {left.at, right.at}
            return PARTIAL if both <= {PARTIAL, COPY, None} and len(both) == 2 else None
        return _whole_or(inputs)
    if a == -1 or b == -2:
        return PARTIAL if (a, b) == (-1, -2) else None
    if a is not None and b is not None:
        return shard(len(out) + a) if a == b and a < -2 else None
    other, dim = (right, a) if a is not None else (left, b)
    assert dim is not None
    return shard(len(out) + dim) if other.at in (None, COPY) else None


def _attention(inputs: Inputs, out: tuple[int, ...]) -> AxisPlacement | None:
    """scaled_dot_product_attention: batch and heads may be divided, alike in q, k and v."""
    kinds = {i.at for i in inputs[:3]}
    if len(kinds) != 1:
        return None
    [at] = kinds
    if at is not None and at.is_shard and at.dim >= len(out) - 2:
        return None
    return REPLICATE if at is None else None if at == PARTIAL else at


def _embedding(inputs: Inputs, out: tuple[int, ...]) -> AxisPlacement | None:
    ids, weight = inputs[:2]
    if weight.is_shard:
        return shard(len(out) - 1) if weight.dim == 1 and ids.at is None else None
    if ids.is_shard:
        return ids.at if weight.at in (None, COPY) else None
    return weight.at or REPLICATE


def _loss(inputs: Inputs, out: tuple[int, ...]) -> AxisPlacement | None:
    return None if any(i.is_shard or i.is_sum for i in inputs) else _whole_or(inputs)


def _reduced(inputs: Inputs, out: tuple[int, ...]) -> AxisPlacement | None:
    """Sums and means; which dim went is seen from values where a shard is involved."""
    [x] = inputs[:1]
    return None if x.is_shard else (x.at or REPLICATE)


_GROUPS: list[tuple[Rule, str]] = [
    (_added, "add sub rsub iadd isub radd stack cat concat concatenate where"),
    (_multiplied, "mul multiply imul rmul neg clone to float double half bfloat16 type type_as contiguous detach"),
    (_divided_by, "div divide truediv true_divide itruediv rtruediv"),
    (
        _pointwise,
        (
            "silu gelu relu sigmoid tanh exp log sqrt rsqrt pow abs sin cos square softplus leaky_relu elu mish clamp "
            "maximum minimum eq ne lt le gt ge logical_and logical_or logical_not and or invert masked_fill "
            "floor_divide remainder floor ceil round sign reciprocal erf expm1 log1p lerp ones_like zeros_like"
        ),
    ),
    (
        _moved,
        (
            "transpose permute t T mT movedim swapaxes swapdims expand expand_as repeat repeat_interleave split chunk "
            "unbind narrow select getitem index_select roll flip squeeze unsqueeze tril triu gather"
        ),
    ),
    (_viewed, "view reshape flatten unflatten view_as reshape_as"),
    (_last_dim, "layer_norm rms_norm"),
    (_linear, "linear"),
    (_product, "matmul mm bmm rmatmul"),
    (_attention, "scaled_dot_product_attention"),
    (_embedding, "embedding"),
    (_loss, "cross_entropy nll_loss mse_loss softmax log_softmax logsumexp topk sort argmax max min argsort cumsum"),
    (_reduced, "sum mean"),
]
_RULES: dict[str, Rule] = {name: rule for rule, names in _GROUPS for name in names.split()}
