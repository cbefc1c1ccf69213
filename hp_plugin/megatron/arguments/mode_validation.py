"""Which of Megatron's own flags `--hyperfsdp-mode validation` refuses, and why; beside those of `validation`."""

from __future__ import annotations

import argparse

from hp_plugin.errors import UnsupportedError
from hp_plugin.megatron.arguments.rules import given, is_on
from hp_plugin.megatron.arguments.validation import Conflict

_DRAWN = "one rank would draw other random numbers; set it to 0 for the validation"

CONFLICTS: tuple[Conflict, ...] = (
    Conflict("--hidden-dropout", "hidden_dropout", is_on, _DRAWN),
    Conflict("--attention-dropout", "attention_dropout", is_on, _DRAWN),
    Conflict("--moe-input-jitter-eps", "moe_input_jitter_eps", is_on, _DRAWN),
    Conflict(
        "--moe-router-force-load-balancing",
        "moe_router_force_load_balancing",
        is_on,
        "one rank would draw other experts; remove the flag",
    ),
    Conflict("--fp8-format", "fp8", given, "scales depend on what a rank sees; validate in bf16"),
    Conflict("--fp4-format", "fp4", given, "scales depend on what a rank sees; validate in bf16"),
    Conflict("--rampup-batch-size", "rampup_batch_size", given, "the number of micro-batches changes; remove the flag"),
    Conflict(
        "--perform-rl-step",
        "perform_rl_step",
        is_on,
        "its steps are not those of train_step alone; validate pretraining",
    ),
)
"""Refused in validation mode."""


def check_megatron_arguments(args: argparse.Namespace) -> None:
    """Refuse every combination of the table, all in one message.

    Raises:
        UnsupportedError: At least one refused flag is set.
    """
    found = [conflict for conflict in CONFLICTS if conflict.refused(getattr(args, conflict.attribute, None))]
    if found:
        reasons = "; ".join(f"{conflict.flag} ({conflict.advice})" for conflict in found)
        raise UnsupportedError(f"--hyperfsdp-mode validation cannot be combined with {reasons}.")
