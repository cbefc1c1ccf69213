"""The hooks of a unit: pre-forward, post-forward, pre-backward, post-backward. Each is one method, in order of time."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from hp_plugin.core.fsdp.nests import cast_floating, map_tensors, opaque_in, tensors_in
from hp_plugin.core.fsdp.phase import Phase
from hp_plugin.core.fsdp.root import Root
from hp_plugin.core.fsdp.unit import Unit, is_in_backward
from hp_plugin.errors import UnsupportedError


class UnitHooks:
    """Connects one unit to the forward and backward of its modules.

    Args:
        unit: The unit.
    """

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self._running: set[nn.Module] = set()
        self._recomputing: list[bool] = []
        """One entry per forward in progress: whether it is a recomputation inside the unit's own backward."""

    def register(self) -> None:
        """Registers the forward and state-dict hooks on every module of the unit."""
        for module in self.unit.modules:
            module.register_forward_pre_hook(self._pre_forward, prepend=True, with_kwargs=True)
            # always_call: a forward that raises (checkpointing stops its recomputation so) must not leave a unit
            # unsharded.
            module.register_forward_hook(self._post_forward, always_call=True)
            module.register_state_dict_pre_hook(lambda *_: self._reshard_for_state_dict("state_dict"))
            module.register_load_state_dict_pre_hook(lambda *_: self._reshard_for_state_dict("load_state_dict"))

    def _reshard_for_state_dict(self, hook: str) -> None:
        if self.unit.has_root:
            self.unit.reshard(hook)
            self.unit.announce_update()  # what is loaded, or written through a state dict, is written in place

    # ---- forward ----------------------------------------------------------------------------------------------------

    def _pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        unit = self.unit
        is_first = not self._running
        self._running.add(module)
        if unit.policy.cast_forward_inputs and unit.policy.param_dtype is not None:
            args, kwargs = cast_floating((args, kwargs), unit.policy.param_dtype)
        if not is_first:
            return args, kwargs
        if not unit.has_root:
            Root(unit)
        root = unit.root
        if root.unit is unit and unit.forward_depth == 0 and not is_in_backward():
            root.begin_forward()
        # In its own backward the unit is unsharded already: activation checkpointing inside recomputes its forward.
        self._recomputing.append(unit.phase is Phase.BACKWARD)
        if self._recomputing[-1]:
            return args, kwargs
        if is_in_backward() and unit.epoch > 0:
            unit.check_epoch(unit.epoch, "recomputation")
        unit.forward_depth += 1
        unit.unshard("pre-forward")
        unit.wait_for_unshard("pre-forward")
        unit.enter(Phase.FORWARD, "pre-forward")
        root.note("compute", "forward", unit)
        if is_in_backward():
            # Activation checkpointing outside the unit recomputes it: what forward needed next has been through.
            root.prefetcher.before_backward(unit)
        else:
            root.prefetcher.before_forward(unit, is_training=root.is_in_training_forward)
        return self._mark_inputs(args, kwargs)

    def _mark_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Routes the inputs through an identity whose backward runs after all that the unit computed from them."""
        if not torch.is_grad_enabled():
            return args, kwargs
        inputs = [tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad]
        if not inputs:
            return args, kwargs
        marked = iter(self._mark(inputs))
        args, kwargs = map_tensors(lambda tensor: next(marked) if tensor.requires_grad else tensor, (args, kwargs))
        return args, kwargs

    def _mark(self, inputs: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        if len(inputs) > 1:
            marked: tuple[torch.Tensor, ...] = _AfterBackward.apply(self, *inputs)
            return marked
        # The same for one tensor, as most units have it, at a third of the cost: an alias whose own node has the hook.
        alias = inputs[0].view_as(inputs[0])
        assert alias.grad_fn is not None
        alias.grad_fn.register_hook(lambda *_: self.post_backward())
        return (alias,)

    def _post_forward(self, module: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
        unit = self.unit
        self._running.discard(module)
        if unit.policy.output_dtype is not None:
            output = cast_floating(output, unit.policy.output_dtype)
        if self._running or not self._recomputing or self._recomputing.pop():
            return output
        unit.forward_depth -= 1
        if output is None and unit.phase is Phase.SHARDED:
            return None  # its gather failed, and with it this forward
        has_backward = torch.is_grad_enabled() and self._watch_outputs(output)
        if unit.forward_depth > 0:
            return output
        root = unit.root
        if has_backward:
            unit.outstanding_forwards += 1
        # With gradients off, the first pass of reentrant checkpointing has a backward nevertheless.
        for_backward = has_backward or root.is_in_training_forward
        if root.unit is unit:
            root.end_forward(has_backward=has_backward)
        unit.enter(Phase.UNSHARDED, "post-forward")
        if self._must_reshard(has_backward):
            unit.reshard("post-forward", for_backward=for_backward)
        return output

    def _must_reshard(self, has_backward: bool) -> bool:
        if has_backward and is_in_backward():
            # Checkpointing outside the unit recomputes it inside backward: its own backward is next and needs it whole.
            self.unit.root.recomputed.append(self.unit)
            return False
        # Without gradients nothing will come back for the full tensors, unless this is the first pass of checkpointing.
        return self.unit.reshards_after_forward or not (has_backward or self.unit.root.is_in_training_forward)

    def _watch_outputs(self, output: Any) -> bool:
        watched = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        hook = functools.partial(self._pre_backward, self.unit.epoch)
        for tensor in watched:
            tensor.register_hook(hook)
        if not watched:
            opaque = opaque_in(output)
            if opaque is not None:
                raise UnsupportedError(
                    f"unit {self.unit.name} returns a {type(opaque).__qualname__}, in which no tensor that requires a "
                    "gradient can be found; register the class with torch.utils._pytree.register_pytree_node, or "
                    "return tensors in a tuple, list or dict, so that the backward of the unit can be followed"
                )
        return bool(watched)

    # ---- backward ---------------------------------------------------------------------------------------------------

    def _pre_backward(self, epoch: int, _gradient: torch.Tensor) -> None:
        unit = self.unit
        root = unit.root
        root.open_backward()
        unit.check_epoch(epoch, "pre-backward")
        unit.unshard("pre-backward")
        unit.wait_for_unshard("pre-backward")
        is_entered = unit.phase is Phase.BACKWARD  # by the gradient of another output
        unit.enter(Phase.BACKWARD, "pre-backward")
        root.note("compute", "backward", unit)
        unit.awaits_reduction = True
        unit.counted_backward = False
        if not is_entered:
            root.prefetcher.before_backward(unit)

    def post_backward(self) -> None:
        """The gradients of the unit's inputs exist, hence normally those of its parameters."""
        unit = self.unit
        is_last_use = unit.outstanding_forwards <= 1
        unit.count_backward()
        if not unit.awaits_reduction:
            return
        if not is_last_use and not unit.has_gradients():
            # The module was used several times in one graph: autograd adds up all uses before it hands out the sum.
            return
        unit.root.finish_backward_of(unit)


class _AfterBackward(torch.autograd.Function):
    """Identity whose backward tells the hooks that everything computed from these inputs has been differentiated.

    Autograd runs ready nodes in reverse order of creation. This node is created before any other of the unit, so it
    runs after all of them, the accumulation of parameter gradients included.
    """

    @staticmethod
    def forward(ctx: Any, hooks: UnitHooks, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.hooks = hooks
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        ctx.hooks.post_backward()
        return (None, *gradients)
