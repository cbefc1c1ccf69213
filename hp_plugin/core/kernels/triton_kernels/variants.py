"""With which tiles and options each kernel runs, per platform and dtype, and the list of all of them. Imports nothing.

`launch.py` takes its tiles from here, and `tools/compile_kernels.py` compiles the whole list for every target, so what
is compiled without a device is what would run on one. Dtypes go by Triton's names: fp32, fp16, bf16.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

PLATFORMS = ("cuda", "npu")
FLOATS = ("fp32", "bf16", "fp16")

MAX_COUNT = 2**31 - 2**16
"""Kernels count elements in 32 bits; the distance to 2**31 leaves room for the last block."""

CHUNK = 32768
"""Elements of a piece of which `sum_of_squares_kernel` makes one sum."""

PROGRAMS: Mapping[tuple[str, str], int] = {
    ("cuda", "vector"): 1 << 16,
    ("cuda", "cube"): 1 << 24,
    # As many as an Ascend 910B or 910_93 has cores of the kind, or a few more, which then take turns. The driver takes
    # 65,535 at most.
    ("npu", "vector"): 48,
    ("npu", "cube"): 24,
}
"""The most programs of a launch, by platform and kind of core; a program takes one tile after another."""


@dataclass(frozen=True)
class Tile:
    """Compile-time constants of a launch.

    Attributes:
        constants: Of the kernel, by name.
        num_warps: Warps of a program, CUDA only.
        num_stages: Depth of the software pipeline, CUDA only.
    """

    constants: Mapping[str, int]
    num_warps: int = 4
    num_stages: int = 3


@dataclass(frozen=True)
class Variant:
    """A kernel for operands of given dtypes.

    Attributes:
        module: `elementwise` or `products`.
        kernel: Name of the function.
        signature: Type of each argument that is no compile-time constant, in order; pointers begin with an asterisk.
        tile: Its tile.
        flags: Further compile-time constants.
    """

    module: str
    kernel: str
    signature: Mapping[str, str]
    tile: Tile
    flags: Mapping[str, int] = field(default_factory=dict)

    @property
    def constants(self) -> dict[str, int]:
        """All compile-time constants."""
        return {**self.flags, **self.tile.constants}

    @property
    def name(self) -> str:
        """Kernel, dtypes of its operands, flags and tile, in one word."""
        dtypes = "-".join(kind[1:] for kind in self.signature.values() if kind.startswith("*"))
        constants = "-".join(f"{name.lower()}{int(value)}" for name, value in self.constants.items())
        return f"{self.kernel}.{dtypes}.{constants}"


def elementwise_tile(kernel: str, platform: str) -> Tile:
    """The tile of a kernel of `elementwise.py`. On Ascend what a tile needs must fit the unified buffer twice."""
    if kernel == "decay_update_kernel":
        return Tile({"ROWS": 4, "COLS": 1024} if platform == "npu" else {"ROWS": 4, "COLS": 256})
    if kernel == "sum_of_squares_kernel":
        return Tile({"CHUNK": CHUNK, "BLOCK": 4096 if platform == "npu" else 2048}, num_warps=8)
    if kernel == "adamw_kernel":
        return Tile({"BLOCK": 2048 if platform == "npu" else 1024})
    return Tile({"BLOCK": 4096 if platform == "npu" else 2048})


def product_tile(platform: str, dtype: str) -> Tile:
    """The tile of the symmetric product. Ascend writes a tile's transpose through the unified buffer: 64 x 64 fits."""
    if platform == "npu":
        return Tile({"BLOCK": 64, "BLOCK_K": 64 if dtype == "fp32" else 128})
    if dtype == "fp32":
        return Tile({"BLOCK": 64, "BLOCK_K": 32}, num_warps=4, num_stages=3)
    return Tile({"BLOCK": 128, "BLOCK_K": 64}, num_warps=8, num_stages=3)


def all_variants(platform: str) -> Iterator[Variant]:
    """Every variant that a platform's table can choose."""
    for source, target in (("fp32", "fp32"), ("bf16", "fp32"), ("fp16", "fp32"), ("fp32", "bf16"), ("bf16", "bf16")):
        for accumulate in (False, True):
            signature = {"dst_ptr": f"*{target}", "src_ptr": f"*{source}", "alpha": "fp32", "count": "i32"}
            tile = elementwise_tile("scale_kernel", platform)
            yield Variant("elementwise", "scale_kernel", signature, tile, {"ACCUMULATE": accumulate})
        signature = {"target_ptr": f"*{target}", "values_ptr": f"*{source}"}
        signature |= dict.fromkeys(("rows", "cols", "target_stride", "values_stride"), "i32")
        signature |= dict.fromkeys(("decay", "step"), "fp32")
        tile = elementwise_tile("decay_update_kernel", platform)
        yield Variant("elementwise", "decay_update_kernel", signature, tile)
    numbers = ("decay", "beta1_complement", "beta2", "beta2_complement", "step_size", "bias_correction2_sqrt", "eps")
    for param, grad, state in (("fp32", "fp32", "fp32"), ("fp32", "bf16", "fp32"), ("bf16", "bf16", "bf16")):
        signature = {"param_ptr": f"*{param}", "grad_ptr": f"*{grad}"}
        signature |= {"exp_avg_ptr": f"*{state}", "exp_avg_sq_ptr": f"*{state}", "count": "i32"}
        signature |= dict.fromkeys(numbers, "fp32")
        yield Variant("elementwise", "adamw_kernel", signature, elementwise_tile("adamw_kernel", platform))
    for dtype in FLOATS:
        signature = {"base_ptr": f"*{dtype}", "offsets_ptr": "*i64", "lengths_ptr": "*i32", "sums_ptr": "*fp32"}
        signature |= {"chunks": "i32"}
        for alignment in (1, 8):
            tile = elementwise_tile("sum_of_squares_kernel", platform)
            yield Variant("elementwise", "sum_of_squares_kernel", signature, tile, {"ALIGNMENT": alignment})
        signature = dict.fromkeys(("left_ptr", "right_ptr", "add_ptr", "out_ptr"), f"*{dtype}")
        signature |= dict.fromkeys(("batch", "m", "k"), "i32") | dict.fromkeys(("alpha", "beta", "shift"), "fp32")
        for has_add in (False, True):
            flags = {"HAS_ADD": has_add, "UPCAST": False}
            yield Variant("products", "symmetric_product_kernel", signature, product_tile(platform, dtype), flags)
