"""The names inside DeepSpeed that the adapter extends or replaces, with the parameters that it relies on."""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from typing import Any

from hp_plugin.errors import UnsupportedError


@dataclass(frozen=True)
class Target:
    """One name of DeepSpeed.

    Attributes:
        path: `module:attribute` or `module:Class.method`.
        parameters: Names that its signature must have.
        purpose: What the adapter does there.
    """

    path: str
    parameters: tuple[str, ...]
    purpose: str


_ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"
_PARTITION = "deepspeed.runtime.zero.partition_parameters:GatheredParameters"
_TENSORS = "deepspeed.utils.tensor_fragment"

PATCH_POINT = Target(
    f"{_ENGINE}.__init__",
    ("args", "model", "optimizer", "model_parameters", "lr_scheduler", "mpu", "config", "config_class"),
    "DeepSpeedEngine.__new__ gives HyperFSDPEngine where the configuration has our block",
)

EXTENDED = (
    PATCH_POINT,
    Target(f"{_ENGINE}._broadcast_model", (), "shards the model once its groups exist"),
    Target(
        f"{_ENGINE}._configure_optimizer", ("client_optimizer", "model_parameters"), "hands over sharded parameters"
    ),
    Target(f"{_ENGINE}._configure_basic_optimizer", ("model_parameters",), "builds our optimizers"),
    Target(f"{_ENGINE}._is_supported_optimizer", ("optimizer_name",), "knows our optimizers"),
    Target(f"{_ENGINE}.allreduce_gradients", ("bucket_size",), "gradients are reduced during backward"),
    Target(f"{_ENGINE}.backward", ("loss", "retain_graph", "scale_wrt_gas"), "decides which tiers this backward uses"),
    Target(f"{_ENGINE}._backward_prologue", (), "the same for loss.backward()"),
    Target(f"{_ENGINE}._backward_epilogue", (), "timers and bookkeeping after loss.backward()"),
    Target(f"{_ENGINE}.is_gradient_accumulation_boundary", (), "read in backward"),
    Target(f"{_ENGINE}._take_model_step", ("lr_kwargs",), "norm, clipping and overflow over all shards"),
    Target(f"{_ENGINE}.clip_fp32_gradients", (), "clipping has happened by then"),
    Target(f"{_ENGINE}.no_sync", (), "allowed at every stage"),
    Target(f"{_ENGINE}.zero_optimization_stage", (), "tells callers the stage of the JSON"),
    Target(
        f"{_ENGINE}.save_checkpoint",
        ("save_dir", "tag", "client_state", "save_latest", "exclude_frozen_parameters"),
        "writes shards in torch's distributed format",
    ),
    Target(
        f"{_ENGINE}.load_checkpoint",
        (
            "load_dir",
            "tag",
            "load_module_strict",
            "load_optimizer_states",
            "load_lr_scheduler_states",
            "load_module_only",
            "custom_load_fn",
        ),
        "reads them on any mesh",
    ),
    Target(f"{_ENGINE}._checkpoint_tag_validation", ("tag",), "used by save_checkpoint"),
    Target(f"{_ENGINE}._zero3_consolidated_16bit_state_dict", ("exclude_frozen_parameters",), "full weights on rank 0"),
    Target(f"{_ENGINE}.save_16bit_model", ("save_dir", "save_filename"), "writes full weights"),
    Target(f"{_ENGINE}.compile", ("backend", "compile_kwargs"), "refused"),
    Target(f"{_ENGINE}.offload_states", ("include",), "refused"),
    Target(f"{_ENGINE}.destroy", (), "releases the engine's own state"),
)
"""Methods that HyperFSDPEngine overrides or calls. They are never replaced in DeepSpeed itself."""

REPLACED = (
    Target(
        f"{_PARTITION}.__init__", ("params", "modifier_rank", "fwd_module", "enabled"), "gathers our parameters too"
    ),
    Target(f"{_PARTITION}.__enter__", (), "gathers our parameters too"),
    Target(f"{_PARTITION}.__exit__", (), "writes our parameters back"),
    *(
        Target(f"{_TENSORS}:safe_{verb}_{extent}_{what}", parameters, "knows our parameters")
        for extent in ("full", "local")
        for verb, what, parameters in (
            ("get", "fp32_param", ("param",)),
            ("get", "optimizer_state", ("param", "optim_state_key")),
            ("get", "grad", ("param",)),
            ("set", "fp32_param", ("param", "value")),
            ("set", "optimizer_state", ("param", "value", "optim_state_key")),
            ("set", "grad", ("param", "value")),
        )
    ),
    Target(f"{_TENSORS}:safe_update_full_grad_vectorized", ("param_list", "update_func"), "knows our parameters"),
    Target(
        "deepspeed.utils.zero_to_fp32:_get_fp32_state_dict_from_zero_checkpoint",
        ("ds_checkpoint_dir", "exclude_frozen_parameters"),
        "reads our checkpoints too",
    ),
    Target("deepspeed.comm.torch:build_shm_op", (), "on CPU, uses the compiled helper only where it is built already"),
)
"""Names that are replaced in DeepSpeed; for parameters that are not ours the originals run."""


def find(target: Target) -> Any:
    """The object that `target` names; None where there is none."""
    module, _, attribute = target.path.partition(":")
    found: Any = importlib.import_module(module)
    for name in attribute.split("."):
        found = getattr(found, name, None)
    return found


def problem_of(target: Target) -> str | None:
    """What does not fit about a target in the installed DeepSpeed, as the end of a sentence; None where it fits."""
    found = find(target)
    if found is None:
        return "does not exist"
    have = inspect.signature(found).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in have.values()):
        return None  # a decorator of DeepSpeed's stands before it
    lost = [name for name in target.parameters if name not in have]
    return f"does not take {' and '.join(lost)} (it takes {', '.join(have)})" if lost else None


def check_targets(version: str) -> None:
    """Raises UnsupportedError, naming the target, where the installed DeepSpeed does not have what we need."""
    for target in (*EXTENDED, *REPLACED):
        problem = problem_of(target)
        if problem is not None:
            name = target.path.replace(":", ".")
            raise UnsupportedError(
                f"{name} of DeepSpeed {version} {problem}, so hp_plugin cannot extend it safely. Another "
                "program may have replaced it, or this DeepSpeed is a modified one; use a release that hp_plugin "
                "supports, or import hp_plugin.deepspeed before the other program."
            )
