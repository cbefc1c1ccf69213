"""What Megatron itself needs on CPU, per release. Each step is separate: a release lists the ones it needs."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

from hp_plugin.megatron.cpu_compat.patches import Ledger
from hp_plugin.megatron.releases import versions

AREA = "Megatron"


def apply(ledger: Ledger, series: tuple[int, int]) -> None:
    """Import Megatron (torch names must be replaced by now) and replace what its release ``series`` needs."""
    whole = versions.has_training()
    for step in STEPS[series]:
        if whole or step not in _OF_TRAINING:
            step(ledger)


def keep_compiled_helpers(ledger: Ledger) -> None:
    """Do not run ``make`` for the data-set helpers when the wheel has brought them compiled."""
    if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is None:
        return
    import megatron.core.datasets.utils as utils

    ledger.replace(utils, "compile_helpers", lambda: None, area=AREA)


def skip_fused_kernels(ledger: Ledger) -> None:
    """Do not look for ``nvcc`` to build the fused kernels of old releases, which none of their flags may use here."""
    from megatron.legacy import fused_kernels

    ledger.replace(fused_kernels, "load", lambda args: None, area=AREA)


def allow_no_cuda(ledger: Ledger) -> None:
    """``initialize_megatron`` asserts ``torch.cuda.is_available()``, which stays False, unless told otherwise."""
    import megatron.training.initialize as initialize
    import megatron.training.training as training

    replacement = functools.partial(initialize.initialize_megatron, allow_no_cuda=True)
    ledger.replace(training, "initialize_megatron", replacement, area=AREA)


def load_without_transformer_engine(ledger: Ledger) -> None:
    """0.12 asks for the version of Transformer Engine whenever it loads a checkpoint, and fails where there is none."""
    if importlib.util.find_spec("transformer_engine") is not None:
        return
    import megatron.training.checkpointing as checkpointing

    ledger.replace(checkpointing, "is_te_min_version", lambda *args, **kwargs: True, area=AREA)  # asks for nothing


def route_without_transformer_engine(ledger: Ledger) -> None:
    """0.16 asks whether its router may use Transformer Engine by a name that exists only where that is installed."""
    import megatron.core.transformer.moe.moe_utils as moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        ledger.replace(moe_utils, "te_general_gemm", None, area=AREA)


def mark_sequence_parallel_norms(ledger: Ledger) -> None:
    """Let torch's norms work under ``--sequence-parallel``.

    Without TransformerEngine or Apex, Megatron refuses them there. All they lack is the mark
    ``sequence_parallel`` on their parameters, by which gradients are summed over the tensor-parallel group.
    """
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    ledger.replace(WrappedTorchNorm, "__new__", staticmethod(_marked(WrappedTorchNorm.__new__)), area=AREA)


def fork_checkpoint_worker(ledger: Ledger) -> None:
    """Let the worker of ``--async-save`` be a fork of its rank, so that the emulated names exist in it.

    Megatron spawns it, and the first thing that it does is to choose a CUDA device.
    """
    from megatron.core.dist_checkpointing.strategies.async_utils import PersistentAsyncCaller

    original = PersistentAsyncCaller._get_process.__func__

    @functools.wraps(original)
    def _get_process(cls: type, rank: int, mp_mode: str = "fork", *args: Any, **kwargs: Any) -> Any:
        return original(cls, rank, "fork", *args, **kwargs)

    ledger.replace(PersistentAsyncCaller, "_get_process", classmethod(_get_process), area=AREA)


def stage_saved_tensors(ledger: Ledger) -> None:
    """Copy what ``--async-save`` writes before training goes on, as the copy from a device to the host does.

    Tensors that are on CPU already are not copied by Megatron, and its worker would write what they hold by then.
    """
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    original = FileSystemWriterAsync.prepare_write_data

    @functools.wraps(original)
    def prepare_write_data(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        self.write_buckets = [
            (path, key, (texts, [(item, tensor.clone()) for item, tensor in tensors]))
            for path, key, (texts, tensors) in self.write_buckets or []
        ]
        return result

    ledger.replace(FileSystemWriterAsync, "prepare_write_data", prepare_write_data, area=AREA)


def _marked(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def __new__(cls: type, config: Any, *args: Any, **kwargs: Any) -> Any:
        wanted, config.sequence_parallel = config.sequence_parallel, False
        try:
            norm = original(cls, config, *args, **kwargs)
        finally:
            config.sequence_parallel = wanted
        for parameter in norm.parameters():
            parameter.sequence_parallel = wanted
        return norm

    return __new__


_NEWEST = (
    keep_compiled_helpers,
    allow_no_cuda,
    mark_sequence_parallel_norms,
    stage_saved_tensors,
    fork_checkpoint_worker,
)

STEPS: dict[tuple[int, int], tuple[Callable[[Ledger], None], ...]] = {
    (0, 12): (
        keep_compiled_helpers,
        skip_fused_kernels,
        allow_no_cuda,
        mark_sequence_parallel_norms,
        stage_saved_tensors,
        load_without_transformer_engine,
    ),
    (0, 16): (
        keep_compiled_helpers,
        skip_fused_kernels,
        allow_no_cuda,
        mark_sequence_parallel_norms,
        route_without_transformer_engine,
        stage_saved_tensors,
    ),
    (0, 17): _NEWEST,
    (0, 18): _NEWEST,
    (0, 19): _NEWEST,
}
"""What each supported release needs, in order."""

_OF_TRAINING = (
    skip_fused_kernels,
    allow_no_cuda,
    load_without_transformer_engine,
    stage_saved_tensors,
    fork_checkpoint_worker,
)
