"""Megatron's own flags that HyperFSDP refuses, switches off, or leaves without effect, as data.

A flag in none of these tables works with HyperFSDP or has nothing to do with it; `known_arguments.txt` lists every flag
of the newest supported release under one of these headings. Importing this module imports neither Megatron nor torch,
so that ``hp-plugin check`` can judge an argument file anywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

BUCKET_FLAG = "--hyperfsdp-bucket-bytes"


@dataclass(frozen=True)
class Conflict:
    """A Megatron flag that HyperFSDP does not work with.

    Attributes:
        flag: The flag as a user types it.
        attribute: Its name on Megatron's argument namespace. A release without it cannot conflict.
        refused: Whether a value of the attribute is meant; values are those of the parser, before Megatron's checks.
        advice: Why, and what to do instead.
    """

    flag: str
    attribute: str
    refused: Callable[[object], bool]
    advice: str


@dataclass(frozen=True)
class SwitchedOff(Conflict):
    """A flag that is accepted, and switched off because HyperFSDP does the same or better without it.

    Attributes:
        value: What is put on the namespace instead.
    """

    value: object = False


def is_on(value: object) -> bool:
    """Whether a switch is set."""
    return bool(value)


def above_one(value: object) -> bool:
    """Whether a number asks for more than one."""
    return isinstance(value, int) and value > 1


def given(value: object) -> bool:
    """Whether an option was given at all."""
    return value is not None and value != []


def other_than(*allowed: object) -> Callable[[object], bool]:
    """Whether a value is none of `allowed`."""
    return lambda value: value not in allowed


_NOT_FP32 = other_than(None, "fp32")
_OWN_SHARDING = "HyperFSDP shards parameters, gradients and optimizer states itself; remove the flag"
_NO_GRAPHS = "CUDA graphs cannot capture parameters that are gathered and freed; use --cuda-graph-impl none"
_NOT_VERIFIED = "the combination has not been verified in this release; remove the flag or use --bf16"
_NOT_VERIFIED_OFFLOAD = (
    "offloading of activations beside parameters that are freed has not been verified; use --recompute-activations"
)
_FP32_STATES = "optimizer states are fp32; remove the flag (states of a checkpoint are converted when they are loaded)"
_FP32_SHARDS = "shards are kept in fp32; remove the flag"
_LATE_GRADIENTS = "weight gradients would arrive after the layer has been reduced; remove the flag"
_GROUPED_TENSOR = "its parameters are no plain tensors, which cannot be sharded; remove the flag"

CONFLICTS: tuple[Conflict, ...] = (
    Conflict("--use-torch-fsdp2", "use_torch_fsdp2", is_on, _OWN_SHARDING),
    Conflict("--use-megatron-fsdp", "use_megatron_fsdp", is_on, _OWN_SHARDING),
    Conflict("--use-custom-fsdp", "use_custom_fsdp", is_on, _OWN_SHARDING),
    Conflict("--use-layer-wise-distributed-optimizer", "use_layer_wise_distributed_optimizer", is_on, _OWN_SHARDING),
    Conflict("--tensor-parallel-num-weight-shards", "tensor_parallel_num_weight_shards", given, _OWN_SHARDING),
    Conflict(
        "--expert-tensor-parallel-num-weight-shards", "expert_tensor_parallel_num_weight_shards", given, _OWN_SHARDING
    ),
    # ------------------------------------------------------------------------------------------- optimizer
    Conflict("--optimizer", "optimizer", other_than("adam", "sgd"), "use --optimizer adam or sgd"),
    Conflict("--exp-avg-dtype", "exp_avg_dtype", _NOT_FP32, _FP32_STATES),
    Conflict("--exp-avg-sq-dtype", "exp_avg_sq_dtype", _NOT_FP32, _FP32_STATES),
    Conflict("--main-params-dtype", "main_params_dtype", _NOT_FP32, _FP32_STATES),
    Conflict(
        "--optimizer-cpu-offload",
        "optimizer_cpu_offload",
        is_on,
        "offloading is not available in this release; remove the flag",
    ),
    Conflict("--optimizer-cuda-graph", "optimizer_cuda_graph", is_on, _NO_GRAPHS),
    Conflict(
        "--qk-clip",
        "qk_clip",
        is_on,
        "it writes into whole weights, and a rank holds rows of them between two steps; remove the flag",
    ),
    # --------------------------------------------------------------- paths that go round the hooks of a layer
    Conflict(
        "--hybrid-context-parallel",
        "hybrid_context_parallel",
        is_on,
        "groups of context parallelism that change with the batch have not been verified; remove the flag",
    ),
    Conflict(
        "--overlap-moe-expert-parallel-comm",
        "overlap_moe_expert_parallel_comm",
        is_on,
        "it calls parts of a layer directly, so that the hooks that gather its parameters do not run; remove the flag",
    ),
    Conflict("--delay-wgrad-compute", "delay_wgrad_compute", is_on, _LATE_GRADIENTS),
    Conflict(
        "--overlap-dispatch-backward-with-experts-wgrad",
        "overlap_dispatch_backward_with_experts_wgrad",
        is_on,
        _LATE_GRADIENTS,
    ),
    Conflict("--defer-embedding-wgrad-compute", "defer_embedding_wgrad_compute", is_on, _LATE_GRADIENTS),
    Conflict(
        "--use-transformer-engine-op-fuser",
        "use_transformer_engine_op_fuser",
        is_on,
        "fused operations keep references to parameters that are exchanged when a layer is gathered; remove the flag",
    ),
    Conflict("--cuda-graph-impl", "cuda_graph_impl", other_than(None, "none"), _NO_GRAPHS),
    Conflict("--enable-cuda-graph", "enable_cuda_graph", is_on, _NO_GRAPHS),
    Conflict("--external-cuda-graph", "external_cuda_graph", is_on, _NO_GRAPHS),
    Conflict("--moe-single-grouped-weight", "moe_single_grouped_weight", is_on, _GROUPED_TENSOR),
    Conflict("--moe-single-grouped-bias", "moe_single_grouped_bias", is_on, _GROUPED_TENSOR),
    Conflict("--cpu-offloading-num-layers", "cpu_offloading_num_layers", is_on, _NOT_VERIFIED_OFFLOAD),
    Conflict(
        "--fine-grained-activation-offloading", "fine_grained_activation_offloading", is_on, _NOT_VERIFIED_OFFLOAD
    ),
    # ------------------------------------------------------------------------------------------- low precision
    Conflict("--fp8-param-gather", "fp8_param_gather", is_on, _FP32_SHARDS),
    Conflict("--fp4-param-gather", "fp4_param_gather", is_on, _FP32_SHARDS),
    Conflict("--reuse-grad-buf-for-mxfp8-param-ag", "reuse_grad_buf_for_mxfp8_param_ag", is_on, _FP32_SHARDS),
    Conflict("--fp8-format", "fp8", given, _NOT_VERIFIED),
    Conflict("--fp4-format", "fp4", given, _NOT_VERIFIED),
    Conflict("--te-precision-config-file", "te_precision_config_file", given, _NOT_VERIFIED),
    # ------------------------------------------------------------------------------------------- checkpoints
    Conflict(
        "--ckpt-format",
        "ckpt_format",
        other_than(None, "torch_dist"),
        "use --ckpt-format torch_dist, which stock Megatron reads too",
    ),
    Conflict(
        "--ckpt-convert-format",
        "ckpt_convert_format",
        given,
        "convert with stock Megatron; checkpoints are plain torch_dist",
    ),
    Conflict(
        "--non-persistent-ckpt-type",
        "non_persistent_ckpt_type",
        other_than(None, "global"),
        "use --non-persistent-ckpt-type global",
    ),
    Conflict(
        "--moe-use-upcycling",
        "moe_use_upcycling",
        is_on,
        "make experts of the dense checkpoint with stock Megatron, then load the result",
    ),
    # ------------------------------------------------------------------------------------------- training loop
    Conflict(
        "--check-weight-hash-across-dp-replicas-interval",
        "check_weight_hash_across_dp_replicas_interval",
        given,
        "data-parallel ranks hold different shards; remove the flag",
    ),
    Conflict("--check-for-large-grads", "check_for_large_grads", is_on, "use --check-for-nan-in-loss-and-grad alone"),
    Conflict("--save-wgrads-interval", "save_wgrads_interval", given, "full gradients are never kept; remove the flag"),
    Conflict("--save-params-interval", "save_params_interval", given, "full parameters are not kept; use checkpoints"),
    Conflict("--inprocess-restart", "inprocess_restart", is_on, "restart the whole job instead; remove the flag"),
    Conflict("--perform-rl-step", "perform_rl_step", is_on, "only pretraining is supported in this release"),
    Conflict("--fake-process-group", "fake_process_group", is_on, "its collectives move no data; remove the flag"),
    Conflict("--yaml-cfg", "yaml_cfg", given, "give Megatron's arguments on the command line"),
)
"""Flags that are refused."""

_GATHERED_AHEAD = "HyperFSDP gathers every layer ahead of its use"
_OWN_GROUPS = "it applies to Megatron's own groups, not to those in which HyperFSDP communicates"
_NO_BUCKETS = f"gradients are put into buckets by {BUCKET_FLAG}"

SWITCHED_OFF: tuple[SwitchedOff, ...] = (
    SwitchedOff(
        "--use-distributed-optimizer",
        "use_distributed_optimizer",
        is_on,
        "HyperFSDP shards the optimizer states too",
    ),
    SwitchedOff("--overlap-param-gather", "overlap_param_gather", is_on, _GATHERED_AHEAD),
    SwitchedOff(
        "--overlap-param-gather-with-optimizer-step", "overlap_param_gather_with_optimizer_step", is_on, _GATHERED_AHEAD
    ),
    SwitchedOff(
        "--num-distributed-optimizer-instances",
        "num_distributed_optimizer_instances",
        above_one,
        "replicas follow from the supernode size; --hyperfsdp-shard-size says over how many ranks to shard",
        1,
    ),
    SwitchedOff(
        "--dist-ckpt-optim-fully-reshardable",
        "dist_ckpt_optim_fully_reshardable",
        is_on,
        "every checkpoint of HyperFSDP can be resharded",
    ),
    SwitchedOff(
        "--distrib-optim-fully-reshardable-mem-efficient",
        "distrib_optim_fully_reshardable_mem_efficient",
        is_on,
        "no rank gathers optimizer states to save them",
    ),
    SwitchedOff(
        "--use-precision-aware-optimizer",
        "use_precision_aware_optimizer",
        is_on,
        "parameters, gradients and states of the optimizer are fp32",
    ),
    SwitchedOff(
        "--load-main-params-from-ckpt",
        "load_main_params_from_ckpt",
        is_on,
        "the weights of a checkpoint are read into the fp32 shards, which are the main parameters",
    ),
    SwitchedOff("--use-nccl-ub", "nccl_ub", is_on, "HyperFSDP does not register its buffers with NCCL"),
    SwitchedOff(
        "--ddp-param-name-patterns-for-fp32-local-accumulation",
        "ddp_param_name_patterns_for_fp32_local_accumulation",
        given,
        "gradients of micro-batches are added up in fp32 for all parameters",
        [],
    ),
)
"""Flags that are accepted and switched off, each with a printed line."""

WITHOUT_EFFECT: tuple[Conflict, ...] = (
    Conflict("--ddp-num-buckets", "ddp_num_buckets", given, _NO_BUCKETS),
    Conflict("--ddp-bucket-size", "ddp_bucket_size", given, _NO_BUCKETS),
    Conflict("--ddp-pad-buckets-for-high-nccl-busbw", "ddp_pad_buckets_for_high_nccl_busbw", is_on, _NO_BUCKETS),
    Conflict("--ddp-average-in-collective", "ddp_average_in_collective", is_on, "gradients are summed, then divided"),
    Conflict("--nccl-communicator-config-path", "nccl_communicator_config_path", given, _OWN_GROUPS),
    Conflict("--high-priority-stream-groups", "high_priority_stream_groups", given, _OWN_GROUPS),
    Conflict("--use-sharp", "use_sharp", is_on, _OWN_GROUPS),
)
"""Flags that tune Megatron's DDP and change no result: accepted, and said to do nothing."""

ADJUSTED: tuple[Conflict, ...] = (
    Conflict(
        "--gradient-accumulation-fusion",
        "gradient_accumulation_fusion",
        is_on,
        "--no-gradient-accumulation-fusion is switched on: the fused kernel adds into a main_grad buffer, which "
        "HyperFSDP does not keep",
    ),
    Conflict(
        "--main-grads-dtype",
        "main_grads_dtype",
        _NOT_FP32,
        "it is taken as --grad-reduce-in-bf16: gradients travel in bf16 and are added up in fp32",
    ),
    Conflict(
        "--ddp-reduce-scatter-with-fp32-accumulation",
        "ddp_reduce_scatter_with_fp32_accumulation",
        is_on,
        "it is taken as --hyperfsdp-deterministic, which adds up in fp32, inside a supernode, what travels in bf16",
    ),
)
"""Flags that are accepted and replaced by something else; `validation.adjust_megatron_arguments` does it."""
