"""Compiles every Triton kernel for devices that need not be there.

    python tools/compile_kernels.py cuda   [--only TEXT]   to a cubin for sm_80, sm_90 and sm_100
    python tools/compile_kernels.py ascend [--only TEXT]   to HIVM for Ascend910B4 and Ascend910_9391

What is compiled is `all_variants` of hp_plugin/core/kernels/triton_kernels/variants.py: every kernel with the dtypes,
tiles and options that the launcher would choose. `cuda` needs Triton; `ascend` needs triton-ascend and ascendnpu-ir,
whose Triton excludes the other one, so it runs in an environment of its own (`tools/bootstrap.sh setup ascend FOLDER`).
Neither needs torch: the sources are loaded by path.

For CUDA, the shared memory that a kernel asks for is held against what a block of the architecture may have. For
Ascend, Triton lowers a kernel to linear algebra, and bishengir-compile takes it through its whole pipeline: it allots
unified buffers, schedules and synchronises, and fails where a buffer does not fit. Only the last step, HIVM to machine
code, is a program of CANN (`hivmc`) that cannot be had alone; a stand-in for it keeps what it is given, which is the
result here. A kernel that fits only once the compiler has given up double buffering counts as one that does not fit.

Prints one line for each kernel that fails, a summary, and exits with 1 if any failed.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import re
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

SOURCES = Path(__file__).resolve().parents[1] / "hp_plugin" / "core" / "kernels" / "triton_kernels"

CUDA_SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Bytes that one block may have, by compute capability (CUDA C++ Programming Guide, technical specifications)."""
ASCEND_TARGETS = ("Ascend910B4", "Ascend910_9391")
STAND_IN = """#!/bin/sh
if [ "$1" = "--version" ]; then echo "hivmc 1.2.0"; exit 0; fi
for argument in "$@"; do
    case $argument in *.mlir) cp "$argument" "$HP_KEPT_HIVM" ;; esac
done
exit 1
"""


class DoesNotFitError(Exception):
    """A kernel does not compile for a target; the message says why."""


def load(name: str) -> ModuleType:
    """A module of `SOURCES`, by path, so that the package and torch stay unimported."""
    spec = importlib.util.spec_from_file_location(name, SOURCES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


# ------------------------------------------------------------------------------------------------------------- CUDA


def compile_for_cuda(kernel: Any, variant: Any, capability: int, *, aligned: bool) -> int:
    """Compiles to a cubin and returns the bytes of shared memory that it asks for.

    Args:
        kernel: The function.
        variant: Of `variants.all_variants`.
        capability: Compute capability, ten times the major number plus the minor.
        aligned: Whether pointers and counts are multiples of 16, which Triton makes other code for.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {**variant.signature, **dict.fromkeys(variant.constants, "constexpr")}
    ordered = {name: signature[name] for name in kernel.arg_names}
    divisible = [i for i, kind in enumerate(ordered.values()) if kind.startswith("*") or kind in ("i32", "i64")]
    attributes = {(index,): [["tt.divisibility", 16]] for index in divisible} if aligned else {}
    source = ASTSource(fn=kernel, signature=ordered, constexprs=variant.constants, attrs=attributes)
    tile = variant.tile
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages, "enable_fp_fusion": False}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    if not compiled.asm.get("cubin"):
        raise DoesNotFitError("no cubin came out")
    limit = CUDA_SHARED_MEMORY[capability]
    if compiled.metadata.shared > limit:
        raise DoesNotFitError(f"needs {compiled.metadata.shared} bytes of shared memory, a block may have {limit}")
    return int(compiled.metadata.shared)


# ----------------------------------------------------------------------------------------------------------- Ascend


def lower_for_ascend(kernel: Any, variant: Any, target: str) -> str:
    """Lowers to the dialect of linear algebra that bishengir-compile takes; the same for every target."""
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler.compiler import make_backend

    machine = GPUTarget("npu", target, 0)
    backend = make_backend(machine)
    options = backend.parse_options({})
    source = ASTSource(fn=kernel, signature=dict(variant.signature), constants=variant.constants)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    module = source.make_ir(options, backend.get_codegen_implementation(), backend.get_module_map(), context)
    stages: dict[str, Callable[[Any, dict[str, Any]], Any]] = {}
    backend.add_stages(stages, options)
    metadata = {"target": machine, "hash": variant.name, "name": variant.kernel, **options.__dict__}
    for stage in ("ttir", "ttadapter"):
        module = stages[stage](module, metadata)
    return str(module)


def compile_for_ascend(lowered: str, target: str, folder: Path) -> str:
    """Takes what `lower_for_ascend` gave to scheduled HIVM, which is returned as text."""
    package = importlib.util.find_spec("ascendnpuir")
    if package is None or package.origin is None:
        raise SystemExit("error: ascendnpu-ir is not installed here; see tools/bootstrap.sh setup ascend FOLDER")
    stand_in = folder / "hivmc"
    if not stand_in.exists():
        stand_in.write_text(STAND_IN)
        stand_in.chmod(stand_in.stat().st_mode | stat.S_IXUSR)
    adapter, kept = folder / "kernel.ttadapter.mlir", folder / "kept.hivm.mlir"
    adapter.write_text(lowered)
    kept.unlink(missing_ok=True)
    command = [
        str(Path(package.origin).parent / "bin" / "bishengir-compile"),
        str(adapter),
        f"--target={target}",
        # What triton-ascend passes by default.
        "--enable-auto-multi-buffer=True",
        "--enable-hfusion-compile=true",
        "--enable-hivm-compile=true",
        "--enable-triton-kernel-compile=true",
        "-o",
        str(folder / "kernel.o"),
    ]
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "HP_KEPT_HIVM": str(kept)}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)
    said = result.stdout + result.stderr
    overflow = re.search(r"(\w+) overflow, requires (\d+) bits while (\d+) bits available", said)
    if overflow is not None:
        raise DoesNotFitError(overflow.group(0))
    if "overflow detected" in said:
        raise DoesNotFitError("fits the unified buffer only without double buffering")
    if not kept.exists():
        errors = [line for line in said.splitlines() if "error" in line.lower()]
        raise DoesNotFitError("; ".join(errors[:3]) or f"bishengir-compile ended with {result.returncode}")
    return kept.read_text()


# ------------------------------------------------------------------------------------------------------------- both


def compile_all(platform: str, only: str) -> int:
    """Compiles everything for a platform, prints what fails, and returns the number of failures."""
    variants = load("variants")
    modules = {name: load(name) for name in ("elementwise", "products")}
    failures, done, largest, began = 0, 0, 0, time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        for variant in variants.all_variants(platform):
            if only not in variant.name:
                continue
            kernel = getattr(modules[variant.module], variant.kernel)
            targets = CUDA_SHARED_MEMORY if platform == "cuda" else ASCEND_TARGETS
            lowered = lower_for_ascend(kernel, variant, ASCEND_TARGETS[0]) if platform == "npu" else ""
            for target in targets:
                try:
                    if platform == "cuda":
                        for aligned in (False, True):
                            largest = max(largest, compile_for_cuda(kernel, variant, target, aligned=aligned))
                    elif "hivm.hir" not in compile_for_ascend(lowered, target, Path(name)):
                        raise DoesNotFitError("the result holds no instruction of HIVM")
                    done += 1
                except DoesNotFitError as error:
                    failures += 1
                    print(f"{variant.name} for {target}: {error}", flush=True)
    what = f", at most {largest} bytes of shared memory" if platform == "cuda" else ""
    seconds = time.monotonic() - began
    print(f"compile_kernels {platform}: {done} passed, {failures} failed{what}, {seconds:.0f} s")
    if done + failures == 0:
        print(f"error: no variant has {only!r} in its name")
        return 1
    return failures


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("platform", choices=("cuda", "ascend"))
    parser.add_argument("--only", default="", help="compile variants only whose name contains this")
    options = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise SystemExit("error: TRITON_INTERPRET=1 is set; nothing can be compiled with it")
    sys.exit(1 if compile_all("npu" if options.platform == "ascend" else "cuda", options.only) else 0)


if __name__ == "__main__":
    main()
