"""`plan_from_megatron`: how Megatron has divided a model, as a `ShardingPlan` of the whole model.

Megatron has no plan. What it does lies in attributes of parameters (`tensor_model_parallel`, `partition_dim`,
`partition_stride`, `sequence_parallel`, `allreduce`), in its process groups, and in the code of its modules. This reads
the first two, and states of modules what their code does between entry and exit: what a mixture's dispatcher moves over
tensor-parallel ranks inside is stated at the border of the mixture. The model is one rank's part, and stays as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from torch import nn

from hp_plugin.core.dtensor import InputSpec, ModuleSpec, OutputSpec, ParameterSpec, ShardingPlan, shard
from hp_plugin.core.dtensor.placement import COPY, PARTIAL
from hp_plugin.core.dtensor.plan import Placed
from hp_plugin.core.fsdp.experts import is_expert
from hp_plugin.errors import UnsupportedError
from hp_plugin.megatron.plan.axes import Axes
from hp_plugin.megatron.releases.differences import unwrapped

_LOCAL_EXPERT = re.compile(r"^(.*\.local_experts\.)(\d+)(\..*)$")
_HEAD_NORMS = ("q_layernorm", "k_layernorm")


def plan_from_megatron(model: Any) -> ShardingPlan:
    """The plan by which Megatron has divided `model`, of the whole model: with all experts, by their global numbers.

    Local, after Megatron has made its process groups. Every rank gets the same plan. It can be saved, printed, and
    compared (`diff`) with that of another configuration, or with the planner's for the undivided model; it is not
    there to be applied, since Megatron's modules communicate themselves.

    Args:
        model: a `GPTModel` or a chunk that a wrapper holds; layers and all of the embedding must be on this rank.

    Raises:
        UnsupportedError: pipeline stages; grouped experts, whose names do not say which they are; gradients that are
            averaged over tensor-parallel ranks; a class of mixture or attention that is not known.
    """
    chunk = unwrapped(model)
    axes = Axes.of_job(chunk.config)
    reader = _Reader(chunk, axes)
    return ShardingPlan(axes=axes.sizes, modules=reader.entries(), batch=axes.batch)


class _Reader:
    def __init__(self, model: Any, axes: Axes) -> None:
        self.model = model
        self.axes = axes
        self.config: Any = model.config
        self.modules = dict(model.named_modules())
        self.stream: Placed = {"tp": shard(0)} if self.config.sequence_parallel else {}
        regions = [name for name, module in self.modules.items() if _is_region(module)]
        self.regions = [n for n in regions if not any(n.startswith(f"{outer}.") for outer in regions)]

    def entries(self) -> dict[str, ModuleSpec]:
        """The entry of each module that has one, in the order of the model."""
        parameters: dict[str, dict[str, ParameterSpec]] = {}
        for name, parameter in self.model.named_parameters():
            owner = self._owner(name)
            for whole in self._whole_names(name, parameter):
                relative = whole[len(owner) + 1 :] if owner else whole
                parameters.setdefault(owner, {})[relative] = self._parameter(name, parameter)
        found = {}
        for name, module in self.modules.items():
            spec = self._border(name, module)
            held = parameters.get(name, {})
            if spec is not None or held:
                found[name] = (spec or ModuleSpec()).model_copy(update={"parameters": held})
        return found

    def _owner(self, name: str) -> str:
        """The module whose entry has the parameter: the region that it is in, else its own."""
        return next((region for region in self.regions if name.startswith(f"{region}.")), name.rpartition(".")[0])

    def _whole_names(self, name: str, parameter: nn.Parameter) -> Iterator[str]:
        """The names of a parameter in the whole model: of one expert, those of the same part of all ranks' experts."""
        match = _LOCAL_EXPERT.match(name)
        if not is_expert(parameter) or self.axes.experts in (None, 1):
            yield name
        elif match is None:
            raise UnsupportedError(
                f"parameter {name} belongs to grouped experts, whose names do not tell experts apart; build the model "
                "without --moe-grouped-gemm to read its plan."
            )
        else:
            prefix, local, rest = match.groups()
            count = len(list(self.modules[prefix[:-1]].children()))
            for rank in range(self.axes.experts or 1):
                yield f"{prefix}{rank * count + int(local)}{rest}"

    # ---------------------------------------------------------------- parameters

    def _parameter(self, name: str, parameter: nn.Parameter) -> ParameterSpec:
        if getattr(parameter, "average_gradients_across_tp_domain", False):
            raise UnsupportedError(
                f"the gradient of parameter {name} is averaged over tensor-parallel ranks, which a plan cannot say."
            )
        dim = int(getattr(parameter, "partition_dim", -1))
        if getattr(parameter, "tensor_model_parallel", False) and dim >= 0:
            return ParameterSpec(held={"tp": shard(dim, blocks=self._blocks(name, parameter))}, unit=self._unit(name))
        is_summed = self.config.sequence_parallel and getattr(parameter, "sequence_parallel", False)
        if is_summed or (getattr(self.config, "qk_layernorm", False) and any(norm in name for norm in _HEAD_NORMS)):
            return ParameterSpec(used={"tp": COPY})
        return ParameterSpec()

    def _blocks(self, name: str, parameter: nn.Parameter) -> int:
        """A fused gate and up is cut block by block; releases before 0.16 do not mark that."""
        if "linear_fc1" in name and self.config.gated_linear_unit:
            return 2
        return int(getattr(parameter, "partition_stride", 1))

    def _unit(self, name: str) -> int:
        """Rows of a query group with its key and value, and columns of a head, are never cut."""
        queries = self.config.num_attention_heads // self.config.num_query_groups
        if "linear_qkv" in name:
            return int((queries + 2) * self.config.kv_channels)
        return int(self.config.kv_channels) if "linear_proj" in name else 1

    # ---------------------------------------------------------------- borders

    def _border(self, name: str, module: nn.Module) -> ModuleSpec | None:
        kind = type(module).__name__
        if name in self.regions:
            entry = InputSpec(arrives=self.stream, needs={"tp": COPY})
            leave = OutputSpec(produces={"tp": PARTIAL}, leaves=self.stream)
            # The bias comes beside, and is added once, by the caller.
            return ModuleSpec(inputs={"hidden_states": entry}, outputs={"first": leave})
        if hasattr(module, "local_experts"):
            return ModuleSpec(dispatch="ep", divides={"num_local_experts": "ep"})
        if kind == "VocabParallelEmbedding":
            leaves = {"tp": shard(0)} if getattr(module, "reduce_scatter_embeddings", False) else {}
            embedded = OutputSpec(produces={"tp": PARTIAL}, leaves=leaves)
            return ModuleSpec(outputs={"output": embedded}, body="vocabulary_embedding")
        if kind == "LanguageModelEmbedding" and self.stream and not getattr(module, "reduce_scatter_embeddings", False):
            return ModuleSpec(outputs={"output": OutputSpec(produces={}, leaves=self.stream)})
        if name.rpartition(".")[2] == "output_layer":
            leaves = {} if getattr(module, "gather_output", False) else {"tp": shard(-1)}
            return ModuleSpec(
                inputs={"input_": InputSpec(arrives=self.stream, needs={"tp": COPY})},
                outputs={"first": OutputSpec(produces={"tp": shard(-1)}, leaves=leaves)},
            )
        return None


def _is_region(module: nn.Module) -> bool:
    """Whether a module takes the stream, works divided, and gives it back: an attention, an MLP, a mixture.

    Raises:
        UnsupportedError: an attention of another kind, whose products are not known.
    """
    children = dict(module.named_children())
    if "core_attention" in children and "linear_qkv" not in children:
        raise UnsupportedError(
            f"{type(module).__name__} is an attention whose products are not linear_qkv and linear_proj, of which no "
            "plan can be read yet."
        )
    return bool({"linear_qkv", "linear_fc1"} & children.keys()) or {"router", "experts"} <= children.keys()
