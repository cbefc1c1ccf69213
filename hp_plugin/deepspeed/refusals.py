"""What of a DeepSpeed configuration HyperFSDP refuses, and what to use instead. DeepSpeed is not imported."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hp_plugin.errors import UnsupportedError


@dataclass(frozen=True)
class Refusal:
    """One feature that does not work with HyperFSDP.

    Attributes:
        path: Keys that lead to it in the JSON, separated by dots.
        asks: Whether a value at that path asks for the feature.
        reason: What HyperFSDP does, or why it cannot.
        instead: What to use.
    """

    path: str
    asks: Callable[[Any], bool]
    reason: str
    instead: str


def _on(value: Any) -> bool:
    """A switch, or an object with a switch `enabled`."""
    return bool(value.get("enabled", False)) if isinstance(value, Mapping) else bool(value)


def _given(value: Any) -> bool:
    return value is not None and value is not False


def _to_device(value: Any) -> bool:
    return isinstance(value, Mapping) and str(value.get("device", "none")).lower() != "none"


def _above(limit: int) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, (int, float)) and not isinstance(value, bool) and value > limit


_OFFLOAD = "remove it: sharding over a supernode takes its place; where memory is short, use a larger shard_size"
_TWO_TIERS = 'remove it and give "shard_size" and "reshard_after_forward" in the block "hyperfsdp"'
_ACCUMULATION = "gradients are summed in fp32, and masters and optimizer state are kept in fp32"

REFUSALS = (
    Refusal("zero_optimization.offload_param", _to_device, "parameters stay on the device", _OFFLOAD),
    Refusal("zero_optimization.offload_optimizer", _to_device, "optimizer state stays on the device", _OFFLOAD),
    Refusal("zero_optimization.cpu_offload", _on, "optimizer state stays on the device", _OFFLOAD),
    Refusal("zero_optimization.cpu_offload_param", _on, "parameters stay on the device", _OFFLOAD),
    Refusal("zero_optimization.zenflow", _given, "there is no offloaded optimizer to overlap with", "remove it"),
    Refusal(
        "zero_optimization.zero_hpz_partition_size", _above(1), "HyperFSDP keeps no second copy of weights", _TWO_TIERS
    ),
    Refusal("zero_optimization.mics_shard_size", _above(0), "HyperFSDP takes the place of MiCS", _TWO_TIERS),
    Refusal("zero_optimization.mics_hierarchical_params_gather", _on, "HyperFSDP takes the place of MiCS", _TWO_TIERS),
    Refusal("zero_optimization.zero_quantized_weights", _on, "weights are gathered in the compute dtype", "remove it"),
    Refusal(
        "zero_optimization.zero_quantized_nontrainable_weights",
        _on,
        "weights rest in the dtype of their masters",
        "remove it",
    ),
    Refusal("zero_optimization.zero_quantized_gradients", _on, "gradients are reduced in fp32", "remove it"),
    Refusal(
        "hybrid_engine", _on, "it switches between training and DeepSpeed's inference kernels", "generate in eval mode"
    ),
    Refusal(
        "compile.deepcompile", _on, "DeepCompile rewrites the graphs of ZeRO", "use torch.compile on the model's blocks"
    ),
    Refusal(
        "tensor_parallel.autotp_size",
        _above(1),
        "AutoTP is not supported yet",
        "remove it: HyperFSDP shards weights over the same ranks",
    ),
    Refusal("sequence_parallel_size", _above(1), "Ulysses is not supported yet", "set it to 1"),
    Refusal("expert_parallel", _on, "AutoEP is not supported yet", "remove it: experts are sharded as other weights"),
    Refusal("compression_training", _given, "compression changes weights behind the shards", "compress after training"),
    Refusal("eigenvalue", _on, "it differentiates twice through gathered weights", "remove it"),
    Refusal("amp", _on, "Apex AMP keeps masters of its own", 'use "bf16": {"enabled": true}'),
    Refusal("sparse_gradients", _on, "gradients of embeddings are dense shards", "remove it"),
    Refusal("bf16.bf16_master_weights_and_grads", _on, _ACCUMULATION, "remove it"),
    Refusal("bf16.bf16_optimizer_states", _on, _ACCUMULATION, "remove it"),
    Refusal("fp16.fp16_master_weights_and_grads", _on, _ACCUMULATION, "remove it"),
    Refusal(
        "data_types.grad_accum_dtype",
        lambda v: v not in (None, "fp32", "float32"),
        _ACCUMULATION,
        "remove it or say fp32",
    ),
    Refusal("data_types.buffer_dtype", _given, "buffers keep their dtype", "cast buffers before deepspeed.initialize"),
    Refusal(
        "data_types.keep_in_fp32_modules", bool, "a unit has one compute dtype", "use torch_autocast instead of bf16"
    ),
    Refusal(
        "torch_autocast.dtype",
        lambda v: v in ("fp16", "float16", "half"),
        "there is no loss scale under autocast",
        'use "dtype": "bfloat16"',
    ),
    Refusal("checkpoint.use_node_local_storage", _on, "all ranks read one checkpoint", "save to a shared file system"),
    Refusal("data_efficiency", _on, "random-LTD and curriculum sampling are not supported yet", "remove it"),
    Refusal("curriculum_learning", _on, "curriculum learning is not supported yet", "remove it"),
    Refusal(
        "elasticity",
        _on,
        "DeepSpeed's elastic agent is not supported yet",
        "resume: checkpoints load on any number of ranks",
    ),
    Refusal("autotuning", _on, "the autotuner varies ZeRO stages", "remove it"),
    Refusal(
        "gradient_allreduce_op",
        lambda v: str(v).lower() not in ("mean", "avg"),
        "gradients are averaged, as with ZeRO stage 3",
        "remove it and scale the loss",
    ),
    Refusal(
        "optimizer.type",
        lambda v: str(v).lower() == "muon",
        "DeepSpeed's Muon works on the partitions of ZeRO, and clips updates instead of gradients",
        'use "type": "HyperMuon"',
    ),
    Refusal(
        "optimizer.type",
        lambda v: str(v).lower() in ("onebitadam", "onebitlamb", "zerooneadam"),
        "it replaces the reduction of gradients",
        'use "type": "AdamW"',
    ),
    Refusal(
        "optimizer.type",
        lambda v: str(v).lower() in ("lamb", "fusedlamb"),
        "its trust ratio needs norms of whole weights",
        'use "type": "AdamW" or "HyperMuon"',
    ),
)


def value_at(config: Mapping[str, Any], path: str) -> Any:
    """What stands at a dotted path of a configuration; None where there is nothing."""
    found: Any = config
    for key in path.split("."):
        if not isinstance(found, Mapping) or key not in found:
            return None
        found = found[key]
    return found


def refused(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Every setting that HyperFSDP refuses, as its path and a sentence."""
    stage = value_at(config, "zero_optimization.stage")
    if stage != 3:
        sentence = (
            f'"zero_optimization.stage" is {stage!r}, but HyperFSDP shards weights, gradients and optimizer state, '
            "which frameworks recognise by stage 3; set it to 3."
        )
        yield "zero_optimization.stage", sentence
    for refusal in REFUSALS:
        value = value_at(config, refusal.path)
        if value is not None and refusal.asks(value):
            yield (
                refusal.path,
                f'"{refusal.path}": {value!r} is not supported with HyperFSDP: {refusal.reason}; {refusal.instead}.',
            )
    for path in _autos(config):
        sentence = (
            f'"{path}" is still "auto". HF Trainer and Accelerate fill such values in; a job of its own must give a '
            "value, or remove the key."
        )
        yield path, sentence


def check_config(config: Mapping[str, Any]) -> None:
    """Raises UnsupportedError with every setting of `config` that HyperFSDP refuses."""
    found = [sentence for _, sentence in refused(config)]
    if found:
        raise UnsupportedError(" ".join(found))


def _autos(config: Any, path: str = "") -> Iterator[str]:
    if isinstance(config, Mapping):
        for key, value in config.items():
            if key != "hyperfsdp" or path:
                yield from _autos(value, f"{path}.{key}" if path else str(key))
    elif config == "auto":
        yield path
