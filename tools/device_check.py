"""Checks the kernels on one CUDA GPU, measures them, and prints one table.

    python tools/device_check.py [--seconds 300] [--json FILE]

Run it with the Python that has hp_plugin, torch for CUDA and Triton; it switches the kernels on by itself.

It is meant to take at most six minutes: sections that would begin after `--seconds` are left out and listed. Exit code
0 means that every kernel is right; speeds are reported and judged by the reader, with the target beside them. Sections:

1. the matrix peak: products of 8192 x 8192 in bf16 and fp16;
2. every kernel against its reference, on odd sizes;
3. orthogonalization of 96 matrices of 4096 x 4096: torch.optim.Muon's function one by one, ours one by one, batched,
   with symmetric products by blocks and by Triton, and the Gram form in fp16. Target: at most 0.60 of torch's time;
4. FSDP at world size 1 over NCCL, ours against FSDP2: host time of a step, and calls and time of what copies.

**It has never run on a GPU.** `--dry-run` runs the same code on CPU: small sizes, gloo, kernels in Triton's
interpreter; its times mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

TARGET = 0.60
"""Of torch.optim.Muon's time, for section 3."""


@dataclass
class Setting:
    """Where and how large.

    Attributes:
        device: `cuda` or `cpu`.
        peak_size: Rows of the products of section 1.
        matrices: Number of matrices of section 3.
        matrix_size: Their rows and columns.
        chunk: How many of them are one batch.
        repetitions: Timed runs of each variant, interleaved.
        layers: Layers of section 4.
        width: Their width.
    """

    device: str
    peak_size: int = 8192
    matrices: int = 96
    matrix_size: int = 4096
    chunk: int = 32
    repetitions: int = 3
    layers: int = 16
    width: int = 2048


DRY = Setting("cpu", peak_size=128, matrices=2, matrix_size=256, chunk=2, repetitions=1, layers=2, width=16)


@dataclass
class Results:
    """What was found: rows of the table, and what failed or was left out."""

    rows: list[dict[str, str]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def add(self, section: str, what: str, value: str, note: str = "") -> None:
        """A row of the table."""
        self.rows.append({"section": section, "what": what, "value": value, "note": note})


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300.0, help="begin no section later than this")
    parser.add_argument("--json", help="write the rows to this file, too")
    parser.add_argument("--dry-run", action="store_true", help="on CPU, with sizes and times that mean nothing")
    options = parser.parse_args()
    if options.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    import torch

    if not options.dry_run and not torch.cuda.is_available():
        raise SystemExit("error: torch finds no CUDA device; --dry-run runs the script's logic on CPU")
    setting = DRY if options.dry_run else Setting("cuda")
    results, began = Results(), time.monotonic()
    with switched_on(setting):
        for section in (matrix_peak, correctness, orthogonalization, sharding):
            if time.monotonic() - began > options.seconds:
                results.left_out.append(section.__name__)
                continue
            section(setting, results)
    report(setting, results, time.monotonic() - began)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"dry_run": options.dry_run, **asdict(results)}, file, indent=1)
    sys.exit(1 if results.failures else 0)


@contextlib.contextmanager
def switched_on(setting: Setting) -> Iterator[None]:
    """Everything of the table that can be tried on a GPU; on CPU, tensors take the rows of CUDA."""
    from hp_plugin.core.kernels import table
    from hp_plugin.core.kernels.availability import absent_sets

    with use_kernels(table.Kernels(frozenset({"triton", "blocks"}), absent_sets(), {"cpu": "cuda"})):
        if "triton" in absent_sets():
            raise SystemExit(f"error: {absent_sets()['triton']}")
        yield


@contextlib.contextmanager
def use_kernels(kernels: Any) -> Iterator[None]:
    """Another application of the table, for the time of the context."""
    from hp_plugin.core.kernels import table

    before, table.kernels = table.kernels, lambda: kernels
    try:
        yield
    finally:
        table.kernels = before


def seconds_of(run: Callable[[], object], device: str) -> float:
    """Time of one call until the device is done."""
    import torch

    if device == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def best_of(variants: dict[str, Callable[[], object]], setting: Setting) -> dict[str, float]:
    """The least time of each, after one run for warm-up, interleaved."""
    for run in variants.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(setting.repetitions):
        for name, run in variants.items():
            times[name].append(seconds_of(run, setting.device))
    return {name: min(found) for name, found in times.items()}


# --------------------------------------------------------------------------------------------------------- sections


def matrix_peak(setting: Setting, results: Results) -> None:
    """Section 1."""
    import torch

    size = setting.peak_size
    for dtype in (torch.bfloat16, torch.float16):
        left = torch.randn(size, size, device=setting.device).to(dtype)
        out = torch.empty_like(left)

        def run(left: Any = left, out: Any = out) -> None:
            for _ in range(10):
                torch.mm(left, left, out=out)

        seconds = best_of({"product": run}, setting)["product"] / 10
        results.add("peak", f"{size} x {size}, {str(dtype)[6:]}", f"{2 * size**3 / seconds / 1e12:.1f} TFLOP/s")


def correctness(setting: Setting, results: Results) -> None:
    """Section 2: each kernel, the largest error relative to the largest magnitude, against float64."""
    import torch

    from hp_plugin.core.kernels import accumulate, adam, symmetric
    from hp_plugin.core.kernels.triton_kernels import launch

    device = setting.device

    def drawn(*shape: int, dtype: Any = torch.float32) -> Any:
        return torch.randn(*shape, device=device).to(dtype)

    def judge(what: str, found: Any, exact: Any, limit: float) -> None:
        error = float((found.double() - exact.double()).abs().max() / exact.double().abs().max().clamp(min=1e-30))
        results.add("correct", what, f"{error:.1e}", f"limit {limit:.0e}")
        if not error <= limit:
            results.failures.append(f"{what}: error {error:.2e}, limit {limit:.0e}")

    torch.manual_seed(0)
    count = 300_001 if device == "cuda" else 3001
    for source in (torch.float32, torch.bfloat16, torch.float16):
        src, dst = drawn(count, dtype=source), drawn(count)
        expected = dst.clone()
        launch.scale_(dst, src, 1 / 3, accumulate=True)
        accumulate.accumulate_scaled_reference(expected, src, 1 / 3)
        judge(f"accumulate {str(source)[6:]} (bits: limit 0)", dst, expected, 0.0)
        tensors = [drawn(count, dtype=source), drawn(7, dtype=source), drawn(99, 33, dtype=source)]
        exact = sum((tensor.double() ** 2).sum() for tensor in tensors)
        judge(f"sums of squares {str(source)[6:]}", launch.sums_of_squares(tensors), exact, 1e-5)
    narrow = torch.empty(count, dtype=torch.bfloat16, device=device)
    wide = drawn(count)
    launch.scale_(narrow, wide, 0.5, accumulate=False)
    judge("copy to bfloat16", narrow, wide * 0.5, 8e-3)
    target, values = drawn(123, 457)[3:, 5:], drawn(130, 460, dtype=torch.bfloat16)[10:, 8:]
    exact = 0.99 * target.double() - 0.02 * values.double()
    launch.decay_update_(target, values, 0.99, -0.02)
    judge("decay and update", target, exact, 1e-6)
    options = adam.AdamOptions(1e-2, (0.9, 0.95), 1e-8, 0.1)
    for grad in (torch.float32, torch.bfloat16):
        tensors = [drawn(count), drawn(count, dtype=grad), drawn(count), drawn(count).abs()]
        mine = adam.AdamShard(*tensors, torch.tensor(4.0))
        exact_shard = adam.AdamShard(*(tensor.double() for tensor in mine))
        launch.adamw_(*mine[:4], step=5, **options._asdict())
        adam.adamw_reference(exact_shard, options)
        judge(f"AdamW, gradient {str(grad)[6:]}", mine.param, exact_shard.param, 1e-6)
    shapes = ((1, 1023, 777), (3, 640, 1111)) if device == "cuda" else ((2, 140, 70),)
    for implementation, dtype, limit in (
        ("triton", torch.bfloat16, 8e-3),
        ("triton", torch.float16, 1e-3),
        ("triton", torch.float32, 1e-5),
        ("blocks", torch.float32, 1e-5),
        ("blocks", torch.bfloat16, 8e-3),
    ):
        for shape in shapes:
            x = drawn(*shape, dtype=dtype)
            found = symmetric.symmetric_product(x, x, implementation=implementation)
            name = f"X X^T {implementation} {str(dtype)[6:]} {shape}"
            judge(name, found, x.double() @ x.double().mT, limit)
            if not torch.equal(found, found.mT.contiguous()):
                results.failures.append(f"{name}: not symmetric bit for bit")


def orthogonalization(setting: Setting, results: Results) -> None:
    """Section 3."""
    import torch
    from torch.optim._muon import _zeropower_via_newtonschulz as of_torch

    from hp_plugin.core.kernels import table
    from hp_plugin.core.muon.coefficients import resolve_coefficients
    from hp_plugin.core.muon.newton_schulz import NewtonSchulz, orthogonalize_reference

    steps = resolve_coefficients("classic", None)
    size, device = setting.matrix_size, setting.device
    stack = torch.randn(setting.matrices, size, size, device=device, dtype=torch.bfloat16)
    exact = orthogonalize_reference(stack[0], steps)
    sets: dict[str, tuple[Any, Any, frozenset[str]]] = {
        "bf16, one by one": (torch.bfloat16, "loop", frozenset()),
        "bf16, batched": (torch.bfloat16, "batched", frozenset()),
        "bf16, batched, blocks": (torch.bfloat16, "batched", frozenset({"blocks"})),
        "bf16, batched, Triton": (torch.bfloat16, "batched", frozenset({"triton"})),
        "fp16, batched, Triton": (torch.float16, "batched", frozenset({"triton"})),
        "fp16 Gram, Triton": (torch.float16, "gram", frozenset({"triton"})),
    }
    (coefficients,) = set(steps)  # one triple, as torch takes it

    def torch_muon() -> Any:
        return [of_torch(matrix, coefficients, len(steps), 1e-7) for matrix in stack]

    def ours(dtype: Any, kernel: Any, on: frozenset[str]) -> Callable[[], Any]:
        iteration = NewtonSchulz(steps, dtype=dtype, kernel=kernel)
        chosen = table.Kernels(on, {}, {"cpu": "cuda"})

        def run() -> Any:
            with use_kernels(chosen):
                return [iteration(part) for part in stack.split(setting.chunk)]

        return run

    variants: dict[str, Callable[[], Any]] = {"torch.optim.Muon": torch_muon}
    variants |= {name: ours(*how) for name, how in sets.items()}
    for name, run in variants.items():
        first = run()[0]
        error = float(((first if first.ndim == 2 else first[0]).double() - exact).norm() / exact.norm())
        if not error <= 1e-1:
            results.failures.append(f"orthogonalization by {name}: error {error:.2e}, limit 0.1")
    times = best_of(variants, setting)
    flops = setting.matrices * len(steps) * 6 * size**3
    for name, seconds in times.items():
        ratio = seconds / times["torch.optim.Muon"]
        note = f"{ratio:.2f} of torch.optim.Muon, {flops / seconds / 1e12:.0f} TFLOP/s of the direct form"
        results.add("Newton-Schulz", name, f"{seconds * 1e3:.1f} ms", note)
    best = min(times[name] for name in sets) / times["torch.optim.Muon"]
    met = "not judged on CPU" if device == "cpu" else "met" if best <= TARGET else "missed"
    results.add("Newton-Schulz", "best of ours", f"{best:.2f}", f"target {TARGET:.2f}: {met}")


def sharding(setting: Setting, results: Results) -> None:
    """Section 4."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard as fsdp2

    import hp_plugin

    with tempfile.TemporaryDirectory() as folder:
        if setting.device == "cuda":
            torch.cuda.set_device(0)
        backend = "nccl" if setting.device == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            plain = init_device_mesh(setting.device, (1,))
            ours = init_device_mesh(setting.device, (1, 1), mesh_dim_names=("dp_replicate", "dp_shard"))
            for name, shard, mesh in (("FSDP2", fsdp2, plain), ("hp_plugin", hp_plugin.fully_shard, ours)):
                _time_sharded(name, shard, mesh, setting, results)
        finally:
            dist.destroy_process_group()


def _time_sharded(name: str, shard: Any, mesh: Any, setting: Setting, results: Results) -> None:
    import torch
    from torch import nn
    from torch.profiler import ProfilerActivity, profile

    width = setting.width
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        for _ in range(setting.layers)
    ]
    model = nn.Sequential(*blocks).to(setting.device)
    for block in model:
        shard(block, mesh=mesh)
    shard(model, mesh=mesh)
    batch = torch.randn(4, width, device=setting.device)  # so few tokens that the host decides the time

    def step() -> None:
        model(batch).square().mean().backward()
        model.zero_grad(set_to_none=True)

    for _ in range(3):
        step()
    host, whole = [], []
    for _ in range(max(3, setting.repetitions)):
        whole.append(seconds_of(lambda: host.append(_host_seconds(step)), setting.device))
    per_layer = 1e6 / setting.layers
    results.add("FSDP", f"{name}: host time of a step", f"{min(host) * per_layer:.0f} us a layer")
    results.add("FSDP", f"{name}: time of a step", f"{min(whole) * per_layer:.0f} us a layer")
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if setting.device == "cuda" else [])
    with profile(activities=activities) as recorded:
        step()
    copies = [event for event in recorded.key_averages() if _copies(event.key)]
    calls = sum(event.count for event in copies)
    device_time = sum(getattr(event, "self_device_time_total", 0.0) for event in copies)
    note = ", ".join(f"{event.key} {event.count}" for event in copies)
    results.add("FSDP", f"{name}: copies of a step", f"{calls} calls, {device_time:.0f} us on the device", note)


def _host_seconds(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def _copies(operation: str) -> bool:
    """Whether an operation of the dispatcher moves data without computing."""
    names = ("aten::copy_", "aten::_foreach_copy_", "aten::split_with_sizes_copy", "aten::cat")
    return operation in names or operation.startswith(("fsdp::all_gather_copy", "fsdp::split", "fsdp::chunk_cat"))


# ------------------------------------------------------------------------------------------------------------ table


def report(setting: Setting, results: Results, seconds: float) -> None:
    """Prints the table."""
    import torch
    import triton

    name = torch.cuda.get_device_name(0) if setting.device == "cuda" else "CPU, dry run: times mean nothing"
    print(f"device_check on {name}; torch {torch.__version__}, triton {triton.__version__}; {seconds:.0f} s\n")
    widths = [max([len(key), *(len(row[key]) for row in results.rows)]) for key in ("section", "what", "value")]
    for row in results.rows:
        cells = (row[key].ljust(width) for key, width in zip(("section", "what", "value"), widths))
        print("  ".join((*cells, row["note"])).rstrip())
    for line in results.left_out:
        print(f"left out for want of time: {line}")
    for line in results.failures:
        print(f"FAILED: {line}")
    print(f"\n{len(results.failures)} failed" if results.failures else "\nevery kernel is right")


if __name__ == "__main__":
    main()
