"""What a rank does: the runs one after another, stock ones first, then ours, then wrong ones until the gate fails."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from bench.convergence.data import Batches
from bench.convergence.gate import LIMIT, Curve, Noise, loss_difference
from bench.convergence.model import Size, make_model
from bench.convergence.trainers import make_trainer
from bench.convergence.variants import OURS, WRONG, Variant, stock
from bench.report import say

_CHECK_EVERY = 10  # steps of a wrong run between two looks at the gate


@dataclass(frozen=True)
class Runs:
    """All runs of one precision.

    Attributes:
        stock: Name -> curve.
        ours: Ours.
        wrong: Fault -> curve, which ends where the gate had failed.
        seconds: Name -> duration.
    """

    stock: dict[str, Curve]
    ours: Curve
    wrong: dict[str, Curve]
    seconds: dict[str, float]


def train_all(*, corpus: Path, size: Size, steps: int, mixed: bool) -> Runs | None:
    """Trains every variant for `steps` steps on this rank; every rank must call. Gives the runs on rank 0."""
    logging.getLogger("hp_plugin").setLevel(logging.WARNING)  # Megatron turns informative messages of all on
    seconds: dict[str, float] = {}
    precision = "bf16" if mixed else "fp32"

    def run(variant: Variant, *, against: dict[str, Curve] | None = None, limit: float = 0.0) -> Curve:
        start = time.perf_counter()
        curve = train(variant, corpus=corpus, size=size, steps=steps, mixed=mixed, against=against, limit=limit)
        seconds[variant.name] = time.perf_counter() - start
        if dist.get_rank() == 0:
            loss = curve.losses[-1]
            say(
                f"{precision} {variant.name}: {len(curve.losses)} steps, {seconds[variant.name]:.0f} s, loss {loss:.4f}"
            )
        return curve

    stock_curves = {variant.name: run(variant) for variant in stock(mixed=mixed)}
    ours = run(OURS)
    limit = LIMIT * Noise.between(stock_curves).loss
    wrong = {variant.fault: run(variant, against=stock_curves, limit=limit) for variant in WRONG}
    return Runs(stock_curves, ours, wrong, seconds) if dist.get_rank() == 0 else None


def train(
    variant: Variant,
    *,
    corpus: Path,
    size: Size,
    steps: int,
    mixed: bool,
    against: dict[str, Curve] | None = None,
    limit: float = 0.0,
) -> Curve:
    """One run.

    Args:
        variant: The run.
        corpus: File of tokens.
        size: Of the model and of a step.
        steps: Optimizer steps.
        mixed: Whether compute is in bf16.
        against: Stock curves; the run ends early, without weights, once a loss is further than `limit` from one of
            them: the difference only grows with more steps, so the gate has failed.
        limit: See `against`.

    Returns:
        The curve, equal on all ranks.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    batches = Batches(corpus, ranks=ranks, micro_batches=size.micro_batches, batch=size.batch, length=size.length)
    trainer = make_trainer(variant, make_model(size), size=size, mixed=mixed)
    losses = torch.zeros(steps, dtype=torch.float64)
    summed = 0
    for step in range(steps):
        losses[step] = trainer.step([batches.get(step, rank, index) for index in range(size.micro_batches)])
        done = step + 1
        if done % _CHECK_EVERY == 0 or done == steps:
            dist.all_reduce(losses[summed:done])
            losses[summed:done] /= ranks
            summed = done
            so_far = Curve(losses[:done].numpy(), np.empty(0))
            if against and max(loss_difference(so_far, other) for other in against.values()) > limit:
                return so_far
    weights = torch.cat([w.float().flatten() for w in trainer.weights()])
    return Curve(losses.numpy(), weights.numpy())
