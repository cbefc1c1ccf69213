r"""GPT pretraining with nothing but the megatron-core wheel (0.19): ``megatron.training.pretrain`` on indexed data.

A plain Megatron script: it knows nothing of hp_plugin and runs stock with ``torchrun examples/pretrain_gpt.py ...``.
Started through the launcher it takes ``--use-hyperfsdp`` as well, and runs on CPU where asked to:

    torchrun --nproc-per-node 4 -m hp_plugin.megatron examples/pretrain_gpt.py $(cat examples/gpt_tiny.args) \\
        [--use-hyperfsdp --hyperfsdp-supernode-size 2] [--hyperfsdp-device cpu]

``--metrics-file FILE`` appends memory and traffic of every rank to FILE, see ``step_metrics.py``.

Megatron is imported inside functions only: checkpointing starts child processes that import the main module again.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

KEYS = ("tokens", "labels", "loss_mask", "position_ids")


def main() -> None:
    """Parse Megatron's command line, build, train, evaluate."""
    from megatron.core.enums import ModelType
    from megatron.training import pretrain
    from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args

    args = parse_and_validate_args(extra_args_provider=add_arguments, args_defaults={"tokenizer_type": "NullTokenizer"})
    check_corpus(args)
    step = forward_step
    metrics = None
    if args.metrics_file is not None:
        from step_metrics import StepMetrics

        metrics = StepMetrics(args)
        step = metrics.wrap(forward_step)
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    # Read by Megatron: every rank that needs data builds it.
    datasets.is_distributed = True  # type: ignore[attr-defined]
    pretrain(config, datasets, ModelType.encoder_or_decoder, step)
    if metrics is not None:
        metrics.close()
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Flags of this script."""
    group = parser.add_argument_group("metrics of examples/pretrain_gpt.py")
    group.add_argument("--metrics-file", default=None, metavar="FILE", help="append JSON lines about each rank to FILE")
    group.add_argument(
        "--metrics-supernode-size",
        type=int,
        default=1,
        metavar="N",
        help="ranks per supernode, by which traffic is sorted into inside and between",
    )
    group.add_argument(
        "--metrics-iteration", type=int, default=5, metavar="N", help="iteration whose traffic is counted"
    )
    return parser


def check_corpus(args: argparse.Namespace) -> None:
    """End with one sentence when a data set named by ``--data-path`` is not there."""
    for word in args.data_path or ():
        missing = [word + suffix for suffix in (".idx", ".bin") if not os.path.isfile(word + suffix)]
        if missing and not _is_weight(word):
            if args.rank == 0:
                print(
                    f"error: the data set {word} is missing: there is no {missing[0]}. Give --data-path the path "
                    "without suffix; examples/byte_corpus.py builds a small one.",
                    flush=True,
                )
            else:
                time.sleep(2)  # rank 0 speaks before torchrun ends everybody
            raise SystemExit(2)


def forward_step(data_iterator: Iterator[dict[str, torch.Tensor]] | None, model: torch.nn.Module) -> tuple[Any, Any]:
    """One micro-batch: the model's output and the function that makes a loss of it."""
    from megatron.core.utils import get_attr_wrapped_model

    tokens, labels, mask, positions = micro_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    output = model(tokens, positions, None, labels=labels, loss_mask=mask)
    return output, partial(loss_of, mask)


def micro_batch(
    data_iterator: Iterator[dict[str, torch.Tensor]] | None, vp_stage: int | None
) -> list[torch.Tensor | None]:
    """The tensors of :data:`KEYS`, each (micro batch, sequence), on first and last pipeline stages; else None.

    The first rank of a tensor-parallel group reads them and hands them to the others.
    """
    from megatron.core import mpu
    from megatron.training import get_args
    from megatron.training.utils import is_first_or_last_pipeline_stage

    if not is_first_or_last_pipeline_stage(vp_stage):
        return [None] * len(KEYS)
    args, group = get_args(), mpu.get_tensor_model_parallel_group()
    if mpu.get_tensor_model_parallel_rank() == 0:
        assert data_iterator is not None
        item = next(data_iterator)
        batch = [item[key].cuda(non_blocking=True) for key in KEYS]
    else:
        shape, device = (args.micro_batch_size, args.seq_length), torch.cuda.current_device()
        batch = [
            torch.empty(shape, dtype=torch.float32 if key == "loss_mask" else torch.int64, device=device)
            for key in KEYS
        ]
    if group.size() > 1:
        for tensor in batch:
            torch.distributed.broadcast(tensor, mpu.get_tensor_model_parallel_src_rank(), group=group)
    return list(batch)


def loss_of(
    mask: torch.Tensor | None, output: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Sum of the token losses, their number, and both for the log; ``output`` and ``mask`` are (batch, sequence)."""
    assert mask is not None  # the last pipeline stage has one
    weights = mask.view(-1).float()
    loss = torch.sum(output.view(-1).float() * weights)
    tokens = weights.sum().detach().to(torch.int)
    return loss, tokens, {"lm loss": torch.cat([loss.detach().view(1), tokens.view(1)])}


def datasets(sizes: list[int], vp_stage: int | None = None) -> Any:
    """Train, validation and test sets of ``sizes`` samples."""
    from megatron.core import mpu
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
    from megatron.training import get_args
    from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        tokenizer=build_tokenizer(args),
        path_to_cache=args.data_cache_path,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )  # attention is causal without one

    def needed() -> bool:
        return mpu.get_tensor_model_parallel_rank() == 0 and is_first_or_last_pipeline_stage(vp_stage)

    return BlendedMegatronDatasetBuilder(GPTDataset, sizes, needed, config).build()


def _is_weight(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


if __name__ == "__main__":
    main()
