"""Optimizer states in another number of parts than the optimizer that reads them.

Without expert parallelism a model has one optimizer, whose state stands in a checkpoint as it is. With expert
parallelism it has two, for dense parameters and for experts, whose states stand there under 0 and 1. Tensors have the
same names either way and find their place by themselves. What is not a tensor, options of groups and the step, lies
where the job that saved had it; here it is brought to where the job that loads looks for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hp_plugin.errors import ConfigurationError
from hp_plugin.megatron.checkpoints.distributed_format import is_distributed

_EXPERT = "is_expert_parallel"


def split(state_dict: Mapping[Any, Any], count: int) -> list[dict[Any, Any]]:
    """The states of the `count` parts of an optimizer, out of what a checkpoint delivered for them.

    Args:
        state_dict: The parts by number, and beside them what an optimizer without parts has saved.
        count: How many parts the optimizer has.

    Raises:
        ConfigurationError: A part is missing.
    """
    missing = [number for number in range(count) if number not in state_dict]
    if missing:
        raise ConfigurationError(
            f"the checkpoint has no state for part {missing[0]} of the {count} parts of this optimizer; found "
            f"{list(state_dict)}. Resume with the optimizer that saved, or with --no-load-optim."
        )
    whole = {key: value for key, value in state_dict.items() if not isinstance(key, int)}
    parts = [dict(state_dict[number]) for number in range(count)]
    return [_with_options(part, [whole]) for part in parts] if whole else parts


def joined(state_dict: Mapping[Any, Any]) -> dict[Any, Any]:
    """The state of an optimizer without parts, out of what a checkpoint delivered for it.

    Args:
        state_dict: Its state, and beside it what an optimizer with parts has saved, by number of the part.
    """
    parts = [value for key, value in sorted((k, v) for k, v in state_dict.items() if isinstance(k, int))]
    whole = {key: value for key, value in state_dict.items() if not isinstance(key, int)}
    return _with_options(whole, parts) if parts else whole


def _with_options(state: Mapping[Any, Any], saved: Iterable[Mapping[Any, Any]]) -> dict[Any, Any]:
    """`state`, which has tensors, with the options and the step that `saved` has."""
    found = list(saved)
    if is_distributed(dict(state)):  # options and the step are under "optimizer", in all precisions
        groups = [group for each in found for group in each["optimizer"]["param_groups"]]
        scaler = [{"grad_scaler": each["grad_scaler"]} for each in found if "grad_scaler" in each][:1]
        return {**state, "optimizer": {"param_groups": _for_both(groups)}, **(scaler[0] if scaler else {})}
    if "optimizer" in state:  # beside fp32 weights and a loss scale
        inner = _with_options(state["optimizer"], [each["optimizer"] for each in found])
        scaler = [{"grad_scaler": each["grad_scaler"]} for each in found if "grad_scaler" in each][:1]
        return {**state, "optimizer": inner, **(scaler[0] if scaler else {})}
    step = {key: value for each in found for key, value in each.get("state", {}).items() if key == "common_step"}
    groups = [group for each in found for group in each["param_groups"]]
    return {**state, "state": {**state.get("state", {}), **step}, "param_groups": _for_both(groups)}


def _for_both(groups: list[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The groups, also as groups of the other kind of parameters. Those saved as such come last, where they win."""
    # Which parameters they have is not saved. Megatron asks for the key.
    complete = [{"params": [], **group} for group in groups]
    others = [{**group, _EXPERT: not group.get(_EXPERT, False)} for group in complete]
    return others + complete
