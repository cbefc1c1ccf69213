"""Source of the symmetric product. Triton only: see the package."""
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl


@triton.jit
def lower_tile(number, tiles):
    """Row and column of a tile of the lower triangle of `tiles` x `tiles`, by its number.

    Row r and row tiles - 1 - r together have tiles + 1 tiles, so (tiles + 1) // 2 folded rows of that length cover the
    triangle in integer arithmetic. For odd `tiles` the middle row is folded onto itself and counted twice.
    """
    fold = number // (tiles + 1)
    position = number % (tiles + 1)
    is_long = position < tiles - fold
    row = tl.where(is_long, tiles - 1 - fold, fold)
    col = tl.where(is_long, position, position - (tiles - fold))
    return row, col


@triton.jit
def symmetric_product_kernel(
    left_ptr,
    right_ptr,
    add_ptr,
    out_ptr,
    batch,
    m,
    k,
    alpha,
    beta,
    shift,
    HAS_ADD: tl.constexpr,  # noqa: N803
    UPCAST: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    BLOCK_K: tl.constexpr,  # noqa: N803
):
    """``out = alpha * left @ right^T + beta * add + shift * I``, known to be symmetric, half of it computed.

    `left` and `right` are (batch, m, k), `add` and `out` (batch, m, m), all contiguous. What is below the diagonal is
    written twice, the second time transposed, so the result is symmetric bit for bit. Sums are float32 and rounded
    once. UPCAST is for the interpreter, whose product of bfloat16 is wrong.
    """
    tiles = tl.cdiv(m, BLOCK)
    tiles_in_matrix = ((tiles + 1) // 2) * (tiles + 1)
    for number in range(tl.program_id(0), batch * tiles_in_matrix, tl.num_programs(0)):
        matrix = (number // tiles_in_matrix).to(tl.int64)
        row, col = lower_tile(number % tiles_in_matrix, tiles)
        rows = row * BLOCK + tl.arange(0, BLOCK)
        cols = col * BLOCK + tl.arange(0, BLOCK)
        left_rows = left_ptr + matrix * m * k + rows[:, None] * k
        right_rows = right_ptr + matrix * m * k + cols[:, None] * k
        row_mask = (rows < m)[:, None]
        col_mask = (cols < m)[:, None]
        total = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
        for start in range(0, k, BLOCK_K):
            depth = (start + tl.arange(0, BLOCK_K))[None, :]
            left = tl.load(left_rows + depth, mask=row_mask & (depth < k), other=0.0)
            right = tl.load(right_rows + depth, mask=col_mask & (depth < k), other=0.0)
            if UPCAST:
                left = left.to(tl.float32)
                right = right.to(tl.float32)
            total += tl.dot(left, tl.trans(right), input_precision="ieee")
        total = total * alpha
        mask = row_mask & (cols < m)[None, :]
        if HAS_ADD:
            added = tl.load(add_ptr + matrix * m * m + rows[:, None] * m + cols[None, :], mask=mask, other=0.0)
            total += beta * added.to(tl.float32)
        total += tl.where(rows[:, None] == cols[None, :], shift, 0.0)
        value = total.to(out_ptr.dtype.element_ty)
        # Rounding leaves a tile on the diagonal a little unsymmetric, and the Gram form in float16 does not bear that.
        value = tl.where(rows[:, None] >= cols[None, :], value, tl.trans(value))
        out_matrix = out_ptr + matrix * m * m
        tl.store(out_matrix + rows[:, None] * m + cols[None, :], value, mask=mask)
        if row != col:
            tl.store(
                out_matrix + cols[:, None] * m + rows[None, :], tl.trans(value), mask=col_mask & (rows < m)[None, :]
            )
