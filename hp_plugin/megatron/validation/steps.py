"""Megatron's `train_step` in validation mode: the job's step, the same step on one rank, a comparison."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from hp_plugin.core.layout import local_tensor
from hp_plugin.megatron import reporting
from hp_plugin.megatron.validation.comparing import Comparing, Seen
from hp_plugin.megatron.validation.one_rank import CONFIGURATION, MicroBatches, OneRank
from hp_plugin.megatron.validation.pieces import Piece, Whole, by_piece, gathered
from hp_plugin.megatron.validation.recording import Recorder
from hp_plugin.megatron.validation.state import State, copy_state, gathered_state

_SETUP = "hyperfsdp_validation"
"""Attribute of the first chunk that holds what the reference is made from."""


def note_setup(original: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's `setup_model_and_optimizer`; keeps its arguments where the job is to be validated."""

    @functools.wraps(original)
    def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
        from megatron.training import get_args

        options = get_args()
        if options.hyperfsdp_mode != "validation":
            return original(*args, **kwargs)
        kept = {name: _kept(name, value) for name, value in kwargs.items()}
        model, optimizer, scheduler = original(*args, **kwargs)
        build = functools.partial(original, *args, **kept)
        setattr(model[0], _SETUP, Validation(build, options.hyperfsdp_validation_steps))
        return model, optimizer, scheduler

    return setup_model_and_optimizer


def validate_steps(original: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's `train_step`; the first steps of a job to be validated are compared with those of one rank."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def train_step(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        validation = vars(bound.arguments["model"][0]).get(_SETUP)
        if validation is None or validation.is_over:
            return original(*args, **kwargs)
        return validation.step(original, bound)

    return train_step


def _kept(name: str, value: Any) -> Any:
    """Of configurations a copy: Megatron puts functions of the job's model into its own."""
    if name != "cfg_container" or value is None:
        return value
    container = copy.copy(value)
    container.model, container.ddp = copy.copy(value.model), copy.copy(value.ddp)
    container.model.transformer = copy.copy(value.model.transformer)
    for part in (container.model.transformer, container.ddp):
        for option, alone in CONFIGURATION.items():
            if hasattr(part, option):
                setattr(part, option, alone)
    return container


@dataclass
class _Watched:
    """What an optimizer's step was given and gave."""

    gradients: list[Piece] = field(default_factory=list)
    norm: float | None = None


class Validation:
    """Compares steps of a job; holds the model of one rank as long as it does.

    Args:
        build: Megatron's `setup_model_and_optimizer` with the arguments of the job.
        steps: How many are compared.
    """

    def __init__(self, build: Callable[..., Any], steps: int) -> None:
        self._build = build
        self._left = steps
        self._alone: OneRank | None = None
        self._reference: tuple[list[Any], Any, Any] | None = None

    @property
    def is_over(self) -> bool:
        """Whether no further step is to be compared."""
        return self._left == 0

    def step(self, train_step: Callable[..., Any], bound: inspect.BoundArguments) -> Any:
        """One step of the job, compared. Every rank must call.

        Returns:
            What the job's step returned.

        Raises:
            SystemExit: The steps differ, or the job was to stop here.
        """
        from megatron.core.num_microbatches_calculator import get_num_microbatches
        from megatron.training import get_args

        args = get_args()
        given = bound.arguments
        chunks, optimizer = given["model"], given["optimizer"]
        weights = gathered(piece for _, found in by_piece(chunks, local_tensor) for piece in found)
        state, schedule = gathered_state(chunks, optimizer), copy.deepcopy(given["opt_param_scheduler"].state_dict())

        recorder = Recorder(chunks)
        kept = dict(given)
        given["forward_step_func"] = recorder.forward_step(given["forward_step_func"])
        with recorder.watching(), _watched(optimizer, chunks) as watched:
            result = train_step(*bound.args, **bound.kwargs)
        job = Seen.of(chunks, optimizer, recorder, watched.gradients, watched.norm, result[0])

        batches, replicas = _all_batches(recorder.batches)
        micro_batches = MicroBatches(get_num_microbatches() * replicas, args.micro_batch_size)
        if self._alone is None:
            self._alone = OneRank()
        with self._alone.active(micro_batches), _quiet():
            alone = self._step_alone(train_step, kept, weights, state, schedule, batches)
        self._left -= 1
        comparing = Comparing(job, alone, args, replicas=replicas)
        report = comparing.report()
        where = f"validation, iteration {args.curr_iteration + 1}"
        if report.is_equal:
            worst = report.comparisons[0]
            reporting.say(
                f"{where}: {report.summary()} Largest error: {worst.kind} {worst.name}, {worst.error:.1e} of "
                f"{worst.tolerance:.1e} allowed."
            )
        else:
            reporting.say(f"{where}: {report}")
            reporting.stop("this job does not compute what stock Megatron computes on one rank; see above.", status=1)
        if self.is_over:
            self._reference = None
            _finish(args.hyperfsdp_validation_then)
        return result

    def _step_alone(
        self,
        train_step: Callable[..., Any],
        given: Mapping[str, Any],
        weights: Whole,
        state: State,
        schedule: dict[str, Any],
        batches: list[Any],
    ) -> Seen:
        """The same step on one rank; inside of the context of one."""
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.pipeline_parallel import get_forward_backward_func
        from megatron.core.rerun_state_machine import RerunDataIterator
        from megatron.core.utils import get_model_config

        if self._reference is None:
            self._reference = self._build(**self._groups())
        chunks, optimizer, scheduler = self._reference
        config = get_model_config(chunks[0])
        config.grad_scale_func = optimizer.scale_loss
        config.finalize_model_grads_func = finalize_model_grads
        scheduler.num_steps = 0
        scheduler.load_state_dict(schedule)
        copy_state(chunks, optimizer, weights, state)
        own = {
            "data_iterator": RerunDataIterator(iter(batches)),
            "model": chunks,
            "optimizer": optimizer,
            "opt_param_scheduler": scheduler,
            "config": config,
            "forward_backward_func": get_forward_backward_func(),
            "pg_collection": None,
            "p2p_communicator": None,
        }
        recorder = Recorder(chunks)
        with recorder.watching(), _watched(optimizer, chunks) as watched:
            result = train_step(**{name: own.get(name, value) for name, value in given.items()})
        return Seen.of(chunks, optimizer, recorder, watched.gradients, watched.norm, result[0])

    def _groups(self) -> dict[str, Any]:
        """Process groups of one rank, where `setup_model_and_optimizer` takes some."""
        if "pg_collection" not in inspect.signature(self._build).parameters:
            return {}
        from megatron.core.process_groups_config import ProcessGroupCollection

        return {"pg_collection": ProcessGroupCollection.use_mpu_process_groups()}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Within it, Megatron does not log once more what it has logged of the job."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


@contextlib.contextmanager
def _watched(optimizer: Any, chunks: Sequence[Any]) -> Iterator[_Watched]:
    """Within it, the optimizer's step keeps the gradients that it is given, unscaled, and the norm that it returns."""
    found = _Watched()
    original = optimizer.step

    def step(*args: Any, **kwargs: Any) -> Any:
        scale = float(optimizer.get_loss_scale())
        found.gradients = [
            piece for _, pieces in by_piece(chunks, functools.partial(_gradient, scale=scale)) for piece in pieces
        ]
        result = original(*args, **kwargs)
        found.norm = None if result[1] is None else float(result[1])
        return result

    optimizer.step = step
    try:
        yield found
    finally:
        del optimizer.step


def _gradient(parameter: torch.nn.Parameter, scale: float) -> torch.Tensor | None:
    found = getattr(parameter, "main_grad", None)
    if found is None or not parameter.requires_grad:
        return None
    return local_tensor(found).detach().float() / scale


def _all_batches(mine: list[Any]) -> tuple[list[Any], int]:
    """The micro-batches of all data-parallel ranks, in the order of the reference, and the number of these ranks."""
    from megatron.core import parallel_state

    place = (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_context_parallel_rank(),
    )
    everyone: list[Any] = [None] * dist.get_world_size()
    first = place == (0, 0, 0)
    dist.all_gather_object(everyone, (parallel_state.get_data_parallel_rank(), mine) if first else None)
    by_rank = dict(found for found in everyone if found is not None)
    replicas = len(by_rank)
    return [
        batch for number in zip(*(by_rank[rank] for rank in range(replicas)), strict=True) for batch in number
    ], replicas


def _finish(then: str) -> None:
    if then == "stop":
        reporting.say("validation is over; --hyperfsdp-validation-then stop ends the job here.")
        dist.barrier()
        raise SystemExit(0)
    reporting.say("validation is over; the job goes on as in production, with the weights that it has.")
