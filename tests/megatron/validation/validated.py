"""A job in validation mode, with or without a fault, and what its reports say."""

from __future__ import annotations

import functools
import sys
from typing import Any

from tests.megatron.cases import tiny_job
from tests.megatron.training import Run, _observe, example
from tests.megatron.validation.faults import FAULTS
from tests.support import run_ranks

TIME_LIMIT_S = 240.0


def job_arguments(corpus: list[str], job: str) -> list[str]:
    """Three iterations of the tiny GPT with HyperFSDP, and the arguments of a case."""
    shared = tiny_job("--train-iters", "3")
    return [*shared, *corpus, "--use-hyperfsdp", "--hyperfsdp-supernode-size", "2", *job.split()]


def run_validated(ranks: int, argv: list[str], *more: str, fault: str | None = None) -> list[dict[str, Any]]:
    """What `validate` says on every rank."""
    argv = [*argv, "--hyperfsdp-mode", "validation", *more]
    return run_ranks(ranks, validate, flavour="megatron", timeout=TIME_LIMIT_S, argv=argv, fault=fault)


def validate(*, argv: list[str], fault: str | None = None) -> dict[str, Any]:
    """The reports of all compared steps, as dictionaries, the losses of the job, and its exit status."""
    import warnings

    warnings.simplefilter("ignore")
    sys.argv = ["pretrain_gpt.py", *argv]
    import hp_plugin.megatron

    hp_plugin.megatron.install()
    from hp_plugin.megatron.validation.comparing import Comparing

    reports: list[dict[str, Any]] = []
    report = Comparing.report

    def kept(self: Comparing) -> Any:
        found = report(self)
        reports.append(found.to_dict() | {"text": str(found)})
        return found

    Comparing.report = kept  # type: ignore[method-assign]
    if fault is not None:
        _put(fault)
    run = Run()
    _observe(run, keep_weights=fault is None)
    status = 0
    try:
        example("pretrain_gpt").main()
    except SystemExit as end:
        status = int(end.code or 0)
    return {"reports": reports, "run": run, "status": status}


def _put(fault: str) -> None:
    """Into every chunk as it is wrapped."""
    from hp_plugin.megatron.fsdp.wrapper import HyperFSDP

    make = HyperFSDP.__init__

    @functools.wraps(make)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        FAULTS[fault].put(self)

    HyperFSDP.__init__ = made  # type: ignore[method-assign]
