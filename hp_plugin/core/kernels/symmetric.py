"""Products that are known to be symmetric, of which devices need to compute only one triangle.

X X^T is symmetric, and so is the product of two polynomials of it, because these commute: every product of the
Newton-Schulz iteration but the last of a step is of this kind.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hp_plugin.core.kernels import table

LEVELS = 2
"""Levels of `block_symmetric_product`: 4 x 4 blocks, of which 10 are computed."""


def symmetric_choice(device_type: str, dtype: torch.dtype, rows: int) -> str:
    """The implementation of symmetric products of `rows` rows: `triton`, `blocks` or `torch` (the whole product)."""
    return table.kernels().choose("symmetric_product", device_type, dtype, rows)


def symmetric_product(
    left: Tensor,
    right: Tensor,
    *,
    add: Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    shift: float = 0.0,
    out: Tensor | None = None,
    implementation: str | None = None,
) -> Tensor:
    """``alpha * left @ right^T + beta * add + shift * I``, which must be symmetric. Local, without autograd.

    With left = right = X it is X X^T; with add = R, beta = b, alpha = c and left = right = R the polynomial step
    b R + c R^2; with Q and Z that commute a Q + Q Z.

    Args:
        left: (m, k) or (batch, m, k).
        right: Of the same shape, dtype and device.
        add: (m, m) or (batch, m, m), symmetric, or None.
        alpha: Factor of the product.
        beta: Factor of `add`.
        shift: Added on the diagonal.
        out: Where the result goes, apart from all operands; None is new memory.
        implementation: `triton`, `blocks` or `torch`; None takes what the table says.

    Returns:
        `out`, symmetric bit for bit: the Gram form of Newton-Schulz in float16 rests on that, since rounding that
        differs on the two sides of the diagonal mixes into its small singular values (on 257 x 300 Gaussian numbers an
        error of 6e-2 instead of 4e-3).
    """
    m = left.shape[-2]
    if out is None:
        out = left.new_empty((*left.shape[:-1], m))
    if implementation is None:
        implementation = symmetric_choice(left.device.type, left.dtype, m)
    if implementation == "triton" and all(
        each.is_contiguous() for each in (left, right, out, *(() if add is None else (add,)))
    ):
        from hp_plugin.core.kernels.triton_kernels import launch

        stacked = [None if each is None else each.view(-1, *each.shape[-2:]) for each in (left, right, out, add)]
        lefts, rights, outs, adds = stacked
        assert lefts is not None and rights is not None and outs is not None
        launch.symmetric_product(lefts, rights, out=outs, add=adds, alpha=alpha, beta=beta, shift=shift)
    elif implementation == "blocks":
        block_symmetric_product(left, right, add=add, alpha=alpha, beta=beta, shift=shift, out=out)
    else:
        symmetric_product_reference(left, right, add=add, alpha=alpha, beta=beta, shift=shift, out=out)
    return out


def symmetric_product_reference(
    left: Tensor, right: Tensor, *, add: Tensor | None, alpha: float, beta: float, shift: float, out: Tensor
) -> None:
    """The torch implementation of `symmetric_product`: the whole product, of which the lower triangle is kept."""
    with torch.no_grad():
        _product(left, right, add=add, alpha=alpha, beta=beta, out=out)
        _mirror_(out)
        if shift:
            out.diagonal(dim1=-2, dim2=-1).add_(shift)


def block_symmetric_product(
    left: Tensor,
    right: Tensor,
    *,
    add: Tensor | None,
    alpha: float,
    beta: float,
    shift: float,
    out: Tensor,
    levels: int = LEVELS,
) -> None:
    """`symmetric_product` by halves: the two blocks on the diagonal recursively, the one below them as a product.

    Two levels compute 10 of 16 blocks, 62.5 % of the product, in 7 products of the vendor's library; what lies above
    the diagonal is copied from below it.
    """
    with torch.no_grad():
        _lower_blocks(left, right, add, alpha, beta, out, levels)
        if shift:
            out.diagonal(dim1=-2, dim2=-1).add_(shift)


def _lower_blocks(
    left: Tensor, right: Tensor, add: Tensor | None, alpha: float, beta: float, out: Tensor, levels: int
) -> None:
    m = left.shape[-2]
    if levels == 0 or m < 2:
        _product(left, right, add=add, alpha=alpha, beta=beta, out=out)
        _mirror_(out)
        return
    half = m // 2
    for part in (slice(0, half), slice(half, m)):
        added = None if add is None else add[..., part, part]
        _lower_blocks(left[..., part, :], right[..., part, :], added, alpha, beta, out[..., part, part], levels - 1)
    below = None if add is None else add[..., half:, :half]
    _product(left[..., half:, :], right[..., :half, :], add=below, alpha=alpha, beta=beta, out=out[..., half:, :half])
    out[..., :half, half:].copy_(out[..., half:, :half].mT)


def _mirror_(matrix: Tensor) -> None:
    """Copies what is below the diagonal to above it."""
    matrix.copy_(matrix.tril() + matrix.tril(-1).mT)


def _product(left: Tensor, right: Tensor, *, add: Tensor | None, alpha: float, beta: float, out: Tensor) -> None:
    """``out = alpha * left @ right^T + beta * add``, of matrices or of stacks of them."""
    function = torch.addmm if left.ndim == 2 else torch.baddbmm
    if add is None:
        function(out, left, right.mT, beta=0.0, alpha=alpha, out=out)
    else:
        function(add, left, right.mT, beta=beta, alpha=alpha, out=out)
