"""Sources of the kernels that make one pass over memory. Triton only: see the package.

All loop over blocks in strides of the grid, because Ascend has one program per vector core and CUDA one per block.
Counts and offsets are 32-bit; callers split or refuse what is larger. Arithmetic is float32; a product and a sum are
each rounded, since the launcher forbids the compiler to fuse them, so that results are those of the torch references.
"""
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl


@triton.jit
def scale_kernel(dst_ptr, src_ptr, alpha, count, ACCUMULATE: tl.constexpr, BLOCK: tl.constexpr):  # noqa: N803
    """``dst = alpha * src``, or ``dst += alpha * src``, with a cast on the way; `count` contiguous elements."""
    for block in range(tl.program_id(0), tl.cdiv(count, BLOCK), tl.num_programs(0)):
        index = block * BLOCK + tl.arange(0, BLOCK)
        mask = index < count
        value = tl.load(src_ptr + index, mask=mask, other=0.0).to(tl.float32) * alpha
        if ACCUMULATE:
            value = tl.load(dst_ptr + index, mask=mask, other=0.0).to(tl.float32) + value
        tl.store(dst_ptr + index, value.to(dst_ptr.dtype.element_ty), mask=mask)


@triton.jit
def decay_update_kernel(
    target_ptr,
    values_ptr,
    rows,
    cols,
    target_stride,
    values_stride,
    decay,
    step,
    ROWS: tl.constexpr,  # noqa: N803
    COLS: tl.constexpr,  # noqa: N803
):
    """``target = decay * target + step * values`` on matrices whose rows lie `*_stride` elements apart.

    `values` is read where the message has it, so unpacking, decay and update are one pass.
    """
    tiles_in_row = tl.cdiv(cols, COLS)
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS) * tiles_in_row, tl.num_programs(0)):
        row = (tile // tiles_in_row) * ROWS + tl.arange(0, ROWS)
        col = (tile % tiles_in_row) * COLS + tl.arange(0, COLS)
        mask = (row < rows)[:, None] & (col < cols)[None, :]
        place = target_ptr + row[:, None] * target_stride + col[None, :]
        target = tl.load(place, mask=mask, other=0.0).to(tl.float32) * decay
        values = tl.load(values_ptr + row[:, None] * values_stride + col[None, :], mask=mask, other=0.0)
        target += values.to(tl.float32) * step
        tl.store(place, target.to(target_ptr.dtype.element_ty), mask=mask)


@triton.jit
def adamw_kernel(
    param_ptr,
    grad_ptr,
    exp_avg_ptr,
    exp_avg_sq_ptr,
    count,
    decay,
    beta1_complement,
    beta2,
    beta2_complement,
    step_size,
    bias_correction2_sqrt,
    eps,
    BLOCK: tl.constexpr,  # noqa: N803
):
    """One step of AdamW on `count` contiguous elements, in the order of operations of `torch.optim.AdamW`."""
    for block in range(tl.program_id(0), tl.cdiv(count, BLOCK), tl.num_programs(0)):
        index = block * BLOCK + tl.arange(0, BLOCK)
        mask = index < count
        grad = tl.load(grad_ptr + index, mask=mask, other=0.0).to(tl.float32)
        exp_avg = tl.load(exp_avg_ptr + index, mask=mask, other=0.0).to(tl.float32)
        exp_avg += (grad - exp_avg) * beta1_complement
        tl.store(exp_avg_ptr + index, exp_avg.to(exp_avg_ptr.dtype.element_ty), mask=mask)
        exp_avg_sq = tl.load(exp_avg_sq_ptr + index, mask=mask, other=0.0).to(tl.float32) * beta2
        exp_avg_sq += grad * grad * beta2_complement
        tl.store(exp_avg_sq_ptr + index, exp_avg_sq.to(exp_avg_sq_ptr.dtype.element_ty), mask=mask)
        param = tl.load(param_ptr + index, mask=mask, other=0.0).to(tl.float32) * decay
        param -= step_size * (exp_avg / (tl.sqrt(exp_avg_sq) / bias_correction2_sqrt + eps))
        tl.store(param_ptr + index, param.to(param_ptr.dtype.element_ty), mask=mask)


@triton.jit
def sum_of_squares_kernel(
    base_ptr,
    offsets_ptr,
    lengths_ptr,
    sums_ptr,
    chunks,
    CHUNK: tl.constexpr,  # noqa: N803
    ALIGNMENT: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """The sum of squares of each of `chunks` pieces of many tensors, float32.

    Piece i is `lengths[i]` <= CHUNK elements that begin `offsets[i]` (int64, a multiple of ALIGNMENT) elements from
    `base`: tensors of one dtype are addressed from the first of them, so that no array of pointers is needed.
    """
    for chunk in range(tl.program_id(0), chunks, tl.num_programs(0)):
        start = tl.multiple_of(tl.load(offsets_ptr + chunk), ALIGNMENT)
        length = tl.load(lengths_ptr + chunk)
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        for position in range(0, CHUNK, BLOCK):
            index = position + tl.arange(0, BLOCK)
            value = tl.load(base_ptr + start + index, mask=index < length, other=0.0).to(tl.float32)
            total += value * value
        tl.store(sums_ptr + chunk, tl.sum(total, axis=0))
