"""State shared by the units under one root module: names, recorded order, the reduction pipeline, end of backward."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist
from torch import nn

from hp_plugin.core.devices import StreamClock, get_device
from hp_plugin.core.fsdp.bucket import Bucket, Route, compose
from hp_plugin.core.fsdp.connect import connect
from hp_plugin.core.fsdp.counters import Counters
from hp_plugin.core.fsdp.gradients import UnitGradients
from hp_plugin.core.fsdp.kept import small_group
from hp_plugin.core.fsdp.options import RootOptions
from hp_plugin.core.fsdp.parameter import MeshInfo
from hp_plugin.core.fsdp.phase import Phase
from hp_plugin.core.fsdp.prefetch import Prefetcher
from hp_plugin.core.fsdp.reduction import DEFAULT_WINDOW, ReductionPipeline
from hp_plugin.core.fsdp.shared import SharedMemory
from hp_plugin.core.fsdp.unit import Unit
from hp_plugin.core.topology import measure_link
from hp_plugin.core.transport import C10dTransport
from hp_plugin.errors import ConfigurationError

_log = logging.getLogger(__name__)
_DEFAULT_MESSAGE_BYTES = 4 << 20
"""Where the link cannot be measured, or may not decide."""


class Root:
    """Shared by a root unit and all units in its modules. Two root modules share nothing.

    Args:
        unit: The unit whose forward ran first without a root: the outermost one.
    """

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        named = _named_units(unit)
        self.options = RootOptions.resolve((name, each.options) for each, name in named.items())
        """Options that hold for all units."""
        _refuse_meta_parameters(named)
        self.units = list(named)
        """In order of `modules()` of the root, the root unit first."""
        device = get_device(unit.info.device.type)
        self.counters = Counters(clock=StreamClock(device) if device.has_streams else None)
        self.bucket_bytes: int | None = self.options.bucket_bytes
        """Bytes of a message between supernodes; None: what suits the link."""
        self.pipeline = ReductionPipeline(self.counters, window=self.options.window or DEFAULT_WINDOW)
        self.is_last_backward = True
        self.is_in_training_forward = False
        """Whether the root's forward runs, with gradients enabled at its start."""
        self._backward_is_open = False
        self.recomputed: list[Unit] = []
        """Units whose forward ran again in this backward and that were left unsharded for their own backward."""
        self._forward_is_open = False
        self.prefetcher = Prefetcher(self._prefetch_budget())
        self._link_bytes: dict[dist.ProcessGroup, int] = {}
        self._small: dict[tuple[dist.ProcessGroup, int], C10dTransport] = {}
        self._shared: list[SharedMemory] | None = None
        for each, name in named.items():
            each.attach(self, name)
            if self.options.deterministic:
                each.add_in_rank_order()

    def note(self, stream: str, event: str, *units: Unit) -> None:
        """Adds an event to the schedule that is being recorded, if one is."""
        if self.pipeline.schedule is not None:
            self.pipeline.schedule.note(stream, event, [unit.name for unit in units])

    def connect(self) -> None:
        """Chooses once how bytes move inside the supernode. Every rank of each shard group must make the first call."""
        if self._shared is None:
            self._shared = connect(self)

    def collect_counts(self) -> None:
        """Adds what lanes have counted so far to `counters`."""
        for unit in self.units:
            unit.collect_counts()
        for memory in self._shared or ():
            memory.collect_waits(self.counters)
        self.counters.collect_waits()

    # ---- order ------------------------------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """Called when the root's forward starts, outside backward. A backward that is still open has failed."""
        if self._backward_is_open:
            self._abandon_backward()
        for bucket in self.pipeline.buckets:
            bucket.release_flat()
        self.prefetcher.release("begin of forward after a failed one")
        for unit in self.units:
            # Kept for a backward that did not come before the weights changed: the next forward is to see the new ones.
            if unit.phase is Phase.UNSHARDED and unit.shards_have_changed:
                unit.reshard("begin of forward after a change of the weights")
        self._forward_is_open = True
        self.is_in_training_forward = torch.is_grad_enabled()
        if self.is_in_training_forward:
            self.prefetcher.forward.begin()

    def _abandon_backward(self) -> None:
        """The last backward raised before its end: its gradients are lost, its full tensors are released."""
        self._backward_is_open = False
        self.recomputed = []
        self.pipeline.discard()
        for unit in self.units:
            unit.awaits_reduction = False
            for parameter in unit.parameters:
                parameter.take_gradient()
            unit.drop_kept()
            unit.reshard("begin of forward after a failed backward")

    def end_forward(self, *, has_backward: bool) -> None:
        """Called when a forward of the root ends; without effect for its recomputation inside backward."""
        if not self._forward_is_open:
            return
        self._forward_is_open = False
        self.is_in_training_forward = False
        self.prefetcher.release("end of forward")
        if has_backward:
            self.prefetcher.forward.end()

    def _prefetch_budget(self) -> int:
        """Bytes that may be gathered ahead: as configured, else those of the largest unit inside the root.

        The root itself is not counted: it stays gathered, so what is ahead of a unit comes on top of it.
        """
        if self.options.prefetch is not None:
            return self.options.prefetch
        return max((unit.full_bytes for unit in self.units if unit is not self.unit), default=0)

    def small_transport(self, info: MeshInfo, size: int) -> C10dTransport:
        """Collectives of the group of `size` ranks inside the shard group of `info`, which is made on the first call.

        Every rank of the shard group must make that first call, in the same order.
        """
        key = (info.shard_group, size)
        if key not in self._small:
            self._small[key] = C10dTransport(small_group(info, size))
        return self._small[key]

    # ---- backward ---------------------------------------------------------------------------------------------------

    def open_backward(self) -> None:
        """Called when backward reaches the first unit: plans reductions, arranges for `close_backward` at its end."""
        if not self._backward_is_open:
            self._backward_is_open = True
            if not all(unit.gradients_are_planned for unit in self.units):
                self.plan_reductions()
            self.prefetcher.begin_backward()
            torch.autograd.Variable._execution_engine.queue_callback(self.close_backward)

    def close_backward(self) -> None:
        """End of backward: reduces what no hook has reduced, reshards, and waits until every `.grad` is final.

        Units whose inputs need no gradient (an embedding, the root) have no later hook than this one. The order is that
        of the units, reversed, so all ranks agree on it.
        """
        self._backward_is_open = False
        for unit in reversed(self.units):
            if unit.awaits_reduction:
                if not unit.counted_backward:
                    unit.count_backward()
                self.finish_backward_of(unit)
            if unit.outstanding_forwards == 0:
                unit.drop_kept()
        recomputed, self.recomputed = self.recomputed, []
        for unit in recomputed:
            # No gradient reached it: nothing else would take its full tensors away before the weights change.
            if unit.phase is Phase.UNSHARDED and unit.reshard_after_backward:
                unit.reshard("end of backward")
        self.prefetcher.release("end of backward")
        self.prefetcher.backward.end()
        self.pipeline.end_round()
        if self.is_last_backward:
            self.note("compute", "wait for every all-reduce")
            self.pipeline.flush()
        self.collect_counts()

    def finish_backward_of(self, unit: Unit) -> None:
        """All gradients of `unit` of this backward exist: releases its full tensors and starts the reduction."""
        if unit.reshard_after_backward:
            unit.reshard("post-backward")
        else:
            unit.enter(Phase.UNSHARDED, "post-backward")
        unit.submit_gradients()

    def reduce_pending(self) -> None:
        """Sends across what sums of earlier backward passes wait for it, outside backward; waits for all of it."""
        self.pipeline.flush()
        for unit in reversed(self.units):
            if unit.gradients is None or unit.gradients.partial is None:
                continue
            crosses, unit.requires_all_reduce = unit.requires_all_reduce, True
            unit.submit_gradients()  # a sum of zeros inside the supernode, which completes the bucket
            unit.requires_all_reduce = crosses
        self.pipeline.end_round()
        self.pipeline.flush()
        self.collect_counts()

    def plan_reductions(self) -> None:
        """Puts the gradients of all units into buckets. Every rank calls it at the start of its first backward.

        Units are taken in reverse order of `modules()`, which is that of backward where modules run in the order in
        which they are defined. Raises HyperParallelError while sums of earlier micro-batches wait for their reduction.
        """
        self.pipeline.flush()
        planned = [(unit, unit.plan_gradients()) for unit in reversed(self.units)]
        by_route: dict[Route, list[tuple[Unit, UnitGradients]]] = {}
        for unit, gradients in planned:
            if gradients is not None:
                by_route.setdefault(unit.route, []).append((unit, gradients))
        buckets = []
        for route, members in by_route.items():
            sizes = [gradients.numel * route.wire_dtype.itemsize for _, gradients in members]
            position = 0
            for count in compose(sizes, self._message_bytes(route, members[0][0].info)):
                taken = members[position : position + count]
                position += count
                buckets.append(Bucket([g for _, g in taken], route, taken[0][0].lane, taken[0][0].info.device))
        order = {gradients: position for position, (_, gradients) in enumerate(planned)}
        self.pipeline.use(sorted(buckets, key=lambda bucket: order[bucket.units[0]]))

    def _message_bytes(self, route: Route, info: MeshInfo) -> int:
        """Bytes of a message between supernodes: as configured, else what suits the link, alike on the whole mesh."""
        if route.group is None:
            return 0  # nothing crosses, nothing is gained by waiting for one another
        if self.bucket_bytes is not None:
            return self.bucket_bytes
        if self.options.deterministic:
            return _DEFAULT_MESSAGE_BYTES  # what is measured differs from run to run, and the order of sums with it
        if route.group not in self._link_bytes:
            link = measure_link(route.group, info.device)
            chosen = torch.tensor([_DEFAULT_MESSAGE_BYTES if link is None else link.message_bytes], device=info.device)
            if info.shard_size > 1:
                dist.all_reduce(chosen, op=dist.ReduceOp.MAX, group=info.shard_group)
            self._link_bytes[route.group] = int(chosen)
            _log.info("link between supernodes: %s; bucket_bytes=%d", link, self._link_bytes[route.group])
        return self._link_bytes[route.group]


def _named_units(root: Unit) -> dict[Unit, str]:
    """Every unit in the modules of `root`, in order of `modules()`, with its name for messages."""
    named: dict[Unit, str] = {}
    for top in root.modules:
        for name, module in top.named_modules():
            unit = unit_of(module)
            if unit is not None:
                named.setdefault(unit, name or f"root ({type(module).__name__})")
    return named


def _refuse_meta_parameters(named: dict[Unit, str]) -> None:
    for unit, name in named.items():
        for parameter in unit.parameters:
            parameter.adopt_replacement()
            if parameter.local.is_meta:
                raise ConfigurationError(
                    f"parameter {parameter.name} of unit {name} is still on the meta device; materialise the "
                    "model before its first forward: model.to_empty(device=...) and then initialise its weights"
                )


def unit_of(module: nn.Module) -> Unit | None:
    """The unit that `fully_shard` made for `module`; None where it made none."""
    unit = module.__dict__.get("_hyperfsdp_unit")
    assert unit is None or isinstance(unit, Unit)
    return unit
