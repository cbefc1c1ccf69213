"""Scaled accumulation and scaled copy: the cast, the scaling and the sum of a gradient in one pass over memory.

``dst + alpha * src`` with a bfloat16 ``src`` costs torch three passes and a temporary; the native kernel on CPU, and
those that :mod:`hp_plugin.core.kernels.table` has for devices, make one. The reference of each operation stands beside
it, is used wherever no kernel applies, and is what the tests compare with, bit for bit: products and sums are rounded
separately in both.

Neither operation is differentiable or recorded by autograd, and both bump the version counter of ``dst``, so that
autograd notices the write as it notices any other in-place operation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from hp_plugin.core.kernels import table
from hp_plugin.core.kernels.native import load_native
from hp_plugin.core.kernels.operands import are_same_array, is_plain, share_memory
from hp_plugin.errors import ConfigurationError

Kernel = Callable[[Tensor, Tensor, float], None]

# (dtype of src, dtype of dst) -> native function, per operation.
_NATIVE_ACCUMULATE: Mapping[tuple[torch.dtype, torch.dtype], str] = MappingProxyType(
    {
        (torch.float32, torch.float32): "hp_accumulate_scaled_f32",
        (torch.bfloat16, torch.float32): "hp_accumulate_scaled_bf16",
    }
)
_NATIVE_COPY: Mapping[tuple[torch.dtype, torch.dtype], str] = MappingProxyType(
    {
        (torch.float32, torch.float32): "hp_scale_copy_f32",
        (torch.bfloat16, torch.float32): "hp_scale_copy_bf16",
        (torch.float32, torch.bfloat16): "hp_scale_copy_f32_bf16",
    }
)


def accumulate_scaled_(dst: Tensor, src: Tensor, alpha: float) -> None:
    """Adds ``alpha * src`` to ``dst`` in place, casting ``src`` on the way. Local: no rank communicates.

    Args:
        dst: floating-point tensor of any shape; changed in place.
        src: floating-point tensor of the same shape on the same device, of any floating dtype. It is ``dst`` itself,
            or does not share memory with it.
        alpha: factor, dimensionless.

    Raises:
        ConfigurationError: shapes or devices differ, or a dtype is not a floating-point one.
    """
    _check(dst, src, "accumulate_scaled_")
    _KERNELS.get(("accumulate_scaled_", dst.device.type), _device_accumulate_scaled)(dst, src, alpha)


def scale_copy_(dst: Tensor, src: Tensor, alpha: float) -> None:
    """Sets ``dst`` to ``alpha * src``, casting on the way.

    Arguments and errors are those of :func:`accumulate_scaled_`.
    """
    _check(dst, src, "scale_copy_")
    _KERNELS.get(("scale_copy_", dst.device.type), _device_scale_copy)(dst, src, alpha)


def accumulate_scaled_reference(dst: Tensor, src: Tensor, alpha: float) -> None:
    """The torch implementation of :func:`accumulate_scaled_`, for every device, dtype and memory layout.

    The sum is formed in float32 (float64 where an operand is), also when ``dst`` is narrower, and rounded once.
    """
    compute_dtype = _compute_dtype(dst, src)
    with torch.no_grad():
        if compute_dtype != dst.dtype:
            dst.copy_(dst.to(compute_dtype).add_(src.to(compute_dtype) * alpha))
        elif alpha == 1.0:
            dst.add_(src)  # the same digits without a temporary
        else:
            dst.add_(src.to(compute_dtype) * alpha)


def scale_copy_reference(dst: Tensor, src: Tensor, alpha: float) -> None:
    """The torch implementation of :func:`scale_copy_`, for every device, dtype and memory layout."""
    with torch.no_grad():
        # By one, the same digits without a temporary.
        dst.copy_(src if alpha == 1.0 else src.to(_compute_dtype(dst, src)) * alpha)


def _compute_dtype(dst: Tensor, src: Tensor) -> torch.dtype:
    """The dtype of the arithmetic: float32, or float64 where an operand is."""
    return torch.promote_types(torch.promote_types(src.dtype, dst.dtype), torch.float32)


def _cpu_accumulate_scaled(dst: Tensor, src: Tensor, alpha: float) -> None:
    if not _run_native(_NATIVE_ACCUMULATE, dst, src, alpha):
        accumulate_scaled_reference(dst, src, alpha)


def _cpu_scale_copy(dst: Tensor, src: Tensor, alpha: float) -> None:
    if not _run_native(_NATIVE_COPY, dst, src, alpha):
        scale_copy_reference(dst, src, alpha)


def _device_accumulate_scaled(dst: Tensor, src: Tensor, alpha: float) -> None:
    if not _run_on_device("accumulate_scaled_", dst, src, alpha):
        accumulate_scaled_reference(dst, src, alpha)


def _device_scale_copy(dst: Tensor, src: Tensor, alpha: float) -> None:
    if not _run_on_device("scale_copy_", dst, src, alpha):
        scale_copy_reference(dst, src, alpha)


def _run_on_device(operation: str, dst: Tensor, src: Tensor, alpha: float) -> bool:
    """Runs the kernel that the table has for these tensors, if they fit it; returns whether it did."""
    implementation = table.kernels().choose(operation, dst.device.type, dst.dtype)
    if implementation == "torch" or src.dtype == torch.float64 or not is_plain(dst) or not is_plain(src):
        return False
    if share_memory(dst, src) and not are_same_array(dst, src):
        return False  # torch decides: it refuses, or copies first
    if implementation == "apex":
        from hp_plugin.core.kernels import apex

        apex.scale_(dst, src, alpha, accumulate=operation == "accumulate_scaled_")
    else:
        from hp_plugin.core.kernels.triton_kernels import launch

        launch.scale_(dst, src, alpha, accumulate=operation == "accumulate_scaled_")
    return True


def _run_native(
    functions: Mapping[tuple[torch.dtype, torch.dtype], str], dst: Tensor, src: Tensor, alpha: float
) -> bool:
    """Runs a native kernel if it applies to these tensors; returns whether it did."""
    function = functions.get((src.dtype, dst.dtype))
    if function is None or not is_plain(dst) or not is_plain(src):
        return False
    if share_memory(dst, src) and not are_same_array(dst, src):
        return False  # torch decides: it refuses, or copies first
    library = load_native()
    if library is None:
        return False
    getattr(library.functions, function)(dst.data_ptr(), src.data_ptr(), alpha, dst.numel(), torch.get_num_threads())
    # The write went past torch: without this, a backward that saved dst would not notice it.
    torch.autograd.graph.increment_version(dst)
    return True


def _check(dst: Tensor, src: Tensor, operation: str) -> None:
    if dst.shape == src.shape and dst.device == src.device and dst.is_floating_point() and src.is_floating_point():
        return
    raise ConfigurationError(
        f"{operation} was given a destination of shape {tuple(dst.shape)}, {dst.dtype} on {dst.device}, and a source "
        f"of shape {tuple(src.shape)}, {src.dtype} on {src.device}. Both must have the same shape, the same device and "
        "a floating-point dtype."
    )


# (operation, device type) -> implementation; the table of device kernels serves every device type without an entry.
_KERNELS: Mapping[tuple[str, str], Kernel] = MappingProxyType(
    {
        ("accumulate_scaled_", "cpu"): _cpu_accumulate_scaled,
        ("scale_copy_", "cpu"): _cpu_scale_copy,
    }
)
