"""`HyperMuon`: Muon for hidden matrices and AdamW for everything else, on parameters sharded in any way."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT, StateDict

from hp_plugin.core.kernels import decay_update_
from hp_plugin.core.layout import local_tensor
from hp_plugin.core.muon.agreement import compare_parameters, loads_among
from hp_plugin.core.muon.blocks import Split
from hp_plugin.core.muon.communicator import Communicators, GroupCommunicators, share_from
from hp_plugin.core.muon.counters import MuonCounters
from hp_plugin.core.muon.distribution import Distribution, Piece
from hp_plugin.core.muon.exchange import Exchanger
from hp_plugin.core.muon.messages import as_layers, read_runs, write_runs
from hp_plugin.core.muon.momentum import advance, look_ahead_without_gradient
from hp_plugin.core.muon.options import adamw_options, complete_group, muon_options, newton_schulz_of, shared_options
from hp_plugin.core.muon.plan import (
    DEFAULT_WAVE_BYTES,
    ExchangePlan,
    MatrixParameter,
    PlannedBlock,
    make_plan,
)
from hp_plugin.core.muon.routing import Routing, route
from hp_plugin.core.muon.scale import scale_factor
from hp_plugin.core.muon.splits import blocks_of
from hp_plugin.core.muon.state import OwnerPlaced, check_matrix, load_into, owner_placed
from hp_plugin.core.muon.waves import Contribution
from hp_plugin.core.optim.adamw import local_gradient, new_adamw_state, step_adamw, zeros_like_local
from hp_plugin.core.topology import Topology
from hp_plugin.core.transport import allows_gradient_owner, announce_update, gradient_owner, set_gradient_owner
from hp_plugin.errors import ConfigurationError, UnsupportedError


class HyperMuon(Optimizer):
    """Muon (Jordan et al., https://kellerjordan.github.io/posts/muon/), distributed by the layout of its parameters.

    Parameters may be plain tensors, DTensors on any mesh (sharded along any dims and axes, unevenly, with
    `_StridedShard`, with empty local shards, replicated along axes), parameters of `fully_shard`, or tensors with an
    explicit `Distribution`. Every logical matrix is orthogonalized once, by one rank of all that hold a part of it or a
    copy, and the fewest bytes travel for it: see `hp_plugin.core.muon.plan`. With `exact=True` the result is, bit for
    bit, that of `torch.optim.Muon` in one process that is given the same gradients.

    State of each parameter, made when it is added and alike on all ranks: `momentum_buffer` for Muon (placed as the
    parameter, `momentum_dtype`); `step`, `exp_avg` and `exp_avg_sq` for AdamW.

    Args:
        params: A model, or what `route` made of one: who trains which parameter, printed once on rank 0 and kept as
            `routing`; or parameter groups, each with "algorithm" "muon" or "adamw"; or parameters, all of them
            matrices.
        lr: Learning rate of Muon, before the scale.
        momentum: Decay of the momentum.
        nesterov: Whether the gradient counts once more.
        weight_decay: Decoupled decay, multiplied by `lr` and not by the scale.
        adam_lr: Learning rate of the AdamW part.
        adam_betas: Decay rates of AdamW.
        adam_eps: Added to AdamW's denominator.
        adam_weight_decay: Decay of the AdamW part; None is `weight_decay`.
        splits: Of parameters that hold several matrices, how they are cut.
        distributions: Of parameters that are plain tensors here, where their shards are.
        process_group: Ranks that hold replicas of the parameters that are plain tensors, as with DDP: each matrix is
            then orthogonalized by one of them. None: every rank works for itself.
        topology: Which ranks share a supernode, for counters.
        wave_bytes: Bytes of matrices that one rank owns in a wave; small waves overlap, large ones batch.
        communicators: How ranks are reached; None is torch.distributed.
        **options: Everything else of Muon, by the names of `MuonOptions`: scale, coefficients, steps, ns_dtype, exact,
            exchange, ...
    """

    _step_supports_amp_scaling = True  # GradScaler then leaves it to `step` to skip, on all ranks alike

    def __init__(
        self,
        params: nn.Module | Routing | ParamsT,
        lr: float = 0.02,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.1,
        adam_lr: float = 3e-4,
        adam_betas: tuple[float, float] = (0.9, 0.999),
        adam_eps: float = 1e-8,
        adam_weight_decay: float | None = None,
        splits: Mapping[Tensor, Split] | None = None,
        distributions: Mapping[Tensor, Distribution] | None = None,
        process_group: dist.ProcessGroup | None = None,
        topology: Topology | None = None,
        wave_bytes: int = DEFAULT_WAVE_BYTES,
        communicators: Communicators | None = None,
        **options: Any,
    ) -> None:
        self._splits: dict[Tensor, Split] = dict(splits or {})
        self._distributions = dict(distributions or {})
        self._process_group = process_group
        self._topology = topology
        if wave_bytes < 1:
            raise ConfigurationError(f"wave_bytes is {wave_bytes}, but a wave needs at least one byte")
        self._wave_bytes = wave_bytes
        self._communicators: Communicators = communicators or GroupCommunicators()
        self._own_defaults = {
            "muon": {
                "lr": lr,
                "momentum": momentum,
                "nesterov": nesterov,
                "weight_decay": weight_decay,
                **muon_options(options).as_group(),
            },
            "adamw": adamw_options(
                lr=adam_lr,
                betas=adam_betas,
                eps=adam_eps,
                weight_decay=weight_decay if adam_weight_decay is None else adam_weight_decay,
            ),
        }
        self._rank = self._communicators.rank
        self.routing: Routing | None = None
        self.counters = MuonCounters(topology)
        self._exchanger: Exchanger | None = None
        self._is_planned = False
        self._decayed: set[int] = set()
        self._placed: list[OwnerPlaced] = []
        self._matrices: list[tuple[Tensor, dict[str, Any]]] = []
        super().__init__(self._groups_of(params), {"lr": lr})
        if not any(group["algorithm"] == "muon" for group in self.param_groups):
            raise ConfigurationError(
                "no parameter goes to Muon: every group has the algorithm adamw. Give it matrices, or use HyperAdamW"
            )

    def _groups_of(self, params: nn.Module | Routing | ParamsT) -> ParamsT:
        if isinstance(params, nn.Module):
            params = route(params)
        if not isinstance(params, Routing):
            return params
        self.routing = params
        self._splits = {**params.splits, **self._splits}
        if self._rank == 0:
            sys.stderr.write(f"{params.table()}\n")
        return params.param_groups()

    def __getstate__(self) -> dict[str, Any]:
        raise UnsupportedError(
            "HyperMuon holds process groups and cannot be copied or pickled; make another one and load its state_dict()"
        )

    # ---- parameters and state ---------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters with options of their own. The exchange is planned anew at the next step.

        Args:
            param_group: `params`, and any of: `algorithm`, "muon" (the default) or "adamw", and the options of it.

        Raises:
            ConfigurationError: An option is unknown or out of range.
            UnsupportedError: Muon is given a parameter that is no matrix.
        """
        self._forget_gradient_owners()
        super().add_param_group(complete_group(param_group, self._own_defaults))
        group = self.param_groups[-1]
        for index, parameter in enumerate(group["params"]):
            if group["algorithm"] == "adamw":
                self.state[parameter].update(new_adamw_state(parameter, fused=bool(group["fused"])))
            else:
                check_matrix(self._name(group, index), parameter)
                self.state[parameter]["momentum_buffer"] = zeros_like_local(parameter, group["momentum_dtype"])
        self._is_planned = False

    def _name(self, group: Mapping[str, Any], index: int) -> str:
        names = group.get("param_names")
        if names:
            return str(names[index])
        number = next(number for number, each in enumerate(self.param_groups) if each is group)  # == compares tensors
        return f"{index} of group {number}"

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Loads what `state_dict()` gave on the same mesh; dtypes stay as they are here.

        To load on another mesh use `torch.distributed.checkpoint.state_dict.set_optimizer_state_dict` or
        `hp_plugin.core.checkpoint`.

        Raises:
            ConfigurationError: Groups with other algorithms, or a state of another shape.
        """
        for mine, theirs in zip(self.param_groups, state_dict["param_groups"]):
            if mine["algorithm"] != theirs.get("algorithm"):
                raise ConfigurationError(
                    f"a parameter group steps with {mine['algorithm']} here and has the state of "
                    f"{theirs.get('algorithm')}: route the parameters alike, or import the momentum with "
                    "hp_plugin.core.muon.convert"
                )
        self._forget_gradient_owners()
        # torch casts loaded state to the dtype of the parameter: fp32 momentum of bf16 weights would lose its bits.
        state = self.state
        super().load_state_dict({**state_dict, "state": {}})
        self.state = state
        self._make_missing_momentum()
        packed = [key for group in state_dict["param_groups"] for key in group["params"]]
        for key, parameter in zip(packed, (p for group in self.param_groups for p in group["params"])):
            load_into(state[parameter], state_dict["state"].get(key, {}), shape=tuple(parameter.shape))
        self._exchanger, self._is_planned, self._placed = None, False, []

    def state_dict(self) -> StateDict:
        """The state of this rank, as of any torch optimizer.

        Where the momentum of a parameter is on one replica alone (`momentum_placement="owner"`) every rank must call:
        the others get a copy of it, which lives as long as what is returned.
        """
        self.share_momentum()
        try:
            found = super().state_dict()
            return {**found, "state": {key: dict(state) for key, state in found["state"].items()}}
        finally:
            self.drop_momentum()

    def share_momentum(self) -> None:
        """Gives all replicas the momentum that one of them has, until `drop_momentum`. Every rank must call."""
        self._make_missing_momentum()
        for index, owner, holders in self._placed:
            buffer = local_tensor(self.state[self._matrices[index][0]]["momentum_buffer"])
            share_from(self._communicators.over(holders), owner, buffer)

    def _make_missing_momentum(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"] if group["algorithm"] == "muon" else ():
                if "momentum_buffer" not in self.state[parameter]:
                    self.state[parameter]["momentum_buffer"] = zeros_like_local(parameter, group["momentum_dtype"])

    def plan_again(self) -> None:
        """Makes a new plan at the next step, after the momentum was written in place on all replicas."""
        self._is_planned = False

    def drop_momentum(self) -> None:
        """Frees the momentum that another replica keeps."""
        for index, owner, _ in self._placed:
            if owner != self._rank:
                del self.state[self._matrices[index][0]]["momentum_buffer"]

    # ---- the step ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates all parameters. Every rank that holds a part of a parameter must call, with or without gradients.

        With a `torch.amp.GradScaler` gradients are unscaled here, and if any rank found infinities no rank changes
        anything, momentum included.

        Args:
            closure: Evaluates the model again, with gradients, and returns the loss.

        Returns:
            What the closure returned, else None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.counters = MuonCounters(self._topology)
        if self._skips():
            return loss
        exchanger = self._exchange()  # before anything moves: ranks may find that they disagree
        for group in self.param_groups:
            if group["algorithm"] == "adamw":
                step_adamw(group, self.state)
        announce_update([parameter for parameter, _ in self._matrices])
        self._decayed.clear()
        self.counters = exchanger.run(self._contribute, self._apply)
        return loss

    def _skips(self) -> bool:
        """Whether this step is to be left out because of an overflow; unscales gradients otherwise."""
        found: Tensor | None = getattr(self, "found_inf", None)
        if found is None:
            return False
        found = found.detach().clone()
        if dist.is_initialized():
            dist.all_reduce(found, dist.ReduceOp.MAX)
        if float(found) > 0:
            return True
        scale: Tensor | None = getattr(self, "grad_scale", None)
        if scale is not None:
            factor = 1.0 / float(scale)
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        local_gradient(parameter).mul_(factor)
        return False

    def _contribute(self, index: int) -> Contribution:
        parameter, group = self._matrices[index]
        buffer = local_tensor(self.state[parameter]["momentum_buffer"])
        if parameter.grad is None:
            update = look_ahead_without_gradient(buffer, group)
        else:
            update = advance(buffer, local_gradient(parameter).contiguous(), group)  # it may be strided otherwise
        return Contribution(as_layers(update, self.plan.parameters[index].view), parameter.grad is not None)

    def _apply(self, block: PlannedBlock, piece: Piece, values: Tensor) -> None:
        parameter, group = self._matrices[block.parameter]
        if parameter.grad is None and block.parameter not in self._decayed:
            # Other ranks had a gradient: this one's is zero, and the momentum goes on.
            self._decayed.add(block.parameter)
            if "momentum_buffer" in self.state[parameter]:
                local_tensor(self.state[parameter]["momentum_buffer"]).mul_(group["momentum"])
        scale = scale_factor(group["scale"], *block.block.outputs_and_inputs, extra=group["extra_scale"])
        layer = as_layers(local_tensor(parameter), self.plan.parameters[block.parameter].view)[piece.layer]
        target = read_runs(layer, piece.rows, piece.cols, local=True)
        decay = 1 - group["lr"] * group["weight_decay"]
        decay_update_(target, values, decay, -group["lr"] * scale, exact=group["exact"])
        if len(piece.rows) > 1 or len(piece.cols) > 1:  # then `target` is a copy
            write_runs(layer, piece.rows, piece.cols, target, local=True)

    # ---- the plan ---------------------------------------------------------------------------------------------------

    @property
    def plan(self) -> ExchangePlan:
        """Who orthogonalizes what. The first use is a collective: all ranks must make it, as the first step does."""
        return self._exchange().plan

    def _exchange(self) -> Exchanger:
        if self._exchanger is None or not self._is_planned:
            self.share_momentum()
            self._exchanger = self._make_exchanger()
            self._is_planned = True
            self._placed = owner_placed(self._exchanger.plan, self._rank)
            self.drop_momentum()
            self._set_gradient_owners()
        return self._exchanger

    def _set_gradient_owners(self) -> None:
        """From the next backward on, has gradients summed where they are used."""
        assert self._exchanger is not None
        for index, owner, _ in self._placed:
            parameter, group = self._matrices[index]
            if group["gradients"] == "owner":
                if not allows_gradient_owner(parameter):
                    raise UnsupportedError(
                        f'parameter {self._exchanger.plan.parameters[index].name} has gradients="owner", but nothing '
                        "that reduces its gradient heeds it: hp_plugin.fully_shard on a mesh with a replicate axis does"
                    )
                planned = self._exchanger.plan.parameters[index]
                if planned.distribution is not None and planned.distribution.plan_replicas:
                    raise UnsupportedError(
                        f'parameter {planned.name} has gradients="owner", but a sharding plan keeps it whole on the '
                        f"ranks of {', '.join(planned.distribution.plan_replicas)}, of which only one would get its "
                        'gradient; use gradients="replicated" for it'
                    )
                set_gradient_owner(parameter, owner)

    def _forget_gradient_owners(self) -> None:
        """Has gradients summed on all replicas again, until there is a new plan."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if gradient_owner(parameter) is None:
                    continue
                if parameter.grad is not None:
                    raise ConfigurationError(
                        "parameters were added or a state loaded while gradients exist on one replica alone "
                        '(gradients="owner"): call zero_grad() before'
                    )
                set_gradient_owner(parameter, None)

    def _make_exchanger(self) -> Exchanger:
        self._matrices = []
        parameters = []
        for group in self.param_groups:
            if group["algorithm"] == "muon":
                for index, parameter in enumerate(group["params"]):
                    self._matrices.append((parameter, group))
                    parameters.append(self._matrix_parameter(self._name(group, index), parameter, group))
        compare_parameters(parameters, self._communicators)
        loads_of = functools.partial(loads_among, communicators=self._communicators)
        plan = make_plan(parameters, self._rank, loads_of=loads_of, wave_bytes=self._wave_bytes)
        # A pipeline stage may have a group for Muon with nothing in it: no message, then, needs a device.
        device = local_tensor(self._matrices[0][0]).device if self._matrices else torch.device("cpu")
        return Exchanger(plan, self._communicators, device, topology=self._topology)

    def _matrix_parameter(self, name: str, parameter: Tensor, group: Mapping[str, Any]) -> MatrixParameter:
        distribution = self._distributions.get(parameter)
        if distribution is None:
            distribution = Distribution.of(parameter, process_group=self._process_group)
            if isinstance(self._communicators, GroupCommunicators) and isinstance(parameter, DTensor):
                self._communicators.know_mesh(parameter.device_mesh)
        if distribution is not None:
            distribution.check_shard(name, self._rank, local_tensor(parameter).shape)
        shape = parameter.shape if distribution is None else distribution.layout.global_shape
        view, blocks = blocks_of(name, shape, self._splits.get(parameter))
        return MatrixParameter(
            name,
            view,
            blocks,
            distribution,
            newton_schulz_of(group),
            group["exchange"],
            in_one_replica=group["momentum_placement"] == "owner",
            options=shared_options(group),
        )
