"""Orthogonalization of whole matrices by the Newton-Schulz iteration.

A step takes X to ``a X + b (X X^T) X + c (X X^T)^2 X``: every singular value x of X becomes a x + b x^3 + c x^5, the
singular vectors stay. Started from a matrix of norm 1, a few steps bring all singular values near 1.

`orthogonalize_reference` says it in five lines and is what everything else is tested against. `NewtonSchulz` runs the
same polynomial with the kernel that suits device, dtype and shape:

* "loop": one matrix after another, in two buffers.
* "batched": all matrices of a shape in one call per product, which is what devices with costly launches want.
* "gram": iterates on the small m x m matrix X X^T and multiplies X once per three steps; fewer FLOPs when n > 1.5 m.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hp_plugin.core.kernels import symmetric_choice, symmetric_product
from hp_plugin.core.muon.coefficients import Coefficients
from hp_plugin.errors import ConfigurationError, UnsupportedError

Kernel = Literal["loop", "batched", "gram"]

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

# The Gram form multiplies polynomials of X X^T that it has computed separately, and their rounding errors grow with the
# number of steps taken between two looks at X. One look after step 2 keeps five steps in float16 closer to the exact
# polynomial than five direct steps in bfloat16; eight or ten steps need another look every third step, without which
# they end in NaN even in float32 (two_phase on a matrix of nearly rank 1).
_FIRST_SEGMENT = 2
_SEGMENT = 3
# Where X cannot be looked at again: five steps in float32 stay within 3e-3 of the polynomial on any spectrum. With
# more, the rounding of a float32 X X^T alone, whose least eigenvalues may come out negative, is blown up without bound.
_MOST_STEPS_IN_ONE_LOOK = 5


@dataclass(frozen=True)
class KernelRule:
    """When a kernel is taken: one row of `KERNEL_TABLE`. A matrix is m x n with m <= n.

    Attributes:
        kernel: The kernel.
        devices: Device types, or None for any.
        dtypes: Dtypes of the iteration, or None for any.
        above_aspect: Only if n / m is more than this.
        above_elements: Only if m * n is more than this.
        max_elements: Only if m * n is at most this, or None for no bound.
        min_batch: Only for at least so many matrices of one shape.
        reason: Why.
    """

    kernel: Kernel
    reason: str
    devices: tuple[str, ...] | None = None
    dtypes: tuple[torch.dtype, ...] | None = None
    above_aspect: float = 0.0
    above_elements: int = 0
    max_elements: int | None = None
    min_batch: int = 1

    def admits(self, m: int, n: int, batch: int, device: str, dtype: torch.dtype) -> bool:
        """Whether the rule is for these matrices."""
        return (
            (self.devices is None or device in self.devices)
            and (self.dtypes is None or dtype in self.dtypes)
            and n > self.above_aspect * m
            and m * n > self.above_elements
            and (self.max_elements is None or m * n <= self.max_elements)
            and batch >= self.min_batch
        )


KERNEL_TABLE: tuple[KernelRule, ...] = (
    KernelRule(
        "gram",
        "fewer FLOPs: both forms meet at n = 1.5 m for every number of steps, and Gram makes more calls",
        dtypes=(torch.float16, torch.float32),
        above_aspect=1.75,
        above_elements=1 << 14,
    ),
    KernelRule(
        "batched",
        "small products in half precision cost more in the call than in the arithmetic",
        devices=("cpu",),
        dtypes=(torch.bfloat16, torch.float16),
        max_elements=1 << 16,
        min_batch=2,
    ),
    KernelRule("batched", "tiny products likewise", devices=("cpu",), max_elements=1 << 10, min_batch=2),
    KernelRule("loop", "CPU libraries run large products one by one at least as fast as a batch", devices=("cpu",)),
    KernelRule("batched", "one launch for all matrices of a shape"),
)
"""What "auto" takes: the first row that admits the matrices. Whether that is the Gram form must not depend on device or
batch, since owners are assigned by `NewtonSchulz.flops` before either is known.
"""


def orthogonalize_reference(matrix: Tensor, coefficients: Sequence[Coefficients], eps: float = 1e-7) -> Tensor:
    """The polynomial as it is defined, in float64: the oracle of every kernel.

    Args:
        matrix: (m, n), any floating dtype.
        coefficients: (a, b, c) of each step.
        eps: The least value that the matrix is divided by.

    Returns:
        (m, n), float64.
    """
    x = matrix.double()
    x = x / x.norm().clamp(min=eps)
    for a, b, c in coefficients:
        xxt = x @ x.T
        x = a * x + b * (xxt @ x) + c * (xxt @ xxt @ x)
    return x


@dataclass(frozen=True)
class NewtonSchulz:
    """Orthogonalizes stacks of whole matrices.

    A zero matrix stays zero. A matrix whose norm is below `eps` is not brought to norm 1 and comes out smaller. Nothing
    is checked for NaN or infinity: decide on overflow before. A float32 or bfloat16 norm overflows for entries beyond
    about 1e19, and the result is zero.

    Attributes:
        coefficients: (a, b, c) of each step: `resolve_coefficients`.
        eps: The least value that a matrix is divided by.
        dtype: Of the iteration and of the result: bfloat16, float16, float32 or float64. "auto" never changes it.
        kernel: "auto" takes it from `KERNEL_TABLE`.
        exact: Run the operations of torch.optim.Muon in their order, in bfloat16, one matrix after another, so that the
            result is that of torch bit by bit on the same device.

    Raises:
        ConfigurationError: Options that cannot be right together.
        UnsupportedError: The Gram form in bfloat16, which is numerically unusable.
    """

    coefficients: tuple[Coefficients, ...]
    eps: float = 1e-7
    dtype: torch.dtype = torch.bfloat16
    kernel: Literal["auto", "loop", "batched", "gram"] = "auto"
    exact: bool = False

    def __post_init__(self) -> None:
        if not self.coefficients or any(not isinstance(step, tuple) or len(step) != 3 for step in self.coefficients):
            raise ConfigurationError(
                f"coefficients={self.coefficients!r} must be one (a, b, c) per step; resolve_coefficients() makes them"
            )
        if not 0 < self.eps < math.inf:
            raise ConfigurationError(f"eps={self.eps!r} must be > 0: a matrix is divided by its norm, at least by eps")
        if self.dtype not in _DTYPES:
            raise ConfigurationError(f"Newton-Schulz runs in one of {_names(_DTYPES)}, not in {_names([self.dtype])}")
        if self.kernel not in ("auto", "loop", "batched", "gram"):
            raise ConfigurationError(f'kernel={self.kernel!r}: the kernels are "auto", "loop", "batched" and "gram"')
        if self.kernel == "gram" and self.dtype == torch.bfloat16:
            raise UnsupportedError(
                'kernel="gram" in bfloat16 is numerically unusable: singular values leave [0, 1.2], and some '
                'coefficient sets overflow. Use float16 or float32 with "gram", or another kernel in bfloat16'
            )
        if self.exact and self.dtype != torch.bfloat16:
            raise ConfigurationError(
                "exact=True repeats torch.optim.Muon, which iterates in bfloat16, and the dtype is "
                f"{_names([self.dtype])}"
            )
        if self.exact and self.kernel not in ("auto", "loop"):
            raise ConfigurationError(
                f'exact=True repeats torch.optim.Muon, which loops over matrices, and the kernel is "{self.kernel}"'
            )

    @torch.no_grad()
    def __call__(self, matrices: Tensor) -> Tensor:
        """Orthogonalizes each of B matrices. No communication; the input is not changed.

        Args:
            matrices: (B, m, n), whole logical matrices without padding, on any device, of any floating dtype and any
                strides. The iteration runs in the orientation with fewer rows than columns, chosen from (m, n).

        Returns:
            (B, m, n) in `dtype`, new memory. For m > n its strides are those of a transposed stack.

        Raises:
            ConfigurationError: Not a stack of floating-point matrices.
            UnsupportedError: kernel="gram" in float32 while torch is set to compute float32 products in less.
        """
        if matrices.ndim != 3 or not matrices.is_floating_point():
            raise ConfigurationError(
                "Newton-Schulz takes a stack (B, m, n) of real floating-point matrices, not "
                f"{tuple(matrices.shape)} of {_names([matrices.dtype])}; a single matrix is a stack of 1"
            )
        batch, m, n = matrices.shape
        tall = m > n
        if matrices.numel() == 0:
            return matrices.new_empty((batch, m, n), dtype=self.dtype)
        wide = matrices.mT if tall else matrices
        kernel = self.kernel_for(m, n, batch, matrices.device)
        if kernel == "batched" or (kernel == "gram" and matrices.device.type != "cpu"):
            x = self._normalized(wide)
            result = self._direct(x) if kernel == "batched" else self._gram(x)
        else:
            result = torch.empty(wide.shape, dtype=self.dtype, device=matrices.device)
            run = self._exact if self.exact else self._gram if kernel == "gram" else self._direct
            for index in range(batch):
                result[index].copy_(run(self._normalized(wide[index])))
        return result.mT if tall else result

    def kernel_for(self, m: int, n: int, batch: int, device: torch.device | str) -> Kernel:
        """The kernel that runs for `batch` matrices of m x n on a device.

        Raises:
            UnsupportedError: kernel="gram" in float32 while torch is set to compute float32 products in less.
        """
        if self.exact:
            return "loop"
        if self.kernel == "gram" and not self._gram_is_sound():
            raise UnsupportedError(
                'kernel="gram" in float32 needs float32 products, and torch is set to compute them in less: use '
                'torch.set_float32_matmul_precision("highest"), or another kernel'
            )
        if self.kernel != "auto":
            return self.kernel
        small, large = sorted((m, n))
        # By name where it is one: torch.device("npu") exists only where the back end is installed.
        kind = device.partition(":")[0] if isinstance(device, str) else device.type
        for rule in KERNEL_TABLE:
            if rule.kernel == "gram" and not self._gram_is_sound():
                continue
            if rule.admits(small, large, batch, kind, self.dtype):
                return rule.kernel
        raise AssertionError("the last row of KERNEL_TABLE admits everything")

    def flops(self, m: int, n: int) -> int:
        """Floating-point operations for one m x n matrix, a multiplication and an addition counting as two.

        Of the form, direct or Gram, that `kernel_for` chooses, which is the same on every kind of device: owners are
        assigned by it. Terms below the products (norm, diagonals) are left out.
        """
        m, n = sorted((m, n))
        if self.kernel_for(m, n, 1, "cpu") != "gram":
            return len(self.coefficients) * (4 * m * m * n + 2 * m**3)
        total = 0
        for segment in _segments(self.coefficients):
            # X X^T and Q X; per step the square of R, per further step one product for Q and two for R.
            total += 4 * m * m * n + (8 * len(segment) - 6) * m**3
        return total

    @property
    def allows_gram_exchange(self) -> bool:
        """Whether the iteration may run in float32 by `gram_factor` whatever `dtype` is, and is only more accurate."""
        return (
            not self.exact
            and self.kernel in ("auto", "gram")
            and len(self.coefficients) <= _MOST_STEPS_IN_ONE_LOOK
            and _float32_products_are_float32()
        )

    def _gram_is_sound(self) -> bool:
        return self.dtype in (torch.float16, torch.float64) or (
            self.dtype == torch.float32 and _float32_products_are_float32()
        )

    def _normalized(self, x: Tensor) -> Tensor:
        """(m, n) or (B, m, n) divided by its norms, in `dtype` and new memory.

        The cast comes before the norm, as in torch.optim.Muon, except in float16: there a gradient under a loss scale
        would overflow in the cast. torch keeps the strides of the gradient; otherwise contiguous rows are better.
        """
        layout = torch.preserve_format if self.exact else torch.contiguous_format
        x = x.to(torch.float32 if self.dtype == torch.float16 else self.dtype, copy=True, memory_format=layout)
        norm = x.norm() if x.ndim == 2 else torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
        return x.div_(norm.clamp_(min=self.eps)).to(self.dtype)

    def _exact(self, x: Tensor) -> Tensor:
        """The operations of torch.optim.Muon in their order, results in new memory each time as there."""
        for a, b, c in self.coefficients:
            gram = x @ x.T
            update = torch.addmm(gram, gram, gram, beta=b, alpha=c)
            x = torch.addmm(x, update, x, beta=a)
        return x

    def _direct(self, x: Tensor) -> Tensor:
        """The same polynomial in buffers that are used again; x (m, n) or (B, m, n) is overwritten."""
        gram = x.new_empty((*x.shape[:-1], x.shape[-2]))
        update, spare = torch.empty_like(gram), torch.empty_like(x)
        by = symmetric_choice(x.device.type, x.dtype, x.shape[-2])
        for a, b, c in self.coefficients:
            _gram_matrix(x, by, out=gram)
            _commuting(gram, gram, gram, by, beta=b, alpha=c, out=update)
            _addmm(x, update, x, beta=a, out=spare)
            x, spare = spare, x
        return x

    def _gram(self, x: Tensor) -> Tensor:
        """The same polynomial, a segment of steps at a time as Q X with Q a polynomial of X X^T.

        Within a segment the matrix R that the next step needs is (a I + Z) R (a I + Z), where Z = b R + c R^2 and all
        factors commute.
        """
        for segment in _segments(self.coefficients):
            by = symmetric_choice(x.device.type, x.dtype, x.shape[-2])
            x = _factor(_gram_matrix(x, by), segment) @ x
        return x

    @torch.no_grad()
    def gram_factor(self, gram: Tensor) -> Tensor:
        """Q with Q X the orthogonalized X, from the Gram matrices X X^T of matrices that need not be at hand.

        All steps are taken without a second look at X. float32 bears that for the few steps of `allows_gram_exchange`.

        Args:
            gram: (B, m, m), float32 or float64, of matrices of m x n with m <= n, not normalized.

        Returns:
            (B, m, m) in the dtype of `gram`.
        """
        norm = gram.diagonal(dim1=-2, dim2=-1).sum(-1).clamp_(min=0).sqrt_().clamp_(min=self.eps)[..., None, None]
        return _factor(gram / (norm * norm), self.coefficients) / norm

    def gram_flops(self, m: int, n: int) -> int:
        """Floating-point operations of `gram_factor` for one m x n matrix."""
        return (8 * len(self.coefficients) - 6) * min(m, n) ** 3


def _factor(r: Tensor, steps: Sequence[Coefficients]) -> Tensor:
    """Q with Q X the result of `steps` on X, from R = X X^T: (m, m) or (B, m, m)."""
    q: Tensor | None = None
    by = symmetric_choice(r.device.type, r.dtype, r.shape[-2])
    for left, (a, b, c) in zip(reversed(range(len(steps))), steps):
        z = _commuting(r, r, r, by, beta=b, alpha=c)
        if q is None:
            q = z.clone()
            q.diagonal(dim1=-2, dim2=-1).add_(a)
        else:
            q = _commuting(q, z, q, by, beta=a)
        if left:
            rz = _commuting(r, z, r, by, beta=a)
            r = _commuting(rz, z, rz, by, beta=a)
    assert q is not None
    return q


def _segments(coefficients: Sequence[Coefficients]) -> Iterator[Sequence[Coefficients]]:
    """The steps that the Gram form takes between two looks at X: 2, then 3 at a time."""
    start, end = 0, _FIRST_SEGMENT
    while start < len(coefficients):
        yield coefficients[start:end]
        start, end = end, end + _SEGMENT


def _gram_matrix(x: Tensor, by: str, *, out: Tensor | None = None) -> Tensor:
    """X X^T of matrices or of stacks of them, by an implementation of symmetric products."""
    return torch.matmul(x, x.mT, out=out) if by == "torch" else symmetric_product(x, x, out=out, implementation=by)


def _commuting(
    x: Tensor, left: Tensor, right: Tensor, by: str, *, beta: float, alpha: float = 1.0, out: Tensor | None = None
) -> Tensor:
    """`_addmm` of polynomials of one symmetric matrix: they commute, so the result is symmetric."""
    if by == "torch":
        return _addmm(x, left, right, beta=beta, alpha=alpha, out=out)
    return symmetric_product(left, right, add=x, alpha=alpha, beta=beta, out=out, implementation=by)


def _addmm(
    x: Tensor, left: Tensor, right: Tensor, *, beta: float, alpha: float = 1.0, out: Tensor | None = None
) -> Tensor:
    """Returns beta x + alpha (left @ right), of matrices or of stacks of them."""
    function = torch.addmm if x.ndim == 2 else torch.baddbmm
    return function(x, left, right, beta=beta, alpha=alpha, out=out)


def _float32_products_are_float32() -> bool:
    try:
        return torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:
        # torch has an older and a newer way to set this and refuses to answer once both, or the newer alone, were used.
        return False


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
