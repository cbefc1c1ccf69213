"""`plan_transformer`: a sharding plan from the structure of a decoder-only transformer.

A *region* is a module inside which tensors are divided over the axis: an attention, an MLP, or a mixture of experts
with its router. It takes its input as `copy`, divides its first products by columns and its last ones by rows, and
gives `partial`. Every other parameter inside is used as `copy`. Between regions lies the residual stream: `replicate`,
or with sequence parallelism `shard(1)` from the first layer to the head. The stream is divided where the first layer
begins and not at the embedding, because models take the positions from the length of what the embedding gives.
"""

from __future__ import annotations

import fnmatch
import inspect
from collections.abc import Mapping
from typing import Any, Literal

from torch import nn

from hp_plugin.core.dtensor import roles
from hp_plugin.core.dtensor.check import check_plan
from hp_plugin.core.dtensor.placement import COPY, PARTIAL, AxisPlacement, shard
from hp_plugin.core.dtensor.plan import InputSpec, ModuleSpec, OutputSpec, ParameterSpec, Placed, ShardingPlan
from hp_plugin.errors import ConfigurationError, UnsupportedError

Override = ModuleSpec | Mapping[str, Any] | Literal["replicate"]


def plan_transformer(
    model: nn.Module,
    axes: Mapping[str, int],
    *,
    axis: str = "tp",
    sequence_parallel: bool = False,
    loss_parallel: bool = False,
    expert_axis: str | None = None,
    overrides: Mapping[str, Override] | None = None,
) -> ShardingPlan:
    """Plans tensor parallelism of a decoder-only transformer, HF-style or plain torch, from names and shapes.

    Dense, mixture of experts (experts divided inside), grouped-query attention, fused q/k/v and gate/up, tied
    embeddings. Activations are (batch, sequence, hidden). Local: any process may call, with a model on any device.

    Args:
        model: the whole model.
        axes: mesh axis -> number of ranks, as the plan shall have it.
        axis: the axis of tensor parallelism.
        sequence_parallel: divide the residual stream over the sequence between the regions.
        loss_parallel: leave logits divided over the vocabulary, for `loss_function`.
        expert_axis: the axis over which experts are divided, and the batch with them; tokens are sent to experts. None:
            every rank has all experts, or a piece of each.
        overrides: module name, or pattern with `*`, -> a `ModuleSpec` (or a dict of its fields) that replaces the
            entry, or "replicate": the module and what it holds is not divided.

    Raises:
        ConfigurationError: a parameter without a role, an override that matches nothing, or a size that `axis` does
            not divide; see also `check_plan`.
        UnsupportedError: an encoder-decoder, `nn.MultiheadAttention`, products directly in a layer, an auxiliary loss
            of router logits, norms over all heads.
    """
    if axis not in axes:
        raise ConfigurationError(f"axis {axis!r} is not among the axes of the plan, {', '.join(axes)}.")
    if expert_axis is not None and (expert_axis == axis or expert_axis not in axes):
        raise ConfigurationError(
            f"experts are to be divided over axis {expert_axis!r}, which must be one of the plan's axes, "
            f"{', '.join(axes)}, and not that of tensor parallelism."
        )
    planner = _Planner(model, axis, sequence_parallel, loss_parallel, dict(overrides or {}), expert_axis)
    batch = () if expert_axis is None else (expert_axis,)
    plan = ShardingPlan(axes=dict(axes), modules=planner.entries(), batch=batch)
    check_plan(model, plan)
    return plan


class _Planner:
    def __init__(
        self,
        model: nn.Module,
        axis: str,
        sequence: bool,
        loss_parallel: bool,
        overrides: dict[str, Override],
        expert_axis: str | None = None,
    ) -> None:
        self.expert_axis = expert_axis
        self.model = model
        self.axis = axis
        self.sequence = sequence
        self.loss_parallel = loss_parallel
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.config = getattr(model, "config", None)
        self.found: dict[str, ModuleSpec] = {}
        self.replaced = self._match(overrides)
        self.stream: Placed = self.on(shard(roles.sequence_dim(model))) if sequence else {}
        self.layers = ""

    def on(self, placement: AxisPlacement) -> Placed:
        return {self.axis: placement}

    def entries(self) -> dict[str, ModuleSpec]:
        """All entries, in the order of the model's modules."""
        self._refuse_unsupported()
        regions = self._regions()
        self.layers = self._stack(regions)
        for name, kind in regions.items():
            self._plan_region(name, kind)
        if self.sequence:
            self._divide_stream()
        for name, module in self.modules.items():
            if not any(_is_inside(name, region) for region in regions):
                self._plan_outside(name, module)
        for name, override in self.replaced.items():
            if override != "replicate":
                self.found[name] = override if isinstance(override, ModuleSpec) else ModuleSpec.model_validate(override)
        self._refuse_uncovered()
        return {name: self.found[name] for name in self.modules if name in self.found}

    # ---------------------------------------------------------------- structure

    def _match(self, overrides: dict[str, Override]) -> dict[str, Override]:
        matched: dict[str, Override] = {}
        for pattern, override in overrides.items():
            names = [name for name in self.modules if fnmatch.fnmatchcase(name, pattern)]
            if not names:
                raise ConfigurationError(f"the override {pattern!r} matches no module of the model.")
            if isinstance(override, str) and override != "replicate":
                raise ConfigurationError(
                    f'the override of {pattern!r} is {override!r}; expected an entry or "replicate".'
                )
            matched.update(dict.fromkeys(names, override))
        return matched

    def _is_replicated(self, name: str) -> bool:
        return any(override == "replicate" and _is_inside(name, top) for top, override in self.replaced.items())

    def _refuse_unsupported(self) -> None:
        if getattr(self.config, "is_encoder_decoder", False):
            raise UnsupportedError(
                "the planner knows decoder-only models; write the plan of an encoder-decoder as YAML."
            )
        if getattr(self.config, "output_router_logits", False):
            raise UnsupportedError(
                "config.output_router_logits is set: the auxiliary loss would be computed from logits whose gradient "
                "is a partial sum, and count once per rank. Unset it, or replicate the experts' blocks."
            )
        if self.sequence and any(roles.is_transposed_linear(module) for module in self.modules.values()):
            raise UnsupportedError(
                "sequence_parallel: GPT-2 gives what its layers return the shape of its own input, so the stream "
                "between its layers cannot be divided; plan without sequence_parallel."
            )
        for name, module in self.modules.items():
            if isinstance(module, nn.MultiheadAttention) and not self._is_replicated(name):
                raise UnsupportedError(
                    f"module {name} is nn.MultiheadAttention, which cannot hold a part of its heads; use separate "
                    f'products for q, k and v, or overrides={{"{name}": "replicate"}}.'
                )

    def _regions(self) -> dict[str, Literal["attention", "mlp", "experts"]]:
        """The outermost regions, by module name."""
        regions: dict[str, Literal["attention", "mlp", "experts"]] = {}
        for name, module in self.modules.items():
            if self._is_replicated(name) or any(_is_inside(name, region) for region in regions):
                continue
            kind = _region_kind(module)
            if kind is not None:
                self._refuse_layer(name, module)
                regions[name] = kind
        if not regions:
            raise ConfigurationError(
                "the planner found no attention and no MLP by the names of its products (q_proj, wq, qkv, up_proj, w1, "
                "fc1, ...); write the plan as YAML."
            )
        return regions

    def _refuse_layer(self, name: str, module: nn.Module) -> None:
        for child_name, child in module.named_children():
            if roles.is_norm(child) and child_name not in roles.HEAD_NORMS:
                raise UnsupportedError(
                    f"module {name} holds products and the norm {child_name} side by side; put attention and MLP into "
                    f'modules of their own, or use overrides={{"{name}": "replicate"}}.'
                )

    def _stack(self, regions: Mapping[str, str]) -> str:
        """The name of the `ModuleList` of layers: the longest that holds regions."""
        stacks = [
            (len(module), name)
            for name, module in self.modules.items()
            if isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential))
            and any(region.startswith(f"{name}.") for region in regions)
        ]
        if not stacks:
            if self.sequence:
                raise ConfigurationError("sequence_parallel needs the layers in one nn.ModuleList; none was found.")
            return ""
        return max(stacks, key=lambda found: found[0])[1]

    # ---------------------------------------------------------------- entries

    def _divide_stream(self) -> None:
        stack = self.modules[self.layers]
        first = f"{self.layers}.{next(iter(stack._modules))}"
        entry = InputSpec(arrives={}, needs=self.stream)
        self.found[first] = ModuleSpec(inputs={_first_input(self.modules[first], first): entry})

    def _plan_region(self, name: str, kind: str) -> None:
        module = self.modules[name]
        parameters: dict[str, ParameterSpec] = {}
        for prefix, child in module.named_modules(remove_duplicate=False):
            for attribute in child._parameters:
                if child._parameters[attribute] is not None:
                    relative = f"{prefix}.{attribute}" if prefix else attribute
                    parameters[relative] = self._inside(f"{name}.{relative}", child, prefix, attribute, kind, module)
        self.found[name] = ModuleSpec(
            inputs={_first_input(module, name): InputSpec(arrives=self.stream, needs=self.on(COPY))},
            outputs={"first": OutputSpec(produces=self.on(PARTIAL), leaves=self.stream)},
            parameters=parameters,
            divides=self._counts(module) if kind == "attention" else {},
        )
        if kind == "experts" and self.expert_axis is not None:
            experts = getattr(module, roles.EXPERTS)
            counts = [n for n in roles.EXPERT_COUNTS if isinstance(vars(experts).get(n), int)]
            divides = dict.fromkeys(counts, self.expert_axis)
            self.found[f"{name}.{roles.EXPERTS}"] = ModuleSpec(dispatch=self.expert_axis, divides=divides)
        for prefix, child in module.named_modules():
            if roles.is_transposed_linear(child) and _is_column(prefix.rpartition(".")[2]):
                self.found[f"{name}.{prefix}"] = ModuleSpec(divides={"nf": self.axis})

    def _counts(self, module: nn.Module) -> dict[str, str]:
        names = [*roles.HEAD_COUNTS, *(roles.FUSED_WIDTHS if _fused_qkv(module) else ())]
        return {name: self.axis for name in names if isinstance(vars(module).get(name), int)}

    def _inside(
        self, full: str, owner: nn.Module, prefix: str, attribute: str, kind: str, region: nn.Module
    ) -> ParameterSpec:
        """The entry of one parameter inside a region."""
        parameter = owner._parameters[attribute]
        assert parameter is not None
        last = prefix.rpartition(".")[2]
        is_product = roles.is_linear(owner) or roles.is_transposed_linear(owner)
        if parameter.ndim == 3:
            return self._stacked_experts(full, attribute)
        if is_product and last == "gate" and kind == "experts" and roles.EXPERTS not in prefix:
            return ParameterSpec(used=self.on(COPY))
        if is_product and _is_column(last):
            blocks = 3 if last in roles.FUSED_QKV else 2 if self._is_gate_up(last) else 1
            self._check_fused(full, owner, parameter.shape, blocks)
            dim = 1 if roles.is_transposed_linear(owner) and attribute == "weight" else 0
            unit = _head_size(region, self.config) if kind == "attention" else 1
            if last in roles.GROUPED_QKV:
                unit *= self.config.num_attention_heads // self.config.num_query_groups + 2  # type: ignore[union-attr]
            return ParameterSpec(held=self.on(shard(dim, blocks=blocks)), unit=unit)
        if is_product and last in roles.ROW:
            if attribute == "bias" and roles.gives_bias_beside(owner):
                return ParameterSpec(used=self.on(COPY) if self.sequence else None)  # added to the stream
            if attribute == "bias":
                return ParameterSpec(used=self.on(PARTIAL))
            dim = 0 if roles.is_transposed_linear(owner) else 1
            unit = _head_size(region, self.config) if kind == "attention" else 1
            return ParameterSpec(held=self.on(shard(dim)), unit=unit)
        if roles.is_norm(owner) and kind == "attention" and parameter.numel() != _head_size(region, self.config):
            raise UnsupportedError(
                f"parameter {full} normalises over all heads together ({parameter.numel()} elements), which needs a "
                "sum over ranks inside; replicate the attention by an override."
            )
        if is_product and kind != "experts":
            raise ConfigurationError(f"product {full} inside a region has no role that the planner knows; {_ADVICE}")
        return ParameterSpec(used=self.on(COPY))

    def _is_gate_up(self, last: str) -> bool:
        return last in roles.FUSED_GATE_UP or (last == roles.FC1 and bool(self.config.gated_linear_unit))  # type: ignore[union-attr]

    def _stacked_experts(self, full: str, attribute: str) -> ParameterSpec:
        """Experts' weights of shape (experts, out, in)."""
        experts: Placed = {} if self.expert_axis is None else {self.expert_axis: shard(0)}
        if attribute in roles.FUSED_GATE_UP:
            return ParameterSpec(held={**experts, **self.on(shard(1, blocks=2))})
        if attribute in roles.MLP_COLUMN:
            return ParameterSpec(held={**experts, **self.on(shard(1))})
        if attribute in roles.ROW:
            return ParameterSpec(held={**experts, **self.on(shard(2))})
        raise ConfigurationError(f"parameter {full} of the experts has no role that the planner knows; {_ADVICE}")

    def _check_fused(self, full: str, owner: nn.Module, shape: tuple[int, ...], blocks: int) -> None:
        out = shape[-1] if roles.is_transposed_linear(owner) else shape[0]
        if blocks == 3 and len(shape) == 2 and out != 3 * (shape[0] + shape[1] - out):
            raise UnsupportedError(
                f"parameter {full} fuses q, k and v of different sizes (shape {tuple(shape)}); use separate products, "
                "or replicate the attention by an override."
            )

    def _plan_outside(self, name: str, module: nn.Module) -> None:
        """Embeddings, norms, the head, and what an override replicates."""
        held = {key: p for key, p in module._parameters.items() if p is not None}
        last = name.rpartition(".")[2]
        is_head = roles.is_linear(module) and last in roles.HEAD
        if not held and not is_head:  # a tied head of Megatron's has no weight of its own
            return
        if self._is_replicated(name):
            self.found[name] = ModuleSpec(parameters=self._whole(name, held))
        elif roles.is_vocabulary_embedding(module) and not roles.is_position_embedding(name):
            self.found[name] = ModuleSpec(
                outputs={"output": OutputSpec(produces=self.on(PARTIAL), leaves={})},
                parameters={"weight": ParameterSpec(held=self.on(shard(0)))},
                body="vocabulary_embedding",
            )
        elif isinstance(module, nn.Embedding) or roles.is_norm(module):
            self.found[name] = ModuleSpec(parameters=self._whole(name, held))
        elif is_head:
            self._plan_head(name, module, held)

    def _whole(self, name: str, held: Mapping[str, Any]) -> dict[str, ParameterSpec]:
        """Parameters that every rank holds. On a divided stream their gradients are partial sums."""
        used = self.on(COPY) if self.sequence and self._is_on_divided_stream(name) else None
        return {key: ParameterSpec(used=used) for key in held}

    def _is_on_divided_stream(self, name: str) -> bool:
        order = list(self.modules)
        return order.index(name) > order.index(self.layers)

    def _plan_head(self, name: str, module: nn.Module, held: Mapping[str, Any]) -> None:
        logits = self.on(shard(-1)) if self.loss_parallel else {}
        returned = "output" if isinstance(module, nn.Linear) else "first"  # Megatron's give their bias beside
        self.found[name] = ModuleSpec(
            inputs={_first_input(module, name): InputSpec(arrives=self.stream, needs=self.on(COPY))},
            outputs={returned: OutputSpec(produces=self.on(shard(-1)), leaves=logits)},
            parameters={key: ParameterSpec(held=self.on(shard(0))) for key in held},
        )
        key = "logits" if self.config is not None and hasattr(self.model, "loss_function") else "first"
        self.found[""] = ModuleSpec(outputs={key: OutputSpec(produces=logits, leaves=logits)})

    def _refuse_uncovered(self) -> None:
        covered = ShardingPlan(axes={self.axis: 1}, modules=self.found).placed_parameters()
        missing = [name for name, _ in self.model.named_parameters(remove_duplicate=False) if name not in covered]
        if missing:
            raise ConfigurationError(
                f"parameters without a role that the planner knows: {', '.join(missing)}; {_ADVICE}"
            )
        if self.loss_parallel and "" not in self.found:
            raise ConfigurationError("loss_parallel needs a head (lm_head, output, ...) in the model; none was found.")


_ADVICE = 'give an entry in overrides, e.g. overrides={"NAME": "replicate"}.'


def _is_inside(name: str, top: str) -> bool:
    return not top or name == top or name.startswith(f"{top}.")


def _is_column(last: str) -> bool:
    columns = roles.ATTENTION_COLUMN | roles.MLP_COLUMN | roles.FUSED_QKV | roles.FUSED_GATE_UP | roles.GROUPED_QKV
    return last in columns or last == roles.FC1


def _region_kind(module: nn.Module) -> Literal["attention", "mlp", "experts"] | None:
    products = {n for n, c in module.named_children() if roles.is_linear(c) or roles.is_transposed_linear(c)}
    if roles.EXPERTS in dict(module.named_children()) and roles.ROUTER & dict(module.named_children()).keys():
        return "experts"
    if not products & roles.ROW:
        return None
    if products & (roles.ATTENTION_COLUMN | roles.FUSED_QKV | roles.GROUPED_QKV):
        return "attention"
    return "mlp" if products & (roles.MLP_COLUMN | roles.FUSED_GATE_UP | {roles.FC1}) else None


def _fused_qkv(module: nn.Module) -> bool:
    return any(name in roles.FUSED_QKV for name, _ in module.named_children())


def _head_size(region: nn.Module, config: Any) -> int:
    """Rows of one head: from the module, else from the model's configuration, else the width over the heads."""
    for source in (region, config):
        size = getattr(source, "head_dim", None)
        if isinstance(size, int):
            return size
    for source in (region, config):
        width = next(
            (getattr(source, n) for n in ("embed_dim", "hidden_size", "n_embd", "dim") if hasattr(source, n)), None
        )
        heads = next((getattr(source, n) for n in roles.HEAD_COUNTS if isinstance(getattr(source, n, None), int)), None)
        if isinstance(width, int) and heads:
            return width // heads
    products = [c for n, c in region.named_children() if n in roles.ATTENTION_COLUMN and isinstance(c, nn.Linear)]
    heads = next((getattr(region, n) for n in roles.HEAD_COUNTS if isinstance(getattr(region, n, None), int)), None)
    if products and heads:
        return products[0].out_features // heads
    raise ConfigurationError(
        f"the planner cannot tell the size of a head of {type(region).__name__}; give the module an attribute head_dim."
    )


def _first_input(module: nn.Module, name: str) -> str:
    parameters = inspect.signature(module.forward).parameters.values()
    for parameter in parameters:
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            return parameter.name
    raise ConfigurationError(f"module {name}: forward names no argument, so the planner cannot tell its input.")
