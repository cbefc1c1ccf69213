"""Scaled accumulation and scaled copy: the cast, the scaling and the sum of a gradient in one pass over memory.

``dst + alpha * src`` with a bfloat16 ``src`` costs torch on CPU three passes and a temporary; the native kernel makes
one. The reference of each operation stands beside it, is used wherever the native kernel does not apply, and is what
the tests compare with, bit for bit: products and sums are rounded separately in both.

Neither operation is differentiable or recorded by autograd, and both bump the version counter of ``dst``, so that
autograd notices the write as it notices any other in-place operation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from hp_plugin.core.kernels.native import load_native, native_status
from hp_plugin.errors import ConfigurationError

Kernel = Callable[[Tensor, Tensor, float], None]

# Suffix of the native function for each dtype of src; dst is float32.
_NATIVE_SUFFIX = {torch.float32: "f32", torch.bfloat16: "bf16"}


@dataclass(frozen=True)
class KernelChoice:
    """One line of :func:`chosen_kernels`.

    Attributes:
        operation: name of the operation, for example ``accumulate_scaled_``.
        device_type: torch device type, or ``other`` for every type without an entry of its own.
        implementation: ``native`` or ``torch``.
        applies_to: the tensors for which this implementation is used; torch serves the rest.
        reason: one sentence that says why.
    """

    operation: str
    device_type: str
    implementation: str
    applies_to: str
    reason: str


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
    _KERNELS.get(("accumulate_scaled_", dst.device.type), accumulate_scaled_reference)(dst, src, alpha)


def scale_copy_(dst: Tensor, src: Tensor, alpha: float) -> None:
    """Sets ``dst`` to ``alpha * src``, casting on the way.

    Arguments and errors are those of :func:`accumulate_scaled_`.
    """
    _check(dst, src, "scale_copy_")
    _KERNELS.get(("scale_copy_", dst.device.type), scale_copy_reference)(dst, src, alpha)


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


def chosen_kernels() -> tuple[KernelChoice, ...]:
    """Lists which implementation serves each operation, per device type; loads the native library if it is there."""
    status = native_status()
    choices = []
    for operation in ("accumulate_scaled_", "scale_copy_"):
        if status.library is not None:
            scope = "contiguous tensors, float32 destination, float32 or bfloat16 source"
            reason = f"{status.reason} Build: {status.library.build_info}."
            choices.append(KernelChoice(operation, "cpu", "native", scope, reason))
        else:
            choices.append(KernelChoice(operation, "cpu", "torch", "all tensors", status.reason))
        reason = "There is no native kernel for devices other than the CPU."
        choices.append(KernelChoice(operation, "other", "torch", "all tensors", reason))
    return tuple(choices)


def _compute_dtype(dst: Tensor, src: Tensor) -> torch.dtype:
    """The dtype of the arithmetic: float32, or float64 where an operand is."""
    return torch.promote_types(torch.promote_types(src.dtype, dst.dtype), torch.float32)


def _cpu_accumulate_scaled(dst: Tensor, src: Tensor, alpha: float) -> None:
    if not _run_native("hp_accumulate_scaled", dst, src, alpha):
        accumulate_scaled_reference(dst, src, alpha)


def _cpu_scale_copy(dst: Tensor, src: Tensor, alpha: float) -> None:
    if not _run_native("hp_scale_copy", dst, src, alpha):
        scale_copy_reference(dst, src, alpha)


def _run_native(function: str, dst: Tensor, src: Tensor, alpha: float) -> bool:
    """Runs a native kernel if it applies to these tensors; returns whether it did."""
    suffix = _NATIVE_SUFFIX.get(src.dtype)
    if suffix is None or not _is_plain_float32(dst) or not _is_plain(src) or _overlap_partly(dst, src):
        return False
    library = load_native()
    if library is None:
        return False
    getattr(library.functions, f"{function}_{suffix}")(
        dst.data_ptr(), src.data_ptr(), alpha, dst.numel(), torch.get_num_threads()
    )
    # The write went past torch: without this, a backward that saved dst would not notice it.
    torch.autograd.graph.increment_version(dst)
    return True


def _is_plain(tensor: Tensor) -> bool:
    """Whether the memory is one run of elements that may be addressed: no subclass, no wrapper, no strides."""
    return type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout == torch.strided and tensor.is_contiguous()


def _is_plain_float32(tensor: Tensor) -> bool:
    return tensor.dtype == torch.float32 and _is_plain(tensor)


def _overlap_partly(dst: Tensor, src: Tensor) -> bool:
    """Whether the two share memory without being the same array; torch then decides (it refuses or copies first)."""
    dst_begin, src_begin = dst.data_ptr(), src.data_ptr()
    if dst_begin == src_begin and dst.dtype == src.dtype:
        return False
    return src_begin < dst_begin + dst.nbytes and dst_begin < src_begin + src.nbytes


def _check(dst: Tensor, src: Tensor, operation: str) -> None:
    if dst.shape == src.shape and dst.device == src.device and dst.is_floating_point() and src.is_floating_point():
        return
    raise ConfigurationError(
        f"{operation} was given a destination of shape {tuple(dst.shape)}, {dst.dtype} on {dst.device}, and a source "
        f"of shape {tuple(src.shape)}, {src.dtype} on {src.device}. Both must have the same shape, the same device and "
        "a floating-point dtype."
    )


# (operation, device type) -> implementation; the references serve every device type without an entry.
_KERNELS: Mapping[tuple[str, str], Kernel] = MappingProxyType(
    {
        ("accumulate_scaled_", "cpu"): _cpu_accumulate_scaled,
        ("scale_copy_", "cpu"): _cpu_scale_copy,
    }
)
