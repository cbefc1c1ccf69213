"""The main job: real GPT pretraining with Megatron's own loop on a laptop, stock DDP beside HyperFSDP.

Four processes stand for two supernodes of two ranks. From one seed it trains

1. stock Megatron DDP,
2. ``--use-hyperfsdp --hyperfsdp-supernode-size 2``,
3. the same, stopped and saved half way, then resumed on 2 processes,

on the Python standard library's own sources, and ends with a table, a picture of the loss curves, and exit status
0 only if the losses agree. Every argument that this program does not know goes to every Megatron run; where one of them
changes the arithmetic, as ``--bf16`` does, give ``--tolerance`` too.

    python examples/main_job.py [--out build/demo] [MEGATRON ARGUMENTS...]
"""

from __future__ import annotations

import argparse
import importlib.util
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import byte_corpus
import job_report
import job_runner
from job_report import Check, Result, largest_difference
from job_runner import JobError, RunLog
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

HERE = Path(__file__).resolve().parent
RANKS, RESUMED_RANKS, SUPERNODE_SIZE = 4, 2, 2
HYPERFSDP = ("--use-hyperfsdp", "--hyperfsdp-supernode-size", str(SUPERNODE_SIZE))
SHOWN_ITERATIONS = (1, 10, 50, 100)
TARGET_LOSS, TARGET_ITERATION = 2.4, 100
TOLERANCE = 1e-5
NEEDED_BYTES = 300 * 2**20
PLAIN_EVERY = 10
"""Iterations between two lines of progress where the output is not a terminal."""


@dataclass(frozen=True)
class Settings:
    """What the command line says.

    Attributes:
        out: Folder of everything that is written.
        extra: Arguments for every Megatron run, after those of the demo, so that they win.
        iterations: Length of a whole run.
        tolerance: Largest relative difference of losses that counts as agreement.
        timeout_s: Wall time of each run.
    """

    out: Path
    extra: tuple[str, ...]
    iterations: int
    tolerance: float
    timeout_s: float

    @property
    def half(self) -> int:
        """Iteration after which the stopped run stops."""
        return self.iterations // 2


def main() -> None:
    """Command line of this file."""
    console = Console(width=None if sys.stdout.isatty() else 130, highlight=False, soft_wrap=True)
    settings = parse(sys.argv[1:])
    started = time.monotonic()
    try:
        results, first_half = Job(settings, console).run()
        agreed = report(settings, console, results, first_half)
    except (JobError, OSError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        console.print("stopped; no process is left running")
        sys.exit(130)
    console.print(f"{time.monotonic() - started:.0f} s in all; logs in {settings.out / 'logs'}")
    sys.exit(0 if agreed else 1)


def parse(argv: Sequence[str]) -> Settings:
    """Read the command line; arguments that are not known here are Megatron's."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n", 1)[0],
        allow_abbrev=False,
        epilog="All other arguments go to every Megatron run.",
    )
    parser.add_argument("--out", type=Path, default=Path("build/demo"), help="folder for everything (%(default)s)")
    parser.add_argument(
        "--tolerance", type=float, default=TOLERANCE, help="largest relative difference of losses (%(default)s)"
    )
    parser.add_argument("--timeout", type=float, default=900, help="seconds that one run may take (%(default)s)")
    parser.add_argument("--train-iters", type=int, default=TARGET_ITERATION, help="iterations (%(default)s)")
    options, extra = parser.parse_known_args(argv)
    if options.train_iters < 4:
        parser.error("--train-iters must be at least 4: half of the iterations are run before the checkpoint")
    return Settings(options.out, tuple(extra), options.train_iters, options.tolerance, options.timeout)


class Job:
    """The four runs."""

    def __init__(self, settings: Settings, console: Console) -> None:
        self._settings = settings
        self._console = console
        self._corpus = settings.out / "corpus" / "stdlib"
        self._checkpoint = settings.out / "checkpoint"

    def run(self) -> tuple[list[Result], RunLog]:
        """Run everything; returns stock, HyperFSDP and resumed results, and the log of the stopped half."""
        s = self._settings
        self._prepare()
        stock = self._train("stock Megatron DDP, 4 ranks", "stock", RANKS, [], last=s.iterations)
        ours = self._train("HyperFSDP, 2 supernodes x 2", "hyperfsdp", RANKS, HYPERFSDP, last=s.iterations)
        save = ["--save", str(self._checkpoint), "--save-interval", str(s.half), "--exit-interval", str(s.half)]
        try:
            half = self._train(f"HyperFSDP, stopped at {s.half}", "stopped", RANKS, [*HYPERFSDP, *save], last=s.half)
            resumed = self._train(
                f"resumed at {s.half}, 2 ranks",
                "resumed",
                RESUMED_RANKS,
                [*HYPERFSDP, "--load", str(self._checkpoint)],
                first=s.half + 1,
                last=s.iterations,
            )
        except BaseException:
            # A checkpoint of a run that failed may be half-written; nothing must ever load it.
            shutil.rmtree(self._checkpoint, ignore_errors=True)
            raise
        return [stock, ours, resumed], half.log

    def _prepare(self) -> None:
        s = self._settings
        for module, remedy in (("megatron", "hp-plugin[megatron]"), ("matplotlib", "hp-plugin[bench]")):
            if importlib.util.find_spec(module) is None:
                raise JobError(f"the Python module {module} is missing; install it with pip install '{remedy}'")
        free = job_runner.free_bytes(s.out)
        if free < NEEDED_BYTES:
            raise JobError(
                f"the disk of {s.out} has {free // 2**20} MiB free and the demo writes up to "
                f"{NEEDED_BYTES // 2**20} MiB; free some space or choose another folder with --out"
            )
        for stale in (s.out / "metrics", s.out / "logs", self._checkpoint):
            shutil.rmtree(stale, ignore_errors=True)
        (s.out / "metrics").mkdir(parents=True)
        self._build_corpus()

    def _build_corpus(self) -> None:
        if byte_corpus.describe(self._corpus) is None:
            # In a process of its own, because it imports Megatron.
            command = [sys.executable, "-W", "ignore", str(HERE / "byte_corpus.py"), str(self._corpus)]
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=self._settings.timeout_s, check=False
            )
            if done.returncode != 0:
                last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
                raise JobError(last.removeprefix("error: "))
        manifest = byte_corpus.describe(self._corpus)
        if manifest is None:
            raise JobError(f"the corpus at {self._corpus} is not complete; remove that folder and try again")
        self._console.print(
            f"corpus: {manifest['documents']} files of the standard library, {manifest['tokens']:,} bytes"
        )

    def _train(
        self, title: str, name: str, ranks: int, arguments: Sequence[str], *, last: int, first: int = 1
    ) -> Result:
        s = self._settings
        metrics = s.out / "metrics" / f"{name}.jsonl"
        # Relative to the run's own start, and late enough that buffers exist.
        recorded = min(first + 4, last)
        argv = [
            *words("gpt_tiny.args"),
            *words("cpu.args"),
            "--train-iters",
            str(s.iterations),
            "--data-path",
            str(self._corpus),
            "--data-cache-path",
            str(s.out / "corpus" / "cache"),
            "--metrics-file",
            str(metrics),
            "--metrics-supernode-size",
            str(SUPERNODE_SIZE),
            "--metrics-iteration",
            str(recorded),
            *arguments,
            *s.extra,
        ]
        with Follower(self._console, title, first=first, last=last) as follower:
            log = job_runner.run(
                title,
                ranks=ranks,
                arguments=argv,
                log_file=s.out / "logs" / f"{name}.log",
                timeout_s=s.timeout_s,
                on_iteration=follower.update,
            )
        missing = [i for i in range(first, last + 1) if i not in log.losses]
        if missing:
            raise JobError(
                f"{title} ended without an error but did not log iteration {missing[0]}; its log is "
                f"{s.out / 'logs' / f'{name}.log'}"
            )
        return Result(title, log, job_report.read_metrics(metrics))


class Follower:
    """Shows how far a run is: a bar on a terminal, a line now and then elsewhere."""

    def __init__(self, console: Console, title: str, *, first: int, last: int) -> None:
        self._console, self._title, self._first, self._last = console, title, first, last
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task(title, total=last - first + 1, note="starting")

    def __enter__(self) -> Follower:
        self._progress.start()
        if not self._console.is_terminal:
            self._console.print(f"{self._title}: starting")
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def update(self, iteration: int, log: RunLog) -> None:
        """Take in a finished iteration."""
        note = f"loss {log.losses[iteration]:.4f}  {log.step_ms[iteration]:.0f} ms"
        self._progress.update(self._task, completed=iteration - self._first + 1, note=note)
        if not self._console.is_terminal and (iteration % PLAIN_EVERY == 0 or iteration in (self._first, self._last)):
            self._console.print(f"{self._title}: iteration {iteration}/{self._last}  {note}")


def report(settings: Settings, console: Console, results: list[Result], first_half: RunLog) -> bool:
    """Print table and checks, draw the picture; returns whether every check holds."""
    shown = [i for i in SHOWN_ITERATIONS if i <= settings.iterations]
    console.print()
    console.print(job_report.table(results, shown))
    picture = settings.out / "loss_curves.png"
    job_report.plot(results, picture)
    console.print(f"loss curves: {picture.resolve()}")
    good = job_report.print_checks(console, checks(settings, results, first_half))
    if settings.iterations < TARGET_ITERATION:
        console.print(
            f"not checked: the loss at {TARGET_ITERATION}, which this run of {settings.iterations} iterations "
            "does not reach"
        )
    return good


def checks(settings: Settings, results: list[Result], first_half: RunLog) -> list[Check]:
    """What must hold for exit status 0."""
    stock, ours, resumed = (result.log for result in results)
    limit = f"within {settings.tolerance:g}"
    pairs = [
        (f"HyperFSDP's losses are stock's, {limit}", ours.losses, stock.losses),
        (f"the stopped run's losses are the uninterrupted run's, {limit}", first_half.losses, ours.losses),
        (f"the resumed run's losses are the uninterrupted run's, {limit}", resumed.losses, ours.losses),
        (f"HyperFSDP's validation loss is stock's, {limit}", _evaluations(ours), _evaluations(stock)),
        (
            f"the resumed run's validation loss is the uninterrupted run's, {limit}",
            _evaluations(resumed),
            _evaluations(ours),
        ),
    ]
    made = []
    for statement, found, expected in pairs:
        difference = largest_difference(found, expected)
        made.append(Check(statement, difference <= settings.tolerance, f"{difference:.1e}"))
    if settings.iterations >= TARGET_ITERATION:
        loss = ours.losses[TARGET_ITERATION]
        made.append(Check(f"the loss at {TARGET_ITERATION} is below {TARGET_LOSS}", loss < TARGET_LOSS, f"{loss:.6f}"))
    return made


def words(file: str) -> list[str]:
    """The arguments in a file beside this one."""
    return shlex.split((HERE / file).read_text(encoding="utf-8"))


def fail(sentence: str) -> NoReturn:
    """End with one sentence on standard error."""
    Console(stderr=True, highlight=False, soft_wrap=True).print(f"error: {sentence.rstrip('.')}.", markup=False)
    sys.exit(1)


def _evaluations(log: RunLog) -> dict[int, float]:
    return dict(enumerate(log.evaluations[name] for name in sorted(log.evaluations)))


if __name__ == "__main__":
    main()
