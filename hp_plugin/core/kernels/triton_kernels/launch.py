"""Runs the Triton kernels on tensors. Importing it imports Triton; with TRITON_INTERPRET=1 they then run on the CPU.

What a kernel may be given is said at each function and is for the caller to see to: the operations beside this package
check it and take another implementation otherwise.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from hp_plugin.core.kernels.triton_kernels import elementwise, products, variants
from hp_plugin.core.kernels.triton_kernels.variants import CHUNK, MAX_COUNT, PROGRAMS, Tile

_NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
INTERPRETS = not isinstance(elementwise.scale_kernel, triton.runtime.JITFunction)
"""Whether the kernels run in Triton's interpreter, on tensors of the CPU."""


def scale_(dst: Tensor, src: Tensor, alpha: float, *, accumulate: bool) -> None:
    """``dst = alpha * src``, or ``dst += alpha * src``.

    Args:
        dst: Contiguous float32, float16 or bfloat16 tensor; changed in place.
        src: Likewise, of the same number of elements.
        alpha: The factor.
        accumulate: Whether `dst` is added to.
    """
    platform = _platform(dst)
    tile = variants.elementwise_tile("scale_kernel", platform)
    dst, src = dst.view(-1), src.view(-1)
    for start in range(0, dst.numel(), MAX_COUNT):
        count = min(MAX_COUNT, dst.numel() - start)
        arguments = (dst[start:], src[start:], alpha, count)
        grid = triton.cdiv(count, tile.constants["BLOCK"])
        _run(elementwise.scale_kernel, "vector", platform, grid, arguments, tile, ACCUMULATE=accumulate)


def decay_update_(target: Tensor, values: Tensor, decay: float, step: float) -> None:
    """``target = decay * target + step * values``, rounded once.

    Args:
        target: Matrix whose columns lie beside one another; changed in place.
        values: Likewise, of the same shape; both dtypes float32, float16 or bfloat16.
        decay: Factor of the target.
        step: Factor of the values.
    """
    platform = _platform(target)
    tile = variants.elementwise_tile("decay_update_kernel", platform)
    rows, cols = target.shape
    grid = triton.cdiv(rows, tile.constants["ROWS"]) * triton.cdiv(cols, tile.constants["COLS"])
    arguments = (target, values, rows, cols, target.stride(0), values.stride(0), decay, step)
    _run(elementwise.decay_update_kernel, "vector", platform, grid, arguments, tile)


def adamw_(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """One step of AdamW.

    Args:
        param: Contiguous tensor; changed in place.
        grad: Its gradient.
        exp_avg: Running mean; changed in place.
        exp_avg_sq: Running mean of squares; changed in place.
        step: Number of this step, from 1.
        lr: Learning rate.
        betas: Decay rates of the means.
        eps: Added to the denominator.
        weight_decay: Multiplied by `lr`.
    """
    platform = _platform(param)
    tile = variants.elementwise_tile("adamw_kernel", platform)
    beta1, beta2 = betas
    numbers = (
        1 - lr * weight_decay,
        1 - beta1,
        beta2,
        1 - beta2,
        lr / (1 - beta1**step),
        (1 - beta2**step) ** 0.5,
        eps,
    )
    flat = [tensor.view(-1) for tensor in (param, grad, exp_avg, exp_avg_sq)]
    for start in range(0, param.numel(), MAX_COUNT):
        count = min(MAX_COUNT, param.numel() - start)
        arguments = (*(tensor[start:] for tensor in flat), count, *numbers)
        grid = triton.cdiv(count, tile.constants["BLOCK"])
        _run(elementwise.adamw_kernel, "vector", platform, grid, arguments, tile)


def sums_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of squares of all elements, in one launch.

    Args:
        tensors: Non-empty contiguous tensors of one dtype (float32, float16 or bfloat16) and device.

    Returns:
        0-dim float32 tensor on their device.
    """
    first = tensors[0]
    platform = _platform(first)
    offsets, lengths = [], []
    for tensor in tensors:
        place = (tensor.data_ptr() - first.data_ptr()) // tensor.itemsize
        for start in range(0, tensor.numel(), CHUNK):
            offsets.append(place + start)
            lengths.append(min(CHUNK, tensor.numel() - start))
    alignment = 8 if all(offset % 8 == 0 for offset in offsets) else 1
    chunks = torch.tensor(offsets, dtype=torch.int64).to(first.device, non_blocking=True)
    sizes = torch.tensor(lengths, dtype=torch.int32).to(first.device, non_blocking=True)
    sums = torch.empty(len(offsets), dtype=torch.float32, device=first.device)
    tile = variants.elementwise_tile("sum_of_squares_kernel", platform)
    arguments = (first, chunks, sizes, sums, len(offsets))
    _run(elementwise.sum_of_squares_kernel, "vector", platform, len(offsets), arguments, tile, ALIGNMENT=alignment)
    return sums.sum()


def symmetric_product(
    left: Tensor, right: Tensor, *, out: Tensor, add: Tensor | None, alpha: float, beta: float, shift: float
) -> None:
    """``out = alpha * left @ right^T + beta * add + shift * I``, of which one triangle is computed.

    Args:
        left: (batch, m, k), contiguous, float32, float16 or bfloat16.
        right: Likewise, such that the product is symmetric.
        out: (batch, m, m), contiguous, of their dtype, apart from all operands.
        add: Symmetric matrices like `out`, or None.
        alpha: Factor of the product.
        beta: Factor of `add`.
        shift: Added on the diagonal.
    """
    platform = _platform(left)
    tile = variants.product_tile(platform, _NAMES[left.dtype])
    batch, m, k = left.shape
    tiles = triton.cdiv(m, tile.constants["BLOCK"])
    grid = batch * ((tiles + 1) // 2) * (tiles + 1)
    arguments = (left, right, left if add is None else add, out, batch, m, k, alpha, beta, shift)
    flags = {"HAS_ADD": add is not None, "UPCAST": INTERPRETS}
    _run(products.symmetric_product_kernel, "cube", platform, grid, arguments, tile, **flags)


def _platform(tensor: Tensor) -> str:
    return "cuda" if tensor.device.type == "cpu" else tensor.device.type  # on CPU the interpreter runs, with any tile


def _run(
    kernel: Any, core: str, platform: str, grid: int, arguments: tuple[Any, ...], tile: Tile, **flags: int
) -> None:
    if grid == 0:
        return
    device = arguments[0].device
    # Triton launches on the current device, which need not be that of the tensors.
    on_device = (
        contextlib.nullcontext() if device.type == "cpu" else torch.get_device_module(device).device(device.index)
    )
    options: dict[str, Any] = dict(flags) | dict(tile.constants)
    if platform == "cuda" and not INTERPRETS:
        # The references round products and sums apart.
        options |= {"num_warps": tile.num_warps, "num_stages": tile.num_stages, "enable_fp_fusion": False}
    with on_device:
        kernel[(min(grid, PROGRAMS[platform, core]),)](*arguments, **options)
    for written in _written(kernel, arguments):
        torch.autograd.graph.increment_version(written)  # the write went past torch


def _written(kernel: Any, arguments: tuple[Any, ...]) -> tuple[Tensor, ...]:
    if kernel is elementwise.adamw_kernel:
        return (arguments[0], arguments[2], arguments[3])
    if kernel is elementwise.scale_kernel or kernel is elementwise.decay_update_kernel:
        return (arguments[0],)
    return ()
