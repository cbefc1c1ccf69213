"""`FSDPModule`: the methods that a module gains from `fully_shard`. The surface is that of torch FSDP2."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, TypeVar

from torch import nn

from hp_plugin.core.fsdp.counters import Counters
from hp_plugin.core.fsdp.kept import normalized_reshard
from hp_plugin.core.fsdp.root import Root, unit_of
from hp_plugin.core.fsdp.schedule import Schedule
from hp_plugin.core.fsdp.unit import Unit
from hp_plugin.errors import HyperParallelError, UnsupportedError

ModuleT = TypeVar("ModuleT", bound=nn.Module)


class UnshardHandle:
    """The all-gather of `FSDPModule.unshard(async_op=True)`.

    Args:
        unit: The unit that is being unsharded.
    """

    def __init__(self, unit: Unit) -> None:
        self._unit: Unit | None = unit

    def wait(self) -> None:
        """Waits for the all-gather and puts the full parameters into the module. Idempotent."""
        if self._unit is not None:
            self._unit.wait_for_unshard("unshard")
            self._unit = None


class FSDPModule:
    """Mixed into the class of every module given to `fully_shard`. A method acts on this rank alone unless it says so.

    `recurse=True` applies a setting to this module's unit and to those of all modules inside it.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """A plain instance of the class that was sharded."""
        # Containers build new containers when sliced (`model.layers[:2]`); those are plain, not sharded.
        original = next(c for c in cls.__mro__ if not issubclass(c, FSDPModule))
        instance = original.__new__(original, *args, **kwargs)
        type(instance).__init__(instance, *args, **kwargs)
        return instance

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise UnsupportedError(
            f"{type(self).__name__} cannot be deep-copied: its hooks and groups belong to one module. Copy the model "
            "before fully_shard, or copy its state_dict()"
        )

    # ---- parameters -------------------------------------------------------------------------------------------------

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """All-gathers the parameters of this module's unit. Every rank of the shard group must call.

        Args:
            async_op: Return at once with a handle; the parameters are usable after its `wait()`.

        Returns:
            The handle, or None where `async_op` is False.
        """
        unit = self._unit()
        if not unit.has_root:
            self._attach_root()
        unit.unshard("unshard")
        handle = UnshardHandle(unit)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Releases the full parameters of this module's unit. No communication."""
        unit = self._unit()
        if unit.has_root:
            unit.reshard("reshard")

    def set_reshard_after_forward(self, reshard_after_forward: bool | int, recurse: bool = True) -> None:
        """Whether full parameters are released between forward and backward; a number as in `fully_shard`.

        Every rank must call with a number, before the same forward. Raises ConfigurationError for a number that does
        not divide the shard group.
        """
        for unit in self._units(recurse):
            unit.reshard_after_forward = normalized_reshard(reshard_after_forward, unit.info.shard_size)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Whether full parameters are released in backward. False keeps them for the next micro-batch.

        Set it to True before the last backward ahead of an optimizer step: otherwise the next forward runs on the
        weights of before the step.
        """
        for unit in self._units(recurse):
            unit.reshard_after_backward = reshard_after_backward

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Units whose all-gather is issued at the start of this module's forward."""
        self._unit().forward_prefetch = [m._unit() for m in modules]

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Units whose all-gather is issued at the start of this module's backward, instead of the recorded next one."""
        self._unit().backward_prefetch = [m._unit() for m in modules]

    # ---- gradients --------------------------------------------------------------------------------------------------

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """False: backward communicates no gradients and adds them up unsharded, in the reduce dtype.

        The next backward with True reduces the sum. Costs a full gradient per rank.
        """
        for unit in self._units(recurse):
            unit.requires_gradient_sync = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """False: backward reduces inside the supernode only and adds the shards up there, in the reduce dtype.

        The next backward with True reduces the sum between supernodes. Until then `.grad` does not change. This is
        `no_sync` for a two-tier cluster: the slow link carries one reduction however many micro-batches there are.
        """
        for unit in self._units(recurse):
            unit.requires_all_reduce = requires_all_reduce

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """False: backward does not wait for reductions in flight; `.grad` is final after the next with True."""
        if not self._unit().has_root:
            self._attach_root()
        self._unit().root.is_last_backward = is_last_backward

    def reduce_pending_gradients(self) -> None:
        """Reduces between supernodes what earlier backward passes with `set_requires_all_reduce(False)` have summed.

        For a host that learns after the last backward of a step that it was the last. Every rank must call, with the
        same units pending. On return every `.grad` is final.
        """
        if not self._unit().has_root:
            self._attach_root()
        self._unit().root.reduce_pending()

    def set_gradient_divide_factor(self, factor: float, *, recurse: bool = True) -> None:
        """Gradients are the sum over all ranks of the mesh divided by `factor`. Default: the number of those ranks."""
        for unit in self._units(recurse):
            unit.divide_factor = float(factor)

    # ---- what the engine did ----------------------------------------------------------------------------------------

    def fsdp_counters(self) -> Counters:
        """Totals of collectives, bytes and copies of the root of this module. Live object; see `reset()`.

        What lanes count is added at the end of each backward, and here.
        """
        if not self._unit().has_root:
            self._attach_root()
        self._unit().root.collect_counts()
        return self._unit().root.counters

    @contextlib.contextmanager
    def record_fsdp_schedule(self) -> Iterator[Schedule]:
        """Records what the units of this module's root issue while the context is open. See `docs/schedule.md`.

        Example:
            with model.record_fsdp_schedule() as schedule:
                model(inputs).sum().backward()
            print(schedule.table())
        """
        if not self._unit().has_root:
            self._attach_root()
        pipeline = self._unit().root.pipeline
        before, pipeline.schedule = pipeline.schedule, Schedule()
        try:
            yield pipeline.schedule
        finally:
            pipeline.schedule = before

    def fsdp_units(self) -> list[dict[str, Any]]:
        """Name, sizes and settings of every unit in this module, as data."""
        return [unit.describe() for unit in self._units(recurse=True)]

    # ---- internals --------------------------------------------------------------------------------------------------

    def _unit(self) -> Unit:
        assert isinstance(self, nn.Module)
        unit = unit_of(self)
        if unit is None:
            raise HyperParallelError(f"{type(self).__name__} has lost its unit: it was not made by fully_shard")
        return unit

    def _attach_root(self) -> None:
        # As in a first forward: the module on which the user works first without a root becomes the root.
        Root(self._unit())

    def _units(self, recurse: bool) -> Iterator[Unit]:
        assert isinstance(self, nn.Module)
        if not recurse:
            yield self._unit()
            return
        seen: set[int] = set()
        for module in self.modules():
            unit = unit_of(module)
            if unit is not None and id(unit) not in seen:
                seen.add(id(unit))
                yield unit


def install_unit(module: nn.Module, unit: Unit) -> None:
    """Gives `module` its unit and the class `FSDP<its class>`."""
    module.__dict__["_hyperfsdp_unit"] = unit
    module.__class__ = _sharded_class(type(module))  # type: ignore[arg-type]  # mypy: Module is not Hashable


@functools.cache
def _sharded_class(cls: type[nn.Module]) -> type[nn.Module]:
    return type(f"FSDP{cls.__name__}", (FSDPModule, cls), {"__module__": cls.__module__})
