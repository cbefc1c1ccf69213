"""DeepSpeed's own unit tests, on our engine: `python -m tests.deepspeed.upstream CHECKOUT [FILES...]`.

CHECKOUT is a checkout of github.com/deepspeedai/DeepSpeed, best of the release that is installed; FILES are paths below
its `tests/unit`, by default those that test what the engine does. Options:

    --engine hyperfsdp   the tests get ZeRO stage 3 and the block "hyperfsdp" through `deepspeed.initialize`
    --engine stage3      the same without the block: what DeepSpeed's ZeRO-3 makes of the test
    --engine stock       the tests as they are: what cannot pass on this machine
    --fp32               tests that choose a dtype compute in fp32, so that sums do not differ by bf16's rounding
    -k EXPRESSION, --test-seconds N, --file-seconds N, --results FILE (one line of JSON per test)

The tests are copied to a temporary folder and run on CPU, whatever the machine has. Each file gives one line of counts,
followed by every reason for which tests failed, were refused or skipped themselves, with its count. "Refused" are tests
in which our engine raised UnsupportedError or ConfigurationError: settings that it names, with what to use instead. No
test of the suite itself runs this: a checkout is not a dependency.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.deepspeed import upstream_plugin

ROOT = Path(__file__).resolve().parents[2]
FILES = (
    *(
        f"checkpoint/test_{name}.py"
        for name in (
            "latest_checkpoint",
            "lr_scheduler",
            "other_optimizer",
            "shared_weights",
            "tag_validation",
            "convert_checkpoint",
            "moe_checkpoint",
            "universal_checkpoint",
            "zero_optimizer",
        )
    ),
    *(
        f"runtime/test_{name}.py"
        for name in (
            "lr_schedulers",
            "ds_initialize",
            "no_sync_ctxt",
            "ds_config_dict",
            "multi_output_model",
            "multiple_models",
            "autocast",
        )
    ),
    *(
        f"runtime/zero/test_{name}.py"
        for name in (
            "zero_grad_clip",
            "zero_context",
            "zero_context_return",
            "zero_context_ancestry",
            "zero_tensor_fragment",
            "unwrap_model",
            "ignore_unused_parameters",
            "zero_dynamic_class",
            "zero_nesting_init",
        )
    ),
    "v1/zero/test_zero.py",
    "v1/zero/test_zero_user_backward.py",
    "v1/zero/test_zero_coalesce_grad_reduction.py",
    "v1/half_precision/test_bf16.py",
    "v1/half_precision/test_gradient_clipping_default.py",
    "runtime/half_precision/test_fp16.py",
    "monitor/test_monitor.py",
    "profiling/flops_profiler/test_flops_profiler.py",
)
_OURS = re.compile(r"hp_plugin\.errors\.(?:UnsupportedError|ConfigurationError): (.*)")
_ASSERTED = re.compile(r"^E +(\S.*)", re.MULTILINE)
_FAILING_LINE = re.compile(r'^  File "[^"]*", line \d+, in \w+\n(.*)', re.MULTILINE)
_EXCEPTION = re.compile(r"^(?:E +)?([\w.]*(?:Error|Exception|Failed)\b.*)", re.MULTILINE)


@dataclass(frozen=True)
class Outcome:
    """What became of one test: "passed", "failed", "refused" or "skipped"; or of a file: "unfinished"; and why."""

    kind: str
    reason: str

    @classmethod
    def of(cls, reported: dict[str, Any]) -> Outcome:
        """Reads a line that `upstream_plugin` wrote."""
        kind, text = reported["outcome"], reported["reason"]
        if kind == "failed":
            if found := _OURS.search(text):
                return cls("refused", found[1])
            if asserted := _ASSERTED.findall(text):
                return cls(kind, " ".join(asserted[:2]))
            found = _EXCEPTION.search(text)
            reason = found[1] if found else text.strip().splitlines()[-1]
            # A bare assertion says nothing; the line of the test that made it does.
            lines = _FAILING_LINE.findall(text[: found.start()] if found else text)
            return cls(kind, f"{reason} {lines[-1].strip()}" if lines and reason == "AssertionError" else reason)
        return cls(kind, text.removeprefix("Skipped: ").strip())


def copy_tests(checkout: Path, to: Path) -> Path:
    """Copies what the unit tests need, with our hook in their common module; returns the folder `unit`."""
    source = checkout / "tests"
    for name in ("conftest.py", "pytest.ini"):
        shutil.copy(source / name, to / name)
    for name in ("unit", "model"):
        shutil.copytree(source / name, to / name)
    with (to / "unit" / "common.py").open("a", encoding="utf-8") as common:
        common.write(
            "\n\nimport sys as _sys\nfrom tests.deepspeed import upstream_plugin as _plugin\n\n"
            "_plugin.adopt(_sys.modules[__name__])\n"
        )
    return to / "unit"


def run_file(file: str, unit: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Runs one file in a pytest of its own; returns what was reported of each of its tests, one that hung included."""
    results = unit.parent / "results.jsonl"
    results.write_text("", encoding="utf-8")
    environment = {
        **os.environ,
        "DS_ACCELERATOR": "cpu",
        "LOCAL_SIZE": "8",  # the number of devices that a CPU is said to have
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        upstream_plugin.ENGINE: options.engine,
        upstream_plugin.RESULTS: str(results),
        upstream_plugin.TEST_SECONDS: str(options.test_seconds),
        upstream_plugin.FP32: "1" if options.fp32 else "",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.deepspeed.upstream_plugin", "-p", "no:cacheprovider"]
    command += ["-p", "no:timeout", f"--basetemp={unit.parent / 'tmp'}", f"unit/{file}"]
    command += ["-k", options.k] if options.k else []
    with (unit.parent / "output.txt").open("w+", encoding="utf-8") as output:
        process = subprocess.Popen(
            command,
            cwd=unit.parent,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(options.file_seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # ranks that hang outlive their pytest
            process.wait()
        reported = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
        if code not in (0, 1, 5):
            output.seek(0)
            what = f"ended with {code}" if code is not None else f"was ended after {options.file_seconds} s"
            reason = f"pytest {what}: {' | '.join(output.read().strip().splitlines()[-3:])}"
            reported.append({"test": f"unit/{file}", "outcome": "unfinished", "reason": reason})
    return reported


def summary(file: str, outcomes: list[Outcome]) -> str:
    """The counts of one file in a line, and under it the reasons with theirs."""
    kinds = collections.Counter(outcome.kind for outcome in outcomes)
    counts = ", ".join(f"{kinds[kind]} {kind}" for kind in ("passed", "failed", "refused", "skipped"))
    lines = [f"{file}: {len(outcomes) - kinds['unfinished']} tests, {counts}"]
    reasons = collections.Counter((o.kind, o.reason[:300]) for o in outcomes if o.kind != "passed")
    lines += [f"    {count} {kind}: {reason}" for (kind, reason), count in sorted(reasons.items())]
    return "\n".join(lines)


def main() -> int:
    """Runs the files and prints their lines; 1 where a test failed or a file did not come to its end."""
    parser = argparse.ArgumentParser(prog="python -m tests.deepspeed.upstream", description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("files", nargs="*", default=FILES)
    parser.add_argument("--engine", choices=("hyperfsdp", "stage3", "stock"), default="hyperfsdp")
    parser.add_argument("--fp32", action="store_true", help="let tests that choose a dtype compute in fp32")
    parser.add_argument("-k", default="", help="pytest's -k, for every file")
    parser.add_argument("--test-seconds", type=float, default=120.0)
    parser.add_argument("--file-seconds", type=float, default=3600.0)
    parser.add_argument("--results", type=Path, help="a file to which one line of JSON per test is appended")
    options = parser.parse_args()
    has_failed = False
    with tempfile.TemporaryDirectory(prefix="deepspeed-upstream-") as folder:
        unit = copy_tests(options.checkout, Path(folder))
        for file in options.files:
            reported = run_file(file, unit, options)
            outcomes = [Outcome.of(line) for line in reported]
            sys.stdout.write(summary(file, outcomes) + "\n")
            sys.stdout.flush()
            if options.results:
                with options.results.open("a", encoding="utf-8") as results:
                    results.writelines(json.dumps({"engine": options.engine, **line}) + "\n" for line in reported)
            has_failed = has_failed or any(outcome.kind in ("failed", "unfinished") for outcome in outcomes)
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
