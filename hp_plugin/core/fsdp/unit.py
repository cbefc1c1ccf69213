"""A unit: the parameters that are unsharded together, their phase, and what each hook does with them."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hp_plugin.core.fsdp.bucket import Route
from hp_plugin.core.fsdp.counters import Counters, WaitCause
from hp_plugin.core.fsdp.gradients import UnitGradients
from hp_plugin.core.fsdp.kept import KeptParts
from hp_plugin.core.fsdp.operand import group_operands
from hp_plugin.core.fsdp.options import RootOptions
from hp_plugin.core.fsdp.parameter import MeshInfo, ShardedParameter
from hp_plugin.core.fsdp.phase import Phase, check_transition
from hp_plugin.core.fsdp.policies import MixedPrecisionPolicy
from hp_plugin.core.fsdp.reduction import Reduction
from hp_plugin.core.kernels import accumulate_scaled_
from hp_plugin.core.transport import C10dTransport, Lane, Pending, lane_of
from hp_plugin.errors import HyperParallelError

if TYPE_CHECKING:
    from hp_plugin.core.fsdp.root import Root


def is_in_backward() -> bool:
    """Whether the calling thread runs inside a backward of autograd."""
    return torch._C._current_graph_task_id() != -1


class Unit:
    """The state of one `fully_shard` call.

    Args:
        modules: The modules given to `fully_shard`.
        parameters: Their parameters that no other unit manages.
        info: The mesh.
        policy: Mixed precision.
        options: What `fully_shard` was asked for that holds for the whole root.
        reshard_after_forward: Whether full tensors are released between forward and backward. None: yes, except in the
            root unit, which backward needs first. A number, as `normalized_reshard` gives it: see `kept.py`.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        parameters: list[ShardedParameter],
        *,
        info: MeshInfo,
        policy: MixedPrecisionPolicy,
        options: RootOptions,
        reshard_after_forward: bool | int | None,
    ) -> None:
        self.modules = tuple(modules)
        self.parameters = parameters
        self.operands = group_operands(parameters)
        self.info = info
        self.policy = policy
        self.options = options
        self.reshard_after_forward = reshard_after_forward
        self.reshard_after_backward = True
        self.requires_gradient_sync = True
        self.requires_all_reduce = True
        self.divide_factor = float(info.world_size)
        self.forward_prefetch: list[Unit] | None = None
        """What is gathered ahead where forward enters this unit, instead of what comes next. The same in backward:"""
        self.backward_prefetch: list[Unit] | None = None
        self.name = type(modules[0]).__name__
        self.outstanding_forwards = 0
        """Forwards whose backward has not passed yet; several under pipeline parallelism or when a module is reused."""
        self.awaits_reduction = False
        """Whether backward has entered this unit and its gradients have not been submitted."""
        self.counted_backward = False
        """Whether `count_backward` has run since backward entered this unit."""
        self.forward_depth = 0
        self._root: Root | None = None
        self._phase = Phase.SHARDED
        self._gather: Pending | None = None
        self._gathers_kept = False
        self._prepared = Counters()
        """What the thread that prepares a gather counts. Whoever waits for the gather adds it to the root's."""
        self._kept: KeptParts | None = None
        self.gradients: UnitGradients | None = None
        """Storage of the sharded gradients; exists from the first backward on."""
        self._planned_for: list[ShardedParameter] = []
        """The trainable parameters of which `gradients` has the storage, in the order of `parameters`."""
        self._transport = C10dTransport(info.shard_group) if info.shard_size > 1 else None

    # ---- identity ---------------------------------------------------------------------------------------------------

    @property
    def root(self) -> Root:
        """State shared by all units under one root module; exists from the first forward on."""
        if self._root is None:
            raise HyperParallelError(f"unit {self.name} has no root yet: run a forward of the root module first")
        return self._root

    def attach(self, root: Root, name: str) -> None:
        """Makes this a unit of `root`, called `name` in messages."""
        self._root = root
        self.name = name

    @property
    def has_root(self) -> bool:
        """Whether a first forward has connected this unit to its root."""
        return self._root is not None

    @property
    def phase(self) -> Phase:
        """What the parameters of the unit are at the moment."""
        return self._phase

    def enter(self, phase: Phase, hook: str) -> None:
        """Changes the phase; raises IllegalPhaseError where `hook` must not run in the current one."""
        if phase is not self._phase:
            check_transition(self.name, self._phase, phase, hook)
            self._phase = phase

    @property
    def reshards_after_forward(self) -> bool:
        """`reshard_after_forward` with its default resolved."""
        if self.reshard_after_forward is not None:
            return bool(self.reshard_after_forward)
        return self._root is None or self._root.unit is not self

    @functools.cached_property
    def full_bytes(self) -> int:
        """Bytes that a gather of this unit adds: its full tensors, in the compute dtype."""
        return sum(operand.full_bytes for operand in self.operands)

    @property
    def communicates(self) -> bool:
        """Whether a gather moves bytes between ranks."""
        return self._transport is not None

    # ---- unshard and reshard ----------------------------------------------------------------------------------------

    def unshard(self, hook: str) -> None:
        """Issues the all-gather of all parameters. Every rank of the shard group must call, in the same order."""
        if self._phase is not Phase.SHARDED:
            return
        self.enter(Phase.GATHERING, hook)
        # What forward kept is of the weights of that forward: good for its backward and for nothing else.
        self._gathers_kept = self._kept is not None and self._kept.is_held and is_in_backward()
        if self._transport is None:
            self._begin_gather()
            return
        if not self.operands:
            return
        # No more than one unit beside the one that computes: its gradients under reduction, or full tensors gathered
        # ahead.
        after = self.root.pipeline.intra_in_flight
        if self._kept is not None and self._gathers_kept:
            self._gather = self._kept.transport.all_gather(self._kept.begin_gather, after=after)
        else:
            self._gather = self._transport.all_gather(self._begin_gather, after=after)
        self.root.note("intra", "all-gather", self)

    def _begin_gather(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        for parameter in self.parameters:
            module, attribute = parameter.owners[0]
            if module._parameters[attribute] is not parameter.sharded:
                parameter.adopt_replacement()
        gathered = [operand.begin_gather(self._prepared) for operand in self.operands]
        return [g[0] for g in gathered if g is not None], [g[1] for g in gathered if g is not None]

    def wait_for_unshard(self, hook: str) -> None:
        """Waits for the all-gather and puts the full parameters into the modules."""
        if self._phase is not Phase.GATHERING:
            return
        self._wait_for_gather()
        if self._gathers_kept:
            for operand in self.operands:
                operand.finish_refill()
            if self.outstanding_forwards <= 1:
                self.drop_kept()
        else:
            for operand in self.operands:
                operand.finish_gather(self.root.counters)
        self.enter(Phase.UNSHARDED, hook)

    def reshard(self, hook: str, *, for_backward: bool = False) -> None:
        """Puts the shards back into the modules and releases the full tensors. No communication.

        Args:
            hook: Who calls, for messages.
            for_backward: Keep what `reshard_after_forward` says for the backward of the forward that ends here.
        """
        if self._phase is Phase.SHARDED:
            return
        self._wait_for_gather()
        number = self.reshard_after_forward
        if for_backward and type(number) is int:
            self._keep(number)
        for operand in self.operands:
            operand.release_full()
        self.enter(Phase.SHARDED, hook)

    def _keep(self, number: int) -> None:
        if self._kept is None or self._kept.transport.group.size() != number:
            self._kept = KeptParts(self.operands, self.root.small_transport(self.info, number))
        self._kept.keep(self.root.counters)

    def drop_kept(self) -> None:
        """Frees what was kept for a backward."""
        if self._kept is not None:
            self._kept.drop()

    def _wait_for_gather(self) -> None:
        if self._gather is not None:
            start = time.perf_counter()
            self._gather.wait()
            counters = self.root.counters
            counters.all_gathers += 1
            counters.all_gather_bytes += self._gather.operand_bytes
            counters.copied_bytes += self._gather.copied_bytes
            self._gather = None
            counters.waited(WaitCause.ALL_GATHER, start)
        if self._prepared.copied_bytes:
            self.root.counters.copied_bytes += self._prepared.copied_bytes
            self._prepared.copied_bytes = 0

    # ---- gradients --------------------------------------------------------------------------------------------------

    @functools.cached_property
    def reduce_dtype(self) -> torch.dtype:
        """Dtype in which gradients of this unit are summed."""
        if self.policy.reduce_dtype is not None:
            return self.policy.reduce_dtype
        return functools.reduce(torch.promote_types, (p.compute_dtype for p in self.parameters))

    @functools.cached_property
    def sum_dtype(self) -> torch.dtype:
        """Dtype in which sums are kept between micro-batches and supernodes: not narrower than what the optimizer has.

        Rounding each micro-batch's sum to a narrow reduce dtype loses small gradients (pytorch PR 194628).
        """
        return functools.reduce(torch.promote_types, (p.master_dtype for p in self.parameters), self.reduce_dtype)

    def count_backward(self) -> None:
        """The backward of one forward has passed."""
        self.outstanding_forwards = max(0, self.outstanding_forwards - 1)
        self.counted_backward = True

    def has_gradients(self) -> bool:
        """Whether autograd left a gradient on any full parameter."""
        return any(p.has_gradient for p in self.parameters)

    def submit_gradients(self) -> None:
        """Hands the gradients of this backward to the reduction, or keeps them unsharded where sync is off."""
        self.awaits_reduction = False
        gradients = self.gradients
        if gradients is None:
            return  # nothing was trainable when backward opened
        with torch.no_grad():
            if self.requires_gradient_sync:
                self.root.pipeline.submit(gradients, lambda: self._reduction(gradients))
                return
            for parameter in gradients.parameters:
                self._keep_unsharded(parameter)

    @property
    def trainable(self) -> list[ShardedParameter]:
        """The parameters that require a gradient now."""
        return [p for p in self.parameters if p.sharded.requires_grad]

    @property
    def gradients_are_planned(self) -> bool:
        """Whether `gradients` is for the parameters that are trainable now."""
        return self._planned_for == self.trainable

    def plan_gradients(self) -> UnitGradients | None:
        """Makes the storage of the gradients anew, for the parameters that are trainable now; None where none is.

        Raises:
            HyperParallelError: While a sum of earlier micro-batches is not yet reduced.
        """
        if self.gradients is not None and self.gradients.partial is not None:
            raise HyperParallelError(
                f"unit {self.name}: requires_grad of a parameter changed while gradients of earlier micro-batches "
                "wait for their reduction between supernodes; change it after a backward with "
                "set_requires_all_reduce(True)"
            )
        self._planned_for = trainable = self.trainable
        self.gradients = None
        if trainable:
            operands = group_operands(trainable)
            self.gradients = UnitGradients(self.name, operands, self.sum_dtype, self.root.counters)
        return self.gradients

    @property
    def route(self) -> Route:
        """How sums of this unit travel between supernodes."""
        wire_dtype = self.policy.inter_reduce_dtype or self.reduce_dtype
        return Route(self.info.replicate_group, self.sum_dtype, wire_dtype)

    @property
    def lane(self) -> Lane:
        """Where what follows a reduce-scatter of this unit is queued: one issuing thread for each group."""
        shard_group = self.info.shard_group if self.info.shard_size > 1 else None
        return lane_of(self.info.replicate_group or shard_group, self.info.device.type)

    def _reduction(self, gradients: UnitGradients) -> Reduction:
        operands = []
        for operand in gradients.operands:
            taken = [
                p.take_gradient() if p.unsharded_gradient is None else self._taken_sum(p) for p in operand.parameters
            ]
            operands.append(operand.reduction_operand(taken, self.reduce_dtype, self.root.counters))
        return Reduction(
            operands=operands,
            transport=self._transport,
            all_reduce=self.requires_all_reduce,
            divide_factor=self.divide_factor,
        )

    def _taken_sum(self, parameter: ShardedParameter) -> torch.Tensor | None:
        """The gradient of this backward and of earlier ones that did not communicate; `parameter` loses it."""
        self._keep_unsharded(parameter)
        gradient, parameter.unsharded_gradient = parameter.unsharded_gradient, None
        return gradient

    def _keep_unsharded(self, parameter: ShardedParameter) -> None:
        gradient = parameter.take_gradient()
        if gradient is None:
            return
        if parameter.unsharded_gradient is None:
            parameter.unsharded_gradient = gradient.to(self.sum_dtype)
        else:
            accumulate_scaled_(parameter.unsharded_gradient, gradient, 1.0)

    def describe(self) -> dict[str, Any]:
        """Sizes and dtypes of the unit as data: parameters, elements, bytes at rest and unsharded."""
        return {
            "name": self.name,
            "parameters": len(self.parameters),
            "numel": sum(p.slot.numel for p in self.parameters),
            "bytes_at_rest": sum(p.local.numel() * p.master_dtype.itemsize for p in self.parameters),
            "bytes_unsharded": sum(p.slot.padded_numel * p.compute_dtype.itemsize for p in self.parameters),
            "reshard_after_forward": self.reshard_after_forward or self.reshards_after_forward,
        }
