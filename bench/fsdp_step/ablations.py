"""Ours without one of its mechanisms: objects of the engine replaced from outside, no switch in the engine.

* no_pipeline: backward waits for every reduction between supernodes right where it is issued.
* no_fused_reduce: every parameter crosses between supernodes in a message of its own.
* no_zero_copy: collectives inside a supernode work on one packed operand, with the copies around it that FSDP2 makes;
  one of the c10d transport, whatever transport ours has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from bench.fsdp_step.peers.ours import OPTIONS, Ours
from bench.fsdp_step.settings import Options
from bench.fsdp_step.variant import Context, Variant, take_options
from hp_plugin.core.fsdp.gradients import UnitGradients
from hp_plugin.core.fsdp.reduction import Crossing, Reduction, ReductionPipeline
from hp_plugin.core.transport import C10dTransport, Pending, Ticket
from hp_plugin.core.transport.pending import Prepare


class WaitingPipeline(ReductionPipeline):
    """Waits for whatever crosses before backward goes on."""

    def submit(self, unit: UnitGradients, make: Callable[[], Reduction]) -> None:
        """As the engine's, then waits."""
        super().submit(unit, make)
        self._finish_until(lambda: False)


class PerParameterPipeline(ReductionPipeline):
    """Sends every parameter of a bucket by itself."""

    def _cross(self, crossing: Crossing, messages: list[torch.Tensor], earlier: Sequence[Ticket]) -> None:
        pieces = [piece for unit in crossing.members for piece in parameter_slots(unit)]
        self.counters.all_reduces += len(pieces) - len(messages)
        super()._cross(crossing, pieces, earlier)


def parameter_slots(unit: UnitGradients) -> list[torch.Tensor]:
    """This rank's part of each parameter in the partial sum of `unit`, 1-D, padding included."""
    assert unit.partial is not None
    return [
        slot.narrow(0, offset, parameter.slot.slot_numel)
        for slot, operand in zip(unit.slots(unit.partial), unit.operands)
        for parameter, offset in zip(operand.parameters, operand.slot_offsets)
    ]


class PackingTransport(C10dTransport):
    """One packed operand per collective: copy in, collective, copy out."""

    def all_gather(self, prepare: Prepare, *, after: Ticket | None = None) -> Pending:
        """As the engine's; inputs are packed first, outputs are copied out of the packed result."""
        world = self.group.size()
        unpacked: list[tuple[list[torch.Tensor], torch.Tensor]] = []

        def pack() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
            outputs, inputs = prepare()
            packed = torch.cat(inputs)
            gathered = packed.new_empty(world * packed.numel())
            unpacked.append((outputs, gathered.view(world, -1)))
            return [gathered], [packed]

        return _Unpacking(super().all_gather(pack, after=after), unpacked)

    def reduce_scatter(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> Pending:
        """As the engine's; inputs are packed rank by rank first. Sums are formed in the outputs, as FSDP2's views."""
        world = self.group.size()
        packed = torch.cat([operand.view(world, -1) for operand in inputs], dim=1)
        received = torch.empty_like(packed)
        work = dist.all_to_all_single(received.view(-1), packed.view(-1), group=self.group, async_op=True)
        return _Summing(Pending([work], [packed]), outputs, received)


class _Unpacking(Pending):
    """Copies columns of a packed result to the outputs."""

    __slots__ = ("_inner", "_unpacked")

    def __init__(self, inner: Pending, unpacked: list[tuple[list[torch.Tensor], torch.Tensor]]) -> None:
        super().__init__((), ())
        self._inner, self._unpacked = inner, unpacked

    def wait(self) -> None:
        """Waits, then copies. Idempotent."""
        self._inner.wait()
        self.operand_bytes = self._inner.operand_bytes
        for outputs, packed in self._unpacked:
            world = len(packed)
            widths = [output.numel() // world for output in outputs]
            for output, columns in zip(outputs, packed[:, : sum(widths)].split(widths, dim=1)):
                output.view(world, -1).copy_(columns)
        self._unpacked = []


class _Summing(Pending):
    """Sums the ranks' rows of a packed exchange into the outputs, in rank order."""

    __slots__ = ("_inner", "_outputs", "_received")

    def __init__(self, inner: Pending, outputs: Sequence[torch.Tensor], received: torch.Tensor) -> None:
        super().__init__((), ())
        self._inner, self._outputs, self._received = inner, outputs, received

    def wait(self) -> None:
        """Waits, then sums. Idempotent."""
        self._inner.wait()
        widths = [output.numel() for output in self._outputs]
        for output, columns in zip(self._outputs, self._received[:, : sum(widths)].split(widths, dim=1)):
            torch.sum(columns, dim=0, out=output)
        self._outputs = ()


def build_no_pipeline(context: Context, options: Options) -> Variant:
    """Ours, waiting for every message between supernodes."""
    return _with_pipeline(_ours(context, options), WaitingPipeline)


def build_no_fused_reduce(context: Context, options: Options) -> Variant:
    """Ours, with one message per parameter."""
    return _with_pipeline(_ours(context, options), PerParameterPipeline)


def build_no_zero_copy(context: Context, options: Options) -> Variant:
    """Ours on the c10d transport, with packed collectives inside the supernode."""
    ours = _ours(context, {**options, "transport": "c10d"})
    for unit in ours.root.units:
        if unit._transport is not None:
            unit._transport = PackingTransport(unit.info.shard_group)
    return ours


def _ours(context: Context, options: Options) -> Ours:
    return Ours(context, take_options("hyperfsdp", options, **OPTIONS))


def _with_pipeline(ours: Ours, pipeline: type[ReductionPipeline]) -> Ours:
    root = ours.root
    root.pipeline = pipeline(root.counters, window=root.pipeline.window)
    return ours
