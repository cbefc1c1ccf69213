"""Which of Megatron's own flags HyperMuon refuses, and why; beside those of HyperFSDP in `validation`."""

from __future__ import annotations

import argparse

from hp_plugin.errors import UnsupportedError
from hp_plugin.megatron.arguments.validation import Conflict

_OWN_OPTIMIZER = "Muon and AdamW are one optimizer whose kinds of parameters --hypermuon-include and -exclude decide"

CONFLICTS: tuple[Conflict, ...] = (
    Conflict(
        "--optimizer",
        "optimizer",
        lambda value: value not in (None, "adam"),
        f"{_OWN_OPTIMIZER}; use --optimizer adam, whose options are those of AdamW",
    ),
    Conflict(
        "--use-mup",
        "use_mup",
        bool,
        "its learning rates are those of Adam for matrices that Muon trains here; remove the flag, or use "
        "--hypermuon-lr and --hypermuon-scale aspect",
    ),
    Conflict(
        "--use-precision-aware-optimizer",
        "use_precision_aware_optimizer",
        bool,
        "momentum and masters are fp32; remove the flag",
    ),
    Conflict("--optimizer-cpu-offload", "optimizer_cpu_offload", bool, "the momentum stays where the weights are"),
    Conflict(
        "--optimizer-cuda-graph", "optimizer_cuda_graph", bool, "an exchange of matrices cannot be captured; remove it"
    ),
)
"""Refused with `--use-hypermuon` on any back end."""

ON_STOCK_DDP: tuple[Conflict, ...] = (
    Conflict(
        "--use-distributed-optimizer",
        "use_distributed_optimizer",
        bool,
        "it cuts matrices into flat ranges; shard the model with --use-hyperfsdp, or remove the flag",
    ),
    Conflict(
        "--use-layer-wise-distributed-optimizer",
        "use_layer_wise_distributed_optimizer",
        bool,
        "matrices are spread over data-parallel ranks here too; remove the flag",
    ),
    Conflict(
        "--use-torch-fsdp2", "use_torch_fsdp2", bool, "use --use-hyperfsdp, or Megatron's DistributedDataParallel"
    ),
    Conflict(
        "--use-megatron-fsdp", "use_megatron_fsdp", bool, "use --use-hyperfsdp, or Megatron's DistributedDataParallel"
    ),
    Conflict(
        "--use-custom-fsdp", "use_custom_fsdp", bool, "use --use-hyperfsdp, or Megatron's DistributedDataParallel"
    ),
    Conflict(
        "--load-main-params-from-ckpt", "load_main_params_from_ckpt", bool, "masters are part of the optimizer's state"
    ),
)
"""Refused with `--use-hypermuon` where the model is in Megatron's own DDP."""

ON_SHARDS: tuple[Conflict, ...] = (
    Conflict(
        "--qk-clip",
        "qk_clip",
        bool,
        "it writes into whole weights, which are sharded; remove the flag, or use --use-hypermuon without "
        "--use-hyperfsdp",
    ),
)
"""Refused with `--use-hypermuon` where the model is in HyperFSDP."""


def check_megatron_arguments(args: argparse.Namespace) -> None:
    """Refuse every combination of the tables, all in one message.

    Raises:
        UnsupportedError: At least one refused flag is set.
    """
    table = CONFLICTS + (ON_SHARDS if args.use_hyperfsdp else ON_STOCK_DDP)
    found = [conflict for conflict in table if conflict.refused(getattr(args, conflict.attribute, None))]
    if found:
        reasons = "; ".join(f"{conflict.flag} ({conflict.advice})" for conflict in found)
        raise UnsupportedError(f"--use-hypermuon cannot be combined with {reasons}.")
