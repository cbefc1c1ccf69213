"""A unit: the parameters that are unsharded together, their phase, and what each hook does with them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hp_plugin.core.fsdp.bucket import Route
from hp_plugin.core.fsdp.counters import Counters
from hp_plugin.core.fsdp.fulls import FullTensors, GatheredFulls
from hp_plugin.core.fsdp.gradients import UnitGradients
from hp_plugin.core.fsdp.operand import Operand, group_operands
from hp_plugin.core.fsdp.options import RootOptions
from hp_plugin.core.fsdp.parameter import MeshInfo, ShardedParameter
from hp_plugin.core.fsdp.phase import Phase, check_transition
from hp_plugin.core.fsdp.policies import MixedPrecisionPolicy
from hp_plugin.core.fsdp.ranges import profiler_range
from hp_plugin.core.fsdp.reduction import Reduction
from hp_plugin.core.kernels import accumulate_scaled_
from hp_plugin.core.transport import C10dTransport, Lane, Pending, announce_update, gradient_owner, lane_of
from hp_plugin.core.transport.shm import GradientRing
from hp_plugin.errors import HyperParallelError

if TYPE_CHECKING:
    from hp_plugin.core.fsdp.root import Root
    from hp_plugin.core.fsdp.shared_fulls import SharedFulls


class StaleParametersError(HyperParallelError, RuntimeError):
    """A backward found other parameters than its forward had."""


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
        residence: Where shards live when ranks share memory: "private" or "aliased", see `shared_fulls.py`.
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
        residence: str = "private",
    ) -> None:
        self.modules = tuple(modules)
        self.parameters = parameters
        self.operands = group_operands(parameters)
        self._held = [(*parameter.owners[0], parameter) for parameter in parameters]
        self.info = info
        self.policy = policy
        self.options = options
        self.reshard_after_forward = reshard_after_forward
        self.residence = residence
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
        self.gradients: UnitGradients | None = None
        """Storage of the sharded gradients; exists from the first backward on."""
        self._planned_for: list[ShardedParameter] = []
        """The trainable parameters of which `gradients` has the storage, in the order of `parameters`."""
        self._planned_owners: list[int | None] = []
        """Of each of them, which rank alone gets its gradient."""
        self._transport = C10dTransport(info.shard_group) if info.shard_size > 1 else None
        self._fulls: FullTensors = GatheredFulls(self.operands, info, self._transport)
        self._ring: GradientRing | None = None
        self._index = 0
        self._on_lane, self._collected_bytes = Counters(), 0
        """What the lane counts, which never touches the root's counters; and what of it these have already."""
        self.epoch = 0
        """Rises with every gather that finds other values in the shards than the one before."""
        self._shard_versions: list[int] = []

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
        return self._transport is not None and bool(self.operands)

    def add_in_rank_order(self) -> None:
        """Fixes the order of sums inside the shard group."""
        if self._transport is not None:
            self._transport.adds_in_rank_order = True

    def share(self, fulls: SharedFulls, ring: GradientRing) -> None:
        """Makes this unit use memory that the ranks of the shard group share instead of collectives."""
        self._fulls, self._ring, self._index = fulls, ring, fulls.index

    # ---- unshard and reshard ----------------------------------------------------------------------------------------

    def unshard(self, hook: str) -> None:
        """Starts to gather all parameters. Every rank of the shard group must call, in the same order."""
        if self._phase is not Phase.SHARDED:
            return
        if self.communicates:
            self.root.connect()
        for_backward = is_in_backward() and self.epoch > 0
        if not for_backward:
            for module, attribute, parameter in self._held:
                if module._parameters[attribute] is not parameter.sharded:
                    parameter.adopt_replacement()
            self._fulls.take_in_shards(self.root)
            if self.shards_have_changed:
                self._shard_versions = self._versions()
                self.epoch += 1
        self.enter(Phase.GATHERING, hook)
        with profiler_range("all-gather", self.name):
            communicates = self._fulls.begin(self.root, for_backward=for_backward)
        if communicates:
            self.root.note("intra", "all-gather", self)

    def _versions(self) -> list[int]:
        # An operator on a DTensor bumps the counter of the DTensor alone, one on its local tensor that one's alone.
        return [p.sharded._version + p.sharded._local_tensor._version for p in self.parameters]  # type: ignore[attr-defined]

    @property
    def shards_have_changed(self) -> bool:
        """Whether a shard has been written, with torch's operators, since it was last gathered for a forward."""
        return self.epoch == 0 or self._versions() != self._shard_versions

    def check_epoch(self, epoch: int, hook: str) -> None:
        """Notices what autograd would notice in a model that is not sharded: weights that change under a graph.

        Args:
            epoch: The unit's at the forward.
            hook: Who asks, for messages.

        Raises:
            StaleParametersError: A shard has changed since that forward.
        """
        if epoch != self.epoch or self._versions() != self._shard_versions:
            raise StaleParametersError(
                f"{hook} of unit {self.name}: its parameters have changed since the forward whose backward this is (an "
                "optimizer step, load_state_dict or another write in between), so gradients would be wrong. Run "
                "backward before the step, or the forward again after it"
            )

    def wait_for_unshard(self, hook: str) -> None:
        """Waits for the parameters of all ranks and puts the full ones into the modules."""
        if self._phase is not Phase.GATHERING:
            return
        with profiler_range("wait for all-gather of", self.name):
            self._fulls.wait(self.root)
        self._fulls.install(self.root, is_last_use=self.outstanding_forwards <= 1)
        self.enter(Phase.UNSHARDED, hook)

    def reshard(self, hook: str, *, for_backward: bool = False) -> None:
        """Puts the shards back into the modules and gives up the full tensors. No communication.

        Args:
            hook: Who calls, for messages.
            for_backward: Keep what `reshard_after_forward` says for the backward of the forward that ends here.
        """
        if self._phase is Phase.SHARDED:
            return
        self._fulls.wait(self.root)
        number = self.reshard_after_forward
        self._fulls.release(self.root, keep=number if for_backward and type(number) is int else None)
        self.enter(Phase.SHARDED, hook)

    def drop_kept(self) -> None:
        """Frees what was kept for a backward."""
        self._fulls.drop_kept()

    def announce_update(self) -> None:
        """The shards may be written from now on until the next gather: waits for ranks that still read them."""
        announce_update([parameter.sharded for parameter in self.parameters])

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
        with torch.no_grad(), profiler_range("reduce-scatter", self.name):
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
        return self._planned_for == self.trainable and self._planned_owners == self._gradient_owners()

    def _gradient_owners(self) -> list[int | None]:
        return [gradient_owner(p.sharded) for p in self._planned_for]

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
        self._planned_owners = self._gradient_owners()
        self.gradients = None
        if trainable:
            operands = group_operands(trainable)
            owners, replicas = dict(zip(trainable, self._planned_owners)), self.info.replicate_group
            self.gradients = UnitGradients(
                self.name, operands, self.sum_dtype, self.root.counters, owners=owners, replicas=replicas
            )
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
        taken = [
            [p.take_gradient() if p.unsharded_gradient is None else self._taken_sum(p) for p in operand.parameters]
            for operand in gradients.operands
        ]
        operands: list[torch.Tensor] = []
        start = None
        if self._ring is None:
            for operand, full in zip(gradients.operands, taken):
                operands.append(operand.reduction_operand(full, self.reduce_dtype, self.root.counters))
        else:
            start = functools.partial(self._write_into_ring, self._ring, gradients.operands, taken)
        numel = sum(operand.slot_numel for operand in gradients.operands) * self.info.shard_size
        return Reduction(
            operands=operands,
            dtype=self.reduce_dtype,
            num_bytes=numel * self.reduce_dtype.itemsize,
            transport=self._transport,
            all_reduce=self.requires_all_reduce,
            divide_factor=self.divide_factor,
            start=start,
        )

    def _write_into_ring(
        self,
        ring: GradientRing,
        operands: Sequence[Operand],
        taken: list[list[torch.Tensor | None]],
        outputs: list[torch.Tensor],
    ) -> Pending:
        """Runs on the lane: copies gradients to where the peers read them; what the sum reads itself stays."""
        numels = [operand.slot_numel * self.info.shard_size for operand in operands]
        entry, must_be_done = ring.place(self._index, numels, self.reduce_dtype)
        ring.wait_until_free(must_be_done, self._index)
        own = [
            operand.write_for_peers(taken.pop(0), self.reduce_dtype, self._on_lane, out=place)
            for operand, place in zip(operands, entry.operands)
        ]
        return ring.reduce_scatter(entry, outputs, own=own)

    def collect_counts(self) -> None:
        """Adds what the lane has counted since the last call to the root's counters."""
        new = self._on_lane.copied_bytes - self._collected_bytes
        self._collected_bytes += new
        self.root.counters.copied_bytes += new

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
            "residence": self.residence,
            "transport": None if self._transport is None else "c10d" if self._ring is None else "shm",
        }
