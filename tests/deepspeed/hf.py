"""A rank function that trains with HF Trainer, stock or ours."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.deepspeed.training import start


@dataclass
class HFRun:
    """What Trainer logged and wrote.

    Attributes:
        engine: class of the engine.
        partitioned: whether the model was built under `zero.Init`.
        losses: logged, per step.
        norms: logged, per step.
        evaluated: losses of evaluations.
        weights: of the last `save_model`, read back from safetensors by rank 0.
        files: names in the last checkpoint.
        steps: at the end.
    """

    engine: str = ""
    partitioned: bool = False
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    evaluated: list[float] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    steps: int = 0


class Sequences(torch.utils.data.Dataset):
    """Arithmetic progressions; items depend on the index alone."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(24) * (1 + index % 3) + index) % 96
        return {"input_ids": tokens, "labels": tokens}


def train_with_trainer(
    *,
    directory: str,
    block: dict[str, Any] | None,
    steps: int = 4,
    resume: bool = False,
    optimizer: str | None = "AdamW",
) -> HFRun:
    """Train a Llama of two layers.

    Args:
        directory: of the Trainer.
        block: our block, or None for stock.
        steps: at which training stops; a checkpoint is written after each second one.
        resume: from the last checkpoint in the directory.
        optimizer: of the JSON; None leaves it to Trainer.
    """
    deepspeed = start()
    del deepspeed
    from accelerate import PartialState
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    logging.getLogger("transformers").setLevel(logging.ERROR)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
        "zero_allow_untested_optimizer": True,
    }
    if optimizer is not None:
        more = {"torch_adam": True} if optimizer == "AdamW" else {}
        config["optimizer"] = {"type": optimizer, "params": {"lr": "auto", "weight_decay": "auto", **more}}
    if block is not None:
        config["hyperfsdp"] = block
    # Without a backend by name, Accelerate takes a job on CPU for one of a single process.
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    PartialState(backend="gloo")
    arguments = TrainingArguments(
        directory,
        deepspeed=config,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=steps,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        load_best_model_at_end=True,
        learning_rate=1e-3,
        max_grad_norm=0.5,
        lr_scheduler_type="linear",
        warmup_steps=2,
        report_to=[],
        seed=0,
        optim="adamw_torch",
        disable_tqdm=True,
        accelerator_config={"use_configured_state": True},
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM._from_config(
        LlamaConfig(
            vocab_size=96,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32,
            tie_word_embeddings=False,
        )
    )
    run = HFRun(partitioned=any(hasattr(p, "ds_id") for p in model.parameters()))
    trainer = Trainer(model=model, args=arguments, train_dataset=Sequences(), eval_dataset=Sequences())
    trainer.train(resume_from_checkpoint=True if resume else None)
    history = trainer.state.log_history
    run.engine = type(trainer.model_wrapped).__name__
    run.losses = [entry["loss"] for entry in history if "loss" in entry]
    run.norms = [entry["grad_norm"] for entry in history if "grad_norm" in entry]
    run.evaluated = [entry["eval_loss"] for entry in history if "eval_loss" in entry]
    run.steps = trainer.state.global_step
    final = Path(directory, "final")
    trainer.save_model(str(final))
    torch.distributed.barrier()
    if os.environ["RANK"] == "0":
        from safetensors.torch import load_file

        run.weights = load_file(final / "model.safetensors")
        run.files = sorted(path.name for path in Path(directory, f"checkpoint-{steps}").iterdir())
    torch.distributed.barrier()
    return run
