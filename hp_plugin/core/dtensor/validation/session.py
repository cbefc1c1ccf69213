"""`Session`: follows a planned model on one rank, along the record of one process."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from hp_plugin.core.dtensor.placement import COPY, PARTIAL
from hp_plugin.core.dtensor.tolerance import FLOOR
from hp_plugin.core.dtensor.validation.arrangement import Placing, by_value
from hp_plugin.core.dtensor.validation.borders import Borders
from hp_plugin.core.dtensor.validation.calls import intercepted
from hp_plugin.core.dtensor.validation.checker import Site
from hp_plugin.core.dtensor.validation.compare import Scale
from hp_plugin.core.dtensor.validation.operations import Operations
from hp_plugin.core.dtensor.validation.reference import Record
from hp_plugin.core.dtensor.validation.report import PlacementError
from hp_plugin.core.dtensor.validation.tracking import describe
from hp_plugin.errors import UnsupportedError


class Session(Operations, Borders):
    """One rank of a planned model that is followed. See `Tracking` for its arguments."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._generator = torch.Generator()
        self.parameters_compared = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Session:
        raise UnsupportedError(
            "a model in validation mode cannot be copied: it is tied to the run that it is compared with; copy the "
            "model before the plan is applied."
        )

    @contextlib.contextmanager
    def following(self, records: list[Record]) -> Iterator[None]:
        """While it lasts, what this thread runs is compared with `records`. Every rank must enter."""
        self._records, self._cursor, self.is_following, self.operations = records, 0, True, []
        self._modules = []
        self._generator.manual_seed(0)
        try:
            self._check_parameters()
            with intercepted(self):
                yield
            left = self.peek()
            if left is not None:
                self.fail_structure("call", f"One process goes on with {describe(left)}, this rank has finished.")
            self.checker.gather("|end", None)
        except PlacementError:
            raise
        except Exception as error:
            # The others wait for this rank.
            with contextlib.suppress(Exception):
                self.checker.fail(self.finding("structure", "", f"Rank {self.grid.index} raised {error!r}."))
            raise
        finally:
            self.is_following = False

    def loss(self, function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """See `Follower`: the loss is one operation, as divided logits are added up inside of it."""

        def followed(*args: Any, **kwargs: Any) -> torch.Tensor:
            if not self.is_following or self._depth:
                return function(*args, **kwargs)
            result: torch.Tensor = self.region("loss", function, args, kwargs)
            return result

        return followed

    # ---------------------------------------------------------------- parameters

    def _check_parameters(self) -> None:
        """Every rank holds its piece of the weights of one process."""
        for name, parameter in self._model.named_parameters():
            placing = self.held(name, parameter)
            owner, _, attribute = name.rpartition(".")
            site = Site(owner, "parameters", ("parameter", "parameter"), (placing,), (f"parameter {attribute}",))
            whole = self.whole_of(name, parameter).value
            self._compare(site, parameter.detach(), whole, placing, Scale.of([], [whole]))

    def check_gradients(self, gradients: Mapping[str, torch.Tensor | None]) -> None:
        """Compares the gradients of the parameters with those of one process. Every rank must call.

        Raises:
            PlacementError: for the first one, in the order of the model, that is not laid out as the parameter is held.
        """
        floor = FLOOR * math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values() if g is not None))
        for name, parameter in self._model.named_parameters():
            owner, _, attribute = name.rpartition(".")
            # Over an axis of the batch, whoever averages over the data-parallel axes has yet to do so.
            held = self.held(name, parameter)
            rest = math.prod(size for p, size in zip(held, self.grid.sizes, strict=True) if p == COPY)
            placing = tuple(PARTIAL if p == COPY else p for p in held)
            what = f"gradient of parameter {attribute}"
            site = Site(owner, "backward", ("parameter_gradient", "parameter_gradient"), (placing,), (what,))
            whole = gradients[self._applied.whole_name(name)]
            found = parameter.grad
            if any(self.checker.gather(f"{owner}|{what}", (whole is None) != (found is None))):
                reason = "One process has one and a rank has none, or the other way round."
                finding = self.finding("parameter_gradient", "backward", reason)
                self.checker.fail(replace(finding, module=owner, tensor=what))
            if whole is not None and found is not None:
                self._compare(site, found / rest, whole, placing, Scale(floor, self._longest, is_chain=True))
            self.parameters_compared += whole is not None

    def _compare(self, site: Site, value: torch.Tensor, whole: torch.Tensor, placing: Placing, scale: Scale) -> None:
        [found] = self.checker.by_value(site, [value], [whole], scale, list(placing))
        if by_value(placing) not in found:
            self.checker.report_value(site, 0, value, whole, scale, found)

    # ---------------------------------------------------------------- tensors that are whole in one process

    def assemble(self, tensor: torch.Tensor, placing: Placing) -> torch.Tensor:
        """The whole tensor of which every rank has what `placing` gives it. Every rank must call."""
        whole = tensor.detach()
        for axis in reversed(range(len(placing))):
            parts: list[Any] = self.checker.gather("|assemble", whole)
            mine = [parts[i] for i in self._line(axis)]
            if placing[axis].is_shard:
                blocks = [part.chunk(placing[axis].blocks, placing[axis].dim) for part in mine]
                whole = torch.cat([b for pieces in zip(*blocks, strict=True) for b in pieces], placing[axis].dim)
            elif placing[axis].kind == "partial":
                whole = torch.stack(mine).sum(0)
        return whole.requires_grad_(tensor.requires_grad)

    def _line(self, axis: int) -> list[int]:
        here = self.grid.coordinate
        return [
            i
            for i, other in enumerate(self.grid.coordinates)
            if all(a == b for n, (a, b) in enumerate(zip(other, here, strict=True)) if n != axis)
        ]
