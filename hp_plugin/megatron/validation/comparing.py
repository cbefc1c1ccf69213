"""A step of the job against the same step on one rank: every rank compares its own pieces, then all results meet."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from hp_plugin.core.dtensor.compare import first_wrong
from hp_plugin.core.dtensor.report import Comparison, Kind, ValidationReport, locate
from hp_plugin.core.dtensor.tolerance import FLOOR, relative_error, tolerance
from hp_plugin.core.layout import local_tensor
from hp_plugin.megatron.validation.pieces import Piece, Whole, by_piece
from hp_plugin.megatron.validation.recording import Event, Recorder, holders_of
from hp_plugin.megatron.validation.state import masters

_MUON = 10.0
"""How much larger an error of weights may be after a step of Muon."""


@dataclass
class Seen:
    """What a step computed on this rank.

    Attributes:
        outputs: Of modules, in the order of forward.
        output_gradients: Of them.
        input_gradients: Of what modules take.
        gradients: Of parameters before clipping, in pieces.
        weights: fp32, after the step, in pieces.
        norm: Of all gradients.
        losses: As Megatron logs them; empty on ranks without the last stage.
        owners: Name of a piece of a parameter -> the innermost recorded module that holds it.
    """

    outputs: dict[Event, torch.Tensor]
    output_gradients: dict[Event, torch.Tensor]
    input_gradients: dict[Event, torch.Tensor]
    gradients: list[Piece]
    weights: list[Piece]
    norm: float | None
    losses: dict[str, float]
    owners: dict[str, str]

    @classmethod
    def of(
        cls,
        chunks: Sequence[Any],
        optimizer: Any,
        recorder: Recorder,
        gradients: list[Piece],
        norm: float | None,
        losses: Mapping[str, Any],
    ) -> Seen:
        """What is left after a step."""
        trained = masters(optimizer)
        holders = holders_of(chunks)
        weights, owners = [], {}
        for parameter, found in by_piece(chunks, lambda p: trained.get(id(p), local_tensor(p))):
            for piece in found:
                weights.append(replace(piece, data=piece.data.clone()))
                owners[piece.name] = holders[id(parameter)]
        scalars = {name: float(value) for name, value in losses.items() if torch.as_tensor(value).numel() == 1}
        return cls(
            recorder.outputs,
            recorder.gradients,
            recorder.input_gradients,
            gradients,
            weights,
            norm,
            scalars,
            owners,
        )


class Comparing:
    """Compares what the job saw on this rank with what one rank saw.

    Args:
        job: Of the job.
        alone: Of one rank; its micro-batch `m * replicas + d` is the `m`-th of data-parallel rank `d`.
        args: Megatron's arguments.
        replicas: Number of data-parallel ranks.
    """

    def __init__(self, job: Seen, alone: Seen, args: argparse.Namespace, *, replicas: int) -> None:
        from megatron.core import parallel_state

        self._job, self._alone = job, alone
        self._replicas = replicas
        self._replica = parallel_state.get_data_parallel_rank()
        self._tp = parallel_state.get_tensor_model_parallel_world_size()
        self._tp_rank = parallel_state.get_tensor_model_parallel_rank()
        self._per_token = bool(args.calculate_per_token_loss)
        self._activations = args.context_parallel_size == 1
        low = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32
        tokens = args.global_batch_size * args.seq_length
        widest = max(max(piece.shape) for piece in alone.weights)
        self._tolerance = tolerance(low, max(tokens, widest))
        self._gradients, self._weights = Whole(), Whole()
        self._gradients.add(alone.gradients)
        self._weights.add(alone.weights)
        # Five steps of Newton-Schulz multiply what lies along small singular values, rounding included, by up to 3.4^5.
        self._weight_tolerance = self._tolerance * (_MUON if args.use_hypermuon else 1.0)
        self._floors = {"gradient": FLOOR * _norm(alone.gradients), "weight": FLOOR * _norm(alone.weights)}

    def report(self) -> ValidationReport:
        """The comparisons of all ranks. Every rank must call."""
        mine = [*self._outputs(), *self._parameters("gradient"), *self._parameters("weight"), *self._scalars()]
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (mine, self._job.losses))
        worst: dict[tuple[Kind, str], Comparison] = {}
        for found, _ in everyone:
            for comparison in found:
                place = comparison.kind, comparison.name
                if place not in worst or _excess(comparison) > _excess(worst[place]):
                    worst[place] = comparison
        order = {event.module: number for number, event in enumerate(self._alone.outputs)}
        forward = sorted((c for c in worst.values() if c.kind == "output"), key=lambda c: order[c.module])
        gradients = [c for c in worst.values() if c.kind in ("output_gradient", "input_gradient")]
        gradients.sort(key=lambda c: -order[c.module])
        backward = [*gradients, *(c for c in worst.values() if c.kind == "gradient")]
        location, reason = locate(forward, backward)
        losses: dict[str, float] = next((found for _, found in everyone if found), {})
        expected, planned = _first(self._alone.losses), _first(losses)
        ordered = tuple(sorted(worst.values(), key=lambda c: -_excess(c)))
        return ValidationReport(ordered, location, reason, (expected, expected), (planned, planned), "the job")

    # ---------------------------------------------------------------- what goes through the model

    def _outputs(self) -> Iterator[Comparison]:
        if not self._activations:
            return
        pairs: tuple[tuple[Kind, dict[Event, torch.Tensor], dict[Event, torch.Tensor]], ...] = (
            ("output", self._job.outputs, self._alone.outputs),
            ("output_gradient", self._job.output_gradients, self._alone.output_gradients),
            ("input_gradient", self._job.input_gradients, self._alone.input_gradients),
        )
        for kind, job, alone in pairs:
            for module in dict.fromkeys(event.module for event in job):
                events = [event for event in job if event.module == module]
                found = [self._of_event(kind, event, job[event], alone) for event in events]
                yield max(found, key=_excess)

    def _of_event(
        self, kind: Kind, event: Event, found: torch.Tensor, alone: Mapping[Event, torch.Tensor]
    ) -> Comparison:
        whole = alone.get(Event(event.module, event.micro_batch * self._replicas + self._replica))
        if kind != "output" and not self._per_token:
            found = found / self._replicas  # the mean over the micro-batches of one rank, and over those of all
        piece = None if whole is None else self._piece(whole, found)
        floor = 0.0
        if kind != "output":
            floor = FLOOR * max((_norm_of(gradient) for gradient in alone.values()), default=0.0)
        compared = self._compared(kind, event.module, event.module, found, piece, floor)
        if compared.detail:
            compared = replace(compared, detail=f"micro-batch {event.micro_batch + 1}: {compared.detail}")
        return compared

    def _piece(self, whole: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
        """The part along the one dim that tensor parallelism divides: the sequence, or the vocabulary."""
        for dim, (all_of_it, mine) in enumerate(zip(whole.shape, found.shape)):
            if all_of_it != mine and all_of_it == mine * self._tp:
                return whole.chunk(self._tp, dim)[self._tp_rank]
        return whole

    # ---------------------------------------------------------------- parameters and scalars

    def _parameters(self, kind: Kind) -> Iterator[Comparison]:
        job, whole = (
            (self._job.gradients, self._gradients) if kind == "gradient" else (self._job.weights, self._weights)
        )
        for piece in job:
            expected = whole.box(piece)
            found = piece.data
            if kind == "weight" and piece.key in self._gradients:
                known = self._is_known(piece, expected)
                found, expected = found * known, expected * known
            yield self._compared(
                kind,
                piece.name,
                self._alone.owners.get(piece.name, ""),
                found.view(expected.shape),
                expected,
                self._floors[kind],
            )

    def _is_known(self, piece: Piece, expected: torch.Tensor) -> torch.Tensor:
        """Where a gradient is more than rounding: of the rest, Adam makes steps as long as of any other."""
        gradient = self._gradients.box(piece)
        scale = max(gradient.abs().max().item() if gradient.numel() else 0.0, self._floors["gradient"])
        return (gradient.abs() > self._tolerance * scale) | (gradient == 0)

    def _scalars(self) -> Iterator[Comparison]:
        if self._job.norm is not None and self._alone.norm is not None:
            norms = torch.tensor(self._job.norm), torch.tensor(self._alone.norm)
            yield self._compared("grad_norm", "gradient norm", "", *norms, 0.0)
        for name, loss in self._job.losses.items():
            expected = self._alone.losses.get(name)
            wanted = None if expected is None else torch.tensor(expected)
            yield self._compared("loss", name, "", torch.tensor(loss), wanted, 0.0)

    def _compared(
        self, kind: Kind, name: str, module: str, found: torch.Tensor, expected: torch.Tensor | None, floor: float
    ) -> Comparison:
        limit = self._weight_tolerance if kind == "weight" else self._tolerance
        made = Comparison(kind, name, module, 0.0, limit, dist.get_rank())
        if expected is None:
            return replace(made, error=math.inf, detail="there is none on one rank")
        expected = expected.to(found.device)
        if found.shape != expected.shape:
            return replace(made, error=math.inf, detail=f"shape {tuple(found.shape)}, expected {tuple(expected.shape)}")
        error = relative_error(found, expected, floor)
        detail = "" if error <= limit else first_wrong(found, expected, limit)
        return replace(made, error=error, detail=detail)


def _excess(comparison: Comparison) -> float:
    ratio = comparison.error / comparison.tolerance
    return math.inf if math.isnan(ratio) else ratio


def _norm_of(tensor: torch.Tensor) -> float:
    return torch.linalg.vector_norm(tensor.double()).item()


def _norm(pieces: Sequence[Piece]) -> float:
    return math.sqrt(sum(_norm_of(piece.data) ** 2 for piece in pieces))


def _first(losses: Mapping[str, float]) -> float:
    return next(iter(losses.values()), math.nan)
