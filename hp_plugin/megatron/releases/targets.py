"""The names inside Megatron that this adapter replaces, per release series, with what their signatures must contain.

This is data; `rebind` acts on it. A module that has copied a function with ``from ... import`` keeps the copy, so
every place by which Megatron looks a name up is a row of its own: up to 0.17 `initialize` has a copy of `parse_args`,
and from 0.18 on `arguments` calls its own through `parse_and_validate_args`; from 0.18 on there are two places that
choose the data-parallel class, one for a `model_provider` and one for a model builder.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Stage = Literal["arguments", "optimizer", "active", "observe"]
Factory = Callable[[Any], Any]
"""Takes the original object, returns its replacement. Called when the target is replaced, not before."""


@dataclass(frozen=True)
class Target:
    """One name inside Megatron that is replaced.

    Attributes:
        module: Module whose attribute is replaced.
        attribute: The attribute of the module, by which its functions look the object up at call time.
        parameters: Names that must be among the parameters of the original.
        factory: ``module:function`` of the :data:`Factory` of the replacement.
        purpose: What the replacement is for, in a few words.
        stage: When it is replaced: with ``install()``, once a job asks for HyperFSDP or HyperMuon, once it asks for
            HyperFSDP, or where it asks only what HyperFSDP would do.
    """

    module: str
    attribute: str
    parameters: tuple[str, ...]
    factory: str
    purpose: str
    stage: Stage = "active"
    used_by: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Full dotted name of what is replaced."""
        return f"{self.module}.{self.attribute}"


_HERE = "hp_plugin.megatron"
_TRAINING = "megatron.training.training"


def _parse_args(module: str) -> Target:
    return Target(
        module,
        "parse_args",
        ("extra_args_provider", "ignore_unknown_args"),
        f"{_HERE}.installation:hook_parse_args",
        "adds our flags and checks them",
        "arguments",
    )


def _ddp(module: str, attribute: str, purpose: str, *more: str) -> Target:
    used_by = ("get_model",) if module == _TRAINING else ("_ddp_wrap",)
    return Target(
        module,
        attribute,
        ("config", "ddp_config", "module", "disable_bucketing", *more),
        f"{_HERE}.releases.rebind:data_parallel_selector",
        purpose,
        used_by=used_by,
    )


def _optimizer(*more: str) -> Target:
    return Target(
        _TRAINING,
        "get_megatron_optimizer",
        ("config", "model_chunks", *more),
        f"{_HERE}.releases.rebind:optimizer_builder",
        "builds the optimizer on sharded parameters, or with Muon",
        "optimizer",
        ("setup_model_and_optimizer",),
    )


_OPENED = Target(
    "megatron.core.dist_checkpointing",
    "load_common_state_dict",
    ("checkpoint_dir",),
    f"{_HERE}.checkpoints.opened:note_opened",
    "tells the optimizer which checkpoint is read",
    "optimizer",
)

_COPIED_PARSE_ARGS = (_parse_args("megatron.training.arguments"), _parse_args("megatron.training.initialize"))

_IN_EVERY_LOOP = (
    Target(
        _TRAINING,
        "save_checkpoint",
        ("iteration", "model", "optimizer", "opt_param_scheduler"),
        f"{_HERE}.checkpoints.save:guard_save_checkpoint",
        "leaves nothing half-written when a save fails",
    ),
    Target(
        _TRAINING,
        "calc_params_l2_norm",
        ("model", "force_create_fp32_copy"),
        f"{_HERE}.fsdp.grad_stats:replace_params_l2_norm",
        "adds up the shards of all ranks for --log-params-norm",
    ),
    Target(
        _TRAINING,
        "train_step",
        ("forward_step_func", "data_iterator", "model", "optimizer"),
        f"{_HERE}.step_report:report_steps",
        "reports waits and bytes in the log and to TensorBoard; compares steps in validation mode",
    ),
    Target(
        _TRAINING,
        "setup_model_and_optimizer",
        ("model_provider_func", "model_type"),
        f"{_HERE}.validation.steps:note_setup",
        "keeps what a reference is made from in validation mode",
        used_by=("pretrain",),
    ),
    Target(
        _TRAINING,
        "train_step",
        ("forward_step_func", "data_iterator", "model", "optimizer"),
        f"{_HERE}.observation.report:watch_steps",
        "times Megatron's own back end for --hyperfsdp-migrate observe",
        "observe",
    ),
)
"""Names of the training loop that every release has, with these parameters."""

_OF_A_PROVIDER = "wraps the model that a model_provider makes"
_OF_A_BUILDER = "wraps the model that a model builder makes"

_WITH_PROVIDER = (
    *_COPIED_PARSE_ARGS,
    _ddp(_TRAINING, "DDP", _OF_A_PROVIDER, "pg_collection"),
    _optimizer("config_overrides"),
    _OPENED,
    *_IN_EVERY_LOOP,
)
_WITH_BUILDER = (
    _parse_args("megatron.training.arguments"),
    _ddp("megatron.training.models.dist_utils", "DistributedDataParallel", _OF_A_BUILDER, "pg_collection"),
    _ddp(_TRAINING, "DDP", _OF_A_PROVIDER, "pg_collection"),
    _optimizer("config_overrides", "pg_collection"),
    _OPENED,
    *_IN_EVERY_LOOP,
)

TABLES: dict[tuple[int, int], tuple[Target, ...]] = {
    (0, 12): (
        *_COPIED_PARSE_ARGS,
        _ddp(_TRAINING, "DDP", _OF_A_PROVIDER),
        _optimizer("no_weight_decay_cond", "scale_lr_cond", "lr_mult"),
        _OPENED,
        *_IN_EVERY_LOOP,
    ),
    (0, 16): _WITH_PROVIDER,
    (0, 17): _WITH_PROVIDER,
    (0, 18): _WITH_BUILDER,
    (0, 19): _WITH_BUILDER,
}
"""Targets per release series of megatron-core, in the order in which they are replaced."""
