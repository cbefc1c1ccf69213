"""Rank functions that train with Megatron's own loop and report losses, norms and weights in full precision.

Nothing of Megatron is changed for that: the harness wraps ``training_log`` and ``train`` in the rank's process,
which see what the log prints before it is rounded.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.megatron.whole_weights import whole_weights

CORPUS_TOKENS = 2_000_000
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@dataclass
class Run:
    """What one rank saw.

    Attributes:
        losses: iteration -> loss; empty on ranks without the last pipeline stage.
        norms: iteration -> gradient norm before clipping.
        weights: parameter name -> full tensor of this tensor- and pipeline-parallel rank, after the run.
        whole: name in the whole model -> tensor over all ranks, of the weights that this rank has a part of, after it.
        logged: iteration -> (number of zeros in the gradients, norm of the parameters), where Megatron computes them.
        evaluated: losses of evaluations, in their order; on ranks with the last pipeline stage.
        rebound: what of Megatron was replaced during the run.
        exit_code: of a job that ended itself before its last iteration.
    """

    losses: dict[int, float] = field(default_factory=dict)
    norms: dict[int, float] = field(default_factory=dict)
    weights: dict[str, Any] = field(default_factory=dict)
    whole: dict[str, Any] = field(default_factory=dict)
    logged: dict[int, tuple[float | None, float | None]] = field(default_factory=dict)
    evaluated: list[float] = field(default_factory=list)
    rebound: list[str] = field(default_factory=list)
    exit_code: int | None = None


def train(*, argv: list[str], keep_weights: bool = True) -> Run:
    """Run ``examples/pretrain_gpt.py`` with ``argv`` on this rank."""
    import warnings

    warnings.simplefilter("ignore")
    sys.argv = ["pretrain_gpt.py", *argv]
    import hp_plugin.megatron

    hp_plugin.megatron.install()
    run = Run()
    _observe(run, keep_weights=keep_weights)
    try:
        example("pretrain_gpt").main()
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
        run.exit_code = 0
    return run


def train_until_signal(*, argv: list[str], iteration: int) -> Run:
    """As `train`, and rank 0 gets SIGTERM once it has logged `iteration`."""
    import signal

    from megatron.training import training

    log = training.training_log

    @functools.wraps(log)
    def training_log(*args: Any, **kwargs: Any) -> Any:
        result = log(*args, **kwargs)
        values = inspect.signature(log).bind(*args, **kwargs).arguments
        if values["iteration"] == iteration and rank() == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return result

    training.training_log = training_log
    return train(argv=argv)


def make_corpus(directory: Path) -> list[str]:
    """Builds a small corpus in a process of its own; gives the arguments that name it."""
    from tests.support import run_ranks

    prefix = str(directory / "stdlib")
    run_ranks(1, build_corpus, flavour="megatron", timeout=120, prefix=prefix, tokens=CORPUS_TOKENS)
    return ["--data-path", prefix, "--data-cache-path", str(directory / "cache")]


def build_corpus(*, prefix: str, tokens: int) -> dict[str, int]:
    """Build the byte corpus, on one rank, where Megatron is imported already."""
    return dict(example("byte_corpus").build(Path(prefix), tokens=tokens))


def example(name: str) -> ModuleType:
    """Import a file of ``examples/`` by name."""
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    return importlib.import_module(name)


def _observe(run: Run, *, keep_weights: bool) -> None:
    from megatron.training import training

    import hp_plugin.megatron

    log, train_loop, evaluation = training.training_log, training.train, training.evaluate
    signature = inspect.signature(log)

    def training_log(loss_dict: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        values = signature.bind(loss_dict, *args, **kwargs).arguments
        iteration = values["iteration"]
        if "lm loss" in loss_dict:
            run.losses[iteration] = float(loss_dict["lm loss"])
        if values["grad_norm"] is not None:
            run.norms[iteration] = float(values["grad_norm"])
        zeros, norm = values["num_zeros_in_grad"], values["params_norm"]
        run.logged[iteration] = (None if zeros is None else float(zeros), None if norm is None else float(norm))
        return log(loss_dict, *args, **kwargs)

    def train(forward_step_func: Any, model: list[Any], *args: Any, **kwargs: Any) -> Any:
        run.rebound = hp_plugin.megatron.rebound_names()
        result = train_loop(forward_step_func, model, *args, **kwargs)
        if keep_weights:
            run.weights, run.whole = full_weights(model), whole_weights(model)
        return result

    def evaluate(*args: Any, **kwargs: Any) -> Any:
        result = evaluation(*args, **kwargs)
        if result[0] is not None and "lm loss" in result[0]:
            run.evaluated.append(float(result[0]["lm loss"]))
        return result

    training.training_log, training.train, training.evaluate = training_log, train, evaluate


def full_weights(chunks: list[Any]) -> dict[str, Any]:
    """Full weights of a rank's model chunks, without the prefixes of wrappers. Collective where they are sharded."""
    from torch.distributed.tensor import DTensor

    from hp_plugin.megatron.releases.differences import unwrapped

    weights = {}
    for number, chunk in enumerate(map(unwrapped, chunks)):
        for name, parameter in chunk.named_parameters():
            tensor = parameter.detach()
            tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            weights[f"{number}.{name}"] = tensor.clone()
    return weights


def rank() -> int:
    """Global rank of this process."""
    return int(os.environ["RANK"])
