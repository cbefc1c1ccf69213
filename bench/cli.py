"""`python -m bench NAME [--json] [--quick] [--output DIR] [options of NAME]`.

A benchmark is a module with a function `benchmark(*, quick: bool, ...) -> Report`. Its keyword-only parameters are its
options, annotated as typer wants them; its docstring is its help. It is imported only when it is named, so one that
cannot be imported does not break the others. `--json` and `--output` are added here.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import subprocess
import sys
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

from bench.environment import environment, finished
from bench.errors import BenchError, UnavailableError
from bench.report import Report, say

# name -> (module that holds `benchmark`, what it measures)
BENCHMARKS: dict[str, tuple[str, str]] = {
    "link": ("bench.testbed.link", "Latency and bandwidth that the testbed delivers, inside and between supernodes."),
    "fsdp-step": ("bench.fsdp_step.command", "A training step over a slow link, against FSDP2, DDP and Megatron."),
    "muon-step": (
        "bench.muon_step.command",
        "Muon over a slow link, against torch on DTensors, Megatron and DeepSpeed.",
    ),
    "collectives": ("bench.collectives.command", "All-gather and reduce-scatter inside a supernode, by transport."),
    "host-overhead": ("bench.host_overhead.command", "Host time per layer, with communication that costs nothing."),
    "memory": ("bench.memory.command", "Peak bytes per rank, against the closed form and FSDP2."),
    "convergence": ("bench.convergence.command", "Loss curves on real text, against stock runs and their noise."),
}

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]
OutputOption = Annotated[str, typer.Option("--output", help="Also write NAME.json into this directory.")]
QuickOption = Annotated[bool, typer.Option("--quick", help="A smaller run of at most three minutes.")]


class _LazyGroup(typer.core.TyperGroup):
    """Replaces the placeholder of a benchmark by its real command when it is invoked."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Import the benchmark that is named, then go on as usual."""
        if args and args[0] in BENCHMARKS:
            self.commands[args[0]] = _load_command(args[0])
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=_LazyGroup,
    help="Benchmarks of hp_plugin against its peers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main(argv: list[str] | None = None) -> None:
    """Run one command and leave: 0 done, 1 the benchmark failed, 2 this machine or these options cannot run it."""
    try:
        app(argv, prog_name="python -m bench")
    except BenchError as error:
        say(f"error: {error}")
        raise SystemExit(error.exit_code) from None


def _load_command(name: str) -> Any:
    module_name, summary = BENCHMARKS[name]
    try:
        function = importlib.import_module(module_name).benchmark
    except Exception as error:
        raise UnavailableError(
            f"the benchmark {name!r} cannot be loaded from {module_name}: {type(error).__name__}: {error}. "
            "`make setup` installs what the benchmarks import."
        ) from error
    single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    single.command(name, short_help=summary)(_as_command(name, function))
    return typer.main.get_command(single)


def _as_command(name: str, function: Callable[..., Report]) -> Callable[..., None]:
    """`function` with `--json` and `--output` added to its options, printing what it returns."""

    def command(*, as_json: bool, output: str, **options: Any) -> None:
        run(name, function, options, as_json=as_json, output=Path(output) if output else None)

    hints = typing.get_type_hints(function, include_extras=True)
    signature = inspect.signature(function)
    if "quick" not in signature.parameters:
        raise TypeError(f"the benchmark {name!r} takes no `quick`: every benchmark has a run of three minutes")
    hints["quick"] = QuickOption
    own = [parameter.replace(annotation=hints[key]) for key, parameter in signature.parameters.items()]
    keyword = inspect.Parameter.KEYWORD_ONLY
    common = [
        inspect.Parameter("as_json", keyword, default=False, annotation=JsonOption),
        inspect.Parameter("output", keyword, default="", annotation=OutputOption),
    ]
    command.__signature__ = inspect.Signature([*own, *common])  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in [*own, *common]}
    command.__doc__ = inspect.cleandoc(function.__doc__ or "").partition("\n\nArgs:")[0]
    return command


def run(
    name: str, function: Callable[..., Report], options: dict[str, Any], *, as_json: bool, output: Path | None
) -> Report:
    """Run a benchmark and print its report.

    Args:
        name: name on the command line, which the report must carry.
        function: the benchmark.
        options: its keyword arguments.
        as_json: print one JSON object, and nothing else, on standard output; a table otherwise.
        output: directory that also gets NAME.json.

    Raises:
        BenchError: the report, which has been printed, tells of failures.
    """
    facts = environment()
    with _stdout_to_stderr() if as_json else contextlib.nullcontext():
        report = function(**options)
        report.environment = {**finished(facts), **report.environment}
    assert report.name == name, f"the benchmark {name!r} returned a report of {report.name!r}"
    if output is not None:
        say(f"wrote {report.write(output)}")
    if as_json:
        print(report.to_json(), flush=True)
    else:
        report.print()
    if report.failures:
        raise BenchError("; ".join(report.failures))
    return report


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Send what is printed, and what libraries and child processes write to descriptor 1, to standard error."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _placeholder() -> None:
    raise AssertionError("a placeholder was invoked; _LazyGroup replaces it first")


for _name, (_module, _summary) in BENCHMARKS.items():
    app.command(_name, help=_summary)(_placeholder)


@app.command("all")
def run_all(
    output: Annotated[Path, typer.Option("--output", help="Directory of the results.")] = Path("bench/results"),
    quick: QuickOption = False,
) -> None:
    """Run every benchmark with its defaults, each in a process of its own; NAME.json of each goes to --output."""
    failed = []
    for name in BENCHMARKS:
        say(f"=== {name}")
        command = [sys.executable, "-m", "bench", name, "--output", str(output), *(["--quick"] if quick else [])]
        if subprocess.run(command, check=False).returncode != 0:
            failed.append(name)
    if failed:
        raise BenchError(f"these benchmarks failed: {', '.join(failed)}; their own messages are above")


@app.command()
def clean() -> None:
    """Remove testbeds (namespaces, devices, ranks) whose tool was killed before it could remove them."""
    from bench.testbed.leftovers import remove_leftovers

    removed = remove_leftovers()
    print(f"removed {len(removed)} namespaces" if removed else "nothing was left behind")
