"""Rank function: a short job, and what `step_report` printed and wrote during it."""

from __future__ import annotations

from typing import Any

from tests.megatron import training


class RecordingWriter:
    """In the place of TensorBoard's, which need not be installed."""

    def __init__(self) -> None:
        self.scalars: dict[str, dict[int, float]] = {}

    def add_scalar(self, name: str, value: float, iteration: int) -> None:
        """As `SummaryWriter.add_scalar`."""
        self.scalars.setdefault(name, {})[iteration] = value


def train(*, argv: list[str]) -> dict[str, Any]:
    """Lines printed on this rank, scalars written on it, and the elements of its model."""
    import torch.distributed as dist
    from megatron.training import global_vars

    from hp_plugin.megatron import reporting

    lines: list[str] = []
    reporting.say_here = lines.append  # type: ignore[assignment]
    writer = RecordingWriter()

    def get_writer() -> RecordingWriter | None:
        return writer if dist.get_rank() == dist.get_world_size() - 1 else None

    global_vars.get_tensorboard_writer = get_writer
    run = training.train(argv=argv)
    return {
        "lines": lines,
        "scalars": writer.scalars,
        "numel": sum(weight.numel() for weight in run.weights.values()),
    }
