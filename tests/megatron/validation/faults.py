"""Faults put into the code or the data of a job that trains with HyperFSDP; the reference on one rank is left alone.

A fault works on a model inside its wrapper, or on a function of Megatron or of ours, where it acts for models on shards
only. It never touches what compares.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

TP = "--tensor-model-parallel-size 2"
SP = f"{TP} --sequence-parallel"
PP = "--pipeline-model-parallel-size 2"
MOE = "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --moe-aux-loss-coeff 0.01"
EP = f"{MOE} --expert-model-parallel-size 2"


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        job: Megatron's arguments.
        put: Takes the HyperFSDP chunks of a rank as they are made, one by one.
        module: Where it lies; None where it is in no module, such as the norm of all gradients.
        kind: What of the module is the first to be wrong.
        source: The public report that has it.
    """

    job: str
    put: Callable[[Any], None]
    module: str | None
    kind: str = "output"
    source: str = ""


# ---------------------------------------------------------------- helpers


def _layer(chunk: Any, number: int) -> Any:
    """The layer with this number in the whole model, or None if another stage has it."""
    from hp_plugin.megatron.releases.differences import unwrapped

    layers = unwrapped(chunk).decoder.layers
    return next((layer for layer in layers if layer.layer_number == number + 1), None)


def _rank_of(group: str) -> int:
    from megatron.core import parallel_state

    return int(getattr(parallel_state, f"get_{group}_rank")())


def _after(module: Any, change: Callable[[Any], Any]) -> None:
    """Changes what a module gives: the first of a tuple, or the tensor."""

    def hook(owner: Any, inputs: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (change(output[0]), *output[1:])
        return change(output)

    module.register_forward_hook(hook, prepend=True)


def _of_jobs(module: Any, name: str, replacement: Callable[..., Any]) -> None:
    """Replaces a function that takes a list of chunks first, for chunks of HyperFSDP only. Once per process."""
    original = getattr(module, name)
    if hasattr(original, "is_fault"):
        return

    @functools.wraps(original)
    def function(model: Any, *args: Any, **kwargs: Any) -> Any:
        chosen = replacement if hasattr(model[0], "mesh") else None
        return original(model, *args, **kwargs) if chosen is None else chosen(original, model, *args, **kwargs)

    function.is_fault = True
    setattr(module, name, function)


def _skip(original: Any, *args: Any, **kwargs: Any) -> None:
    """Does nothing."""


# ---------------------------------------------------------------- tensor parallelism


def _unreduced_output(chunk: Any) -> None:
    layer = _layer(chunk, 2)
    if layer is not None:
        linear = layer.self_attention.linear_proj
        linear.forward = lambda x: (x @ linear.weight.t(), None)


def _doubled_output(chunk: Any) -> None:
    layer = _layer(chunk, 1)
    if layer is not None:
        _after(layer.mlp.linear_fc2, lambda y: y * 2)


def _averaged_output(chunk: Any) -> None:
    layer = _layer(chunk, 1)
    if layer is not None:
        _after(layer.mlp.linear_fc2, lambda y: y / 2)


def _input_gradient_unreduced(chunk: Any) -> None:
    """The layer's fc1 takes its input as it is: backward sums over nothing."""
    import torch

    layer = _layer(chunk, 2)
    if layer is not None:
        linear = layer.mlp.linear_fc1
        linear.forward = lambda x: (torch.nn.functional.linear(x, linear.weight), None)


def _shifted_vocabulary(chunk: Any) -> None:
    from hp_plugin.megatron.releases.differences import unwrapped

    embedding = getattr(unwrapped(chunk), "embedding", None)
    if embedding is not None and _rank_of("tensor_model_parallel") == 1:
        embedding.word_embeddings.vocab_start_index -= 28  # letters; there are few tokens at the end of a half
        embedding.word_embeddings.vocab_end_index -= 28


def _copies_differ(chunk: Any) -> None:
    """One tensor-parallel rank has another copy of a norm than the rank that would save it."""
    import torch

    from hp_plugin.core.layout import local_tensor

    layer = _layer(chunk, 1)
    if layer is not None and _rank_of("tensor_model_parallel") == 1:
        norm = next(p for name, p in layer.named_parameters() if "norm" in name and name.endswith("weight"))
        with torch.no_grad():
            local_tensor(norm).mul_(1.01)


def _heads_swapped(chunk: Any) -> None:
    """The attention of one layer gives its heads in the wrong order to the product that follows."""
    layer = _layer(chunk, 0)
    if layer is not None:
        _after(layer.self_attention.core_attention, lambda y: y.roll(y.shape[-1] // 2, -1))


def _sequence_swapped(chunk: Any) -> None:
    """The ranks of a tensor-parallel group hold each other's part of the sequence behind one product."""
    layer = _layer(chunk, 1)
    if layer is not None:

        def swap(output: Any) -> Any:
            from megatron.core.tensor_parallel.mappings import (
                gather_from_sequence_parallel_region,
                scatter_to_sequence_parallel_region,
            )

            whole = gather_from_sequence_parallel_region(output, tensor_parallel_output_grad=False)
            return scatter_to_sequence_parallel_region(whole.roll(whole.shape[0] // 2, 0))

        _after(layer.mlp.linear_fc2, swap)


def _norms_unsynchronised(chunk: Any) -> None:
    from megatron.core.distributed import finalize_model_grads as module

    _of_jobs(_module(module), "_allreduce_non_tensor_model_parallel_grads", _skip)


def _norms_doubled(chunk: Any) -> None:
    from megatron.core.distributed import finalize_model_grads as module

    def twice(original: Any, *args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        original(*args, **kwargs)

    _of_jobs(_module(module), "_allreduce_non_tensor_model_parallel_grads", twice)


def _module(function: Any) -> Any:
    """The module of a function that has its name."""
    import sys

    return sys.modules[function.__module__]


# ---------------------------------------------------------------- pipeline


def _tied_gradient_counted_once(chunk: Any) -> None:
    from megatron.core.distributed import finalize_model_grads as module

    _of_jobs(_module(module), "_allreduce_word_embedding_grads", _skip)


def _stale_activation(chunk: Any) -> None:
    """The second stage works on what came with the micro-batch before."""
    from hp_plugin.megatron.releases.differences import unwrapped

    if _rank_of("pipeline_model_parallel") != 1:
        return
    decoder, before = unwrapped(chunk).decoder, []
    receive = decoder.set_input_tensor

    def set_input_tensor(tensor: Any) -> None:
        before.append(tensor.detach().clone())
        receive(tensor + (before.pop(0) - tensor).detach() if len(before) > 1 else tensor)

    decoder.set_input_tensor = set_input_tensor


# ---------------------------------------------------------------- data parallelism


def _wrong_divisor(chunk: Any) -> None:
    """The mean over half of the ranks."""
    chunk._root.set_gradient_divide_factor(chunk.mesh.size() / 2)


def _replica_left_out(chunk: Any) -> None:
    """The last micro-batch is not reduced between supernodes either."""
    chunk._root.set_requires_all_reduce(False)
    root = chunk._root
    root.set_requires_all_reduce = lambda *unused, **unused_too: None


def _micro_batch_dropped(chunk: Any) -> None:
    """Of one data-parallel rank, the gradients of the first micro-batch vanish."""
    if _rank_of("data_parallel") != 1:
        return
    calls = []

    def hook(owner: Any, inputs: Any, output: Any) -> Any:
        calls.append(1)
        return output * 0 + output.detach() if len(calls) == 1 else output

    from hp_plugin.megatron.releases.differences import unwrapped

    model = unwrapped(chunk)
    if hasattr(model, "output_layer"):
        model.register_forward_hook(hook)


def _stale_shard(chunk: Any) -> None:
    """One rank's shard of one weight is not updated."""
    import torch

    from hp_plugin.core.layout import local_tensor
    from hp_plugin.megatron.fsdp.shard_optimizer import ShardOptimizer

    layer = _layer(chunk, 3)
    if layer is None or _rank_of("data_parallel") != 1:
        return
    weight = layer.mlp.linear_fc1.weight
    step = ShardOptimizer.step

    @torch.no_grad()
    def stale(self: Any) -> Any:
        before = local_tensor(weight).detach().clone()
        result = step(self)
        local_tensor(weight).copy_(before)
        return result

    ShardOptimizer.step = stale


def _tokens_of_one_rank(chunk: Any) -> None:
    """The sum over tokens is divided by the tokens of one rank."""
    scale = chunk.scale_gradients
    chunk.scale_gradients = lambda factor: scale(factor * chunk.mesh.size())


def _norm_counts_duplicates(chunk: Any) -> None:
    from hp_plugin.megatron.fsdp import shard_optimizer

    shard_optimizer.counted_once = lambda *args, **kwargs: True


def _decay_everywhere(chunk: Any) -> None:
    """Weight decay reaches the norms too."""
    from hp_plugin.megatron.fsdp.shard_optimizer import ShardOptimizer

    step = ShardOptimizer.step

    def decayed(self: Any) -> Any:
        for group in self.optimizer.param_groups:
            group["weight_decay"] = 10.0
        return step(self)

    ShardOptimizer.step = decayed


def _gradient_in_part(chunk: Any) -> None:
    """Backward of one layer works on the first half of the features only."""
    layer = _layer(chunk, 2)
    if layer is not None:

        def hook(owner: Any, inputs: Any, output: Any) -> Any:
            import torch

            tensor, rest = (output[0], output[1:]) if isinstance(output, tuple) else (output, None)
            half = tensor.shape[-1] // 2
            tensor = torch.cat([tensor[..., :half], tensor[..., half:].detach()], -1)
            return tensor if rest is None else (tensor, *rest)

        layer.self_attention.linear_proj.register_forward_hook(hook)


# ---------------------------------------------------------------- experts


def _expert_divisor(chunk: Any) -> None:
    """Gradients of experts are means over the ranks of their own, smaller mesh."""
    from hp_plugin.core.fsdp.experts import expert_modules

    for unit in expert_modules(chunk._root):
        unit.set_gradient_divide_factor(float(chunk.expert_mesh.size()))


def _expert_scale(chunk: Any) -> None:
    layer = _layer(chunk, 1)
    _after(layer.mlp.experts, lambda y: y * 1.5)


def _aux_loss_scale(chunk: Any) -> None:
    """The auxiliary loss of one layer's router counts twice."""
    router = _layer(chunk, 1).mlp.router
    router.config = _with(router.config, moe_aux_loss_coeff=0.02)


def _with(config: Any, **values: Any) -> Any:
    import copy

    changed = copy.copy(config)
    for name, value in values.items():
        setattr(changed, name, value)
    return changed


def _experts_swapped(chunk: Any) -> None:
    """Two experts of a rank have each other's tokens."""
    layer = _layer(chunk, 2)
    experts = layer.mlp.experts
    forward = experts.forward

    def swapped(hidden: Any, tokens_per_expert: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(hidden, tokens_per_expert.flip(0), *args, **kwargs)

    experts.forward = swapped


def _router_unsynchronised(chunk: Any) -> None:
    """The gradient of one router stays what one tensor-parallel rank sees of the sequence."""
    _layer(chunk, 1).mlp.router.weight.sequence_parallel = False


FAULTS = {
    "output-unreduced": Fault(TP, _unreduced_output, "decoder.layers.2.self_attention"),
    "output-doubled": Fault(TP, _doubled_output, "decoder.layers.1.mlp"),
    "output-averaged": Fault(TP, _averaged_output, "decoder.layers.1.mlp"),
    "input-gradient-unreduced": Fault(TP, _input_gradient_unreduced, "decoder.layers.2.mlp", "input_gradient"),
    "vocabulary-shifted": Fault(TP, _shifted_vocabulary, "embedding"),
    "copies-differ": Fault(TP, _copies_differ, "decoder.layers.1.input_layernorm"),
    "heads-swapped": Fault(TP, _heads_swapped, "decoder.layers.0.self_attention"),
    "sequence-swapped": Fault(SP, _sequence_swapped, "decoder.layers.1.mlp"),
    "norms-unsynchronised": Fault(
        SP, _norms_unsynchronised, "decoder.layers.0.input_layernorm", "gradient", "Megatron-LM #7452"
    ),
    "norms-doubled": Fault(SP, _norms_doubled, "decoder.layers.0.input_layernorm", "gradient"),
    "tied-gradient-counted-once": Fault(
        PP, _tied_gradient_counted_once, "embedding", "gradient", "Megatron-LM PR 3023"
    ),
    "stale-activation": Fault(PP, _stale_activation, "decoder.layers.2"),
    "divisor": Fault("", _wrong_divisor, "", "gradient"),
    "replica-left-out": Fault("", _replica_left_out, "", "gradient"),
    "micro-batch-dropped": Fault("", _micro_batch_dropped, None, "output_gradient"),
    "stale-shard": Fault("", _stale_shard, None, "weight"),
    "tokens-of-one-rank": Fault("--calculate-per-token-loss", _tokens_of_one_rank, "", "gradient"),
    "norm-counts-duplicates": Fault(TP, _norm_counts_duplicates, None, "grad_norm"),
    "decay-everywhere": Fault("", _decay_everywhere, None, "weight"),
    "gradient-in-part": Fault("", _gradient_in_part, "decoder.layers.2.self_attention", "gradient"),
    "expert-divisor": Fault(EP, _expert_divisor, "decoder.layers.0.mlp", "gradient"),
    "expert-scale": Fault(EP, _expert_scale, "decoder.layers.1.mlp"),
    "aux-loss-scale": Fault(EP, _aux_loss_scale, "decoder.layers.1.mlp", "gradient"),
    "experts-swapped": Fault(EP, _experts_swapped, "decoder.layers.2.mlp"),
    "router-unsynchronised": Fault(
        f"{EP} {SP}", _router_unsynchronised, "decoder.layers.1.mlp", "gradient", "Megatron-LM #4091"
    ),
}
