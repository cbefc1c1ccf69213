"""Rank functions that save with one engine and go on with another. All ranks see the same data, so worlds compare."""

from __future__ import annotations

from typing import Any

import torch

from tests.deepspeed.models import batch, build_model
from tests.deepspeed.training import ADAM, Run, base_config, start, stock
from tests.support.told import told

SCHEDULED = {"type": "WarmupLR", "params": {"warmup_num_steps": 6, "warmup_max_lr": 0.01}}
MUON = {"lr": 0.02, "adam_lr": 0.003, "weight_decay": 0.1, "ns_dtype": "float32"}
STEPS, MORE = 3, 3


def save_and_go_on(*, directory: str, engine: str, steps: int = STEPS, more: int = MORE, **kind: Any) -> Run:
    """Train `steps`, save, and train `more` without a break: what came after the save, and the weights at the end.

    Args:
        directory: For the checkpoint.
        engine: See `build`.
        steps: Before the save.
        more: After it.
        **kind: See `build`.
    """
    built = build(engine, **kind)
    train(built, Run(), 0, steps)
    built.save_checkpoint(directory, client_state={"epoch": 7, "seen": torch.tensor([steps])})
    run = Run(engine=type(built).__name__)
    train(built, run, steps, more)
    run.weights = weights(built)
    return run


def save_and_tell(*, directory: str, engine: str, **kind: Any) -> dict[str, dict[str, torch.Tensor]]:
    """Train and save; weights and Adam's first moments at the save, by the engine's own account."""
    from deepspeed.utils import safe_get_full_optimizer_state

    built = build(engine, **kind)
    train(built, Run(), 0, STEPS)
    built.save_checkpoint(directory)
    found = {"weight": weights(built)}
    trained = [(n, p) for n, p in built.module.named_parameters() if p.requires_grad]
    for key in ("exp_avg", "exp_avg_sq"):
        found[key] = {n: safe_get_full_optimizer_state(p, key).detach().clone() for n, p in trained}
    return found


def read_with_zero_to_fp32(*, directory: str, bf16: bool) -> None:
    """DeepSpeed's functions that make one state dict of a checkpoint do so of ours, saved before any step and after."""
    import torch.distributed as dist
    from deepspeed.utils import zero_to_fp32

    built = build("ours", bf16=bf16, supernode_size=2)
    built.save_checkpoint(directory, tag="untrained")
    train(built, Run(), 0, 2)
    built.save_checkpoint(directory)
    expected = {**weights(built), "scale": built.module.scale.detach().clone()}
    if dist.get_rank() != 0:
        return
    read = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint
    found = read(directory)
    assert found.keys() == {*expected, "head.weight"}
    assert found["head.weight"] is found["embedding.weight"]  # tied
    for name, weight in expected.items():
        assert torch.equal(found[name], weight.float()), name
    assert all(tensor.dtype == torch.float32 for name, tensor in found.items() if name != "scale")
    for tag in ("untrained", None):
        assert read(directory, tag, True).keys() == found.keys() - {"blocks.0.norm.weight"}

    model = build_model(tied=True)
    model.register_buffer("scale", torch.zeros(2))
    zero_to_fp32.load_state_dict_from_zero_checkpoint(model, directory)
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in found.items())
    zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(directory, f"{directory}/out", max_shard_size=None)
    stored = torch.load(f"{directory}/out/pytorch_model.bin")
    assert all(torch.equal(stored[name], tensor) for name, tensor in found.items())


def muon_alone(*, saved: dict[str, dict[str, torch.Tensor]], momentum: str) -> Run:
    """Plain torch in one process: HyperMuon goes on from weights and moments that are given."""
    from hp_plugin import HyperMuon
    from hp_plugin.core.muon import route

    torch.set_num_threads(1)
    model = build_model(tied=True)
    model.blocks[0].norm.weight.requires_grad_(False)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(saved["weight"][name])
    options = {**MUON, "ns_dtype": torch.float32}
    optimizer = HyperMuon(route(model), **options)
    names = {parameter: name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = names[parameter]
            if group["algorithm"] == "muon":
                optimizer.state[parameter] = {"momentum_buffer": saved[momentum][name].clone()}
            else:
                moments = {key: saved[key][name].clone() for key in ("exp_avg", "exp_avg_sq")}
                optimizer.state[parameter] = {"step": torch.tensor(float(STEPS)), **moments}
    run = Run()
    for step in range(STEPS, STEPS + MORE):
        loss = model(batch(step, 0, 0))
        loss.backward()
        run.losses.append(loss.item())
        run.norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        run.rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        optimizer.zero_grad()
    run.weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return run


def load_and_go_on(
    *, directory: str, engine: str, more: int = MORE, options: dict[str, Any] | None = None, **kind: Any
) -> tuple[Run, dict[str, Any]]:
    """Load into an engine with other weights and go on; also what was loaded beside the weights.

    Args:
        directory: Of the checkpoint.
        engine: See `build`.
        more: Steps.
        options: Of `load_checkpoint`.
        **kind: See `build`.
    """
    # Stock takes no frozen weights and no buffers from the universal layout.
    built = build(engine, spoil=engine == "ours" or not kind.get("universal"), **kind)
    path, client = built.load_checkpoint(directory, **(options or {}))
    facts = {"path": path, "client": client, "steps": built.global_steps, "samples": built.global_samples}
    facts["buffer"] = built.module.scale.clone()
    facts["state"] = _norms(built) if engine == "ours" else {}
    run = Run(engine=type(built).__name__)
    train(built, run, facts["steps"], more)
    run.weights = weights(built)
    return run, facts


def build(
    engine: str,
    *,
    optimizer: str = "AdamW",
    spoil: bool = False,
    tied: bool = True,
    frozen: bool = True,
    groups: bool = True,
    universal: bool = False,
    supernode_size: int = 1,
    bf16: bool = False,
    zero: dict[str, Any] | None = None,
) -> Any:
    """An engine on a model with a tied weight, a frozen one and a buffer, and two parameter groups.

    Args:
        engine: "ours", or "zero1", "zero2", "zero3" of stock.
        optimizer: "AdamW", "Muon" or "HyperMuon".
        spoil: Change the weights and the buffer, so that only loading can bring back those of the checkpoint.
        tied: The head has the embedding's weight.
        frozen: One norm is not trained.
        groups: Vectors in a group without weight decay.
        universal: The configuration asks for the universal layout.
        supernode_size: Of ours.
        bf16: Train in it.
        zero: Further settings of ZeRO.
    """
    deepspeed = start()
    config = base_config(hyperfsdp={"supernode_size": supernode_size}, gradient_clipping=0.5, **(zero or {}))
    if bf16:
        config["bf16"] = {"enabled": True}
    if optimizer == "AdamW":
        config["scheduler"] = SCHEDULED
    else:
        options = MUON if optimizer == "HyperMuon" else {"lr": 0.02, "ns_method": "standard", "torch_adam": True}
        config["optimizer"] = {"type": optimizer, "params": options}
        if optimizer == "Muon":
            config["gradient_clipping"] = 0.0
    if engine != "ours":
        config = stock(config)
        config["zero_optimization"]["stage"] = int(engine[-1])
        if optimizer == "Muon" and engine == "zero3":
            config["zero_optimization"]["reduce_scatter"] = False
    if universal:
        config["checkpoint"] = {"load_universal": True}
    model = build_model(tied=tied)
    model.register_buffer("scale", torch.tensor([1.5, 2.0]))
    if frozen:
        model.blocks[0].norm.weight.requires_grad_(False)
    if spoil:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
            model.scale.zero_()
    trained: list[Any] = [p for p in model.parameters() if p.requires_grad]
    if groups and optimizer == "AdamW":
        vectors, others = [p for p in trained if p.dim() < 2], [p for p in trained if p.dim() > 1]
        trained = [{"params": others, "weight_decay": ADAM["weight_decay"]}, {"params": vectors, "weight_decay": 0.0}]
    built, *_ = deepspeed.initialize(model=model, model_parameters=trained, config=config)
    return built


def train(engine: Any, run: Run, first: int, steps: int) -> None:
    for step in range(first, first + steps):
        loss = engine(batch(step, 0, 0))
        run.losses.append(loss.item())
        engine.backward(loss)
        engine.step()
        run.norms.append(float(engine.get_global_grad_norm()))
        run.rates.append(engine.get_lr()[0])


def weights(engine: Any) -> dict[str, torch.Tensor]:
    """Full weights; frozen ones too, which stock's helper does not find in stages 1 and 2."""
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        frozen = {n: p.detach().clone() for n, p in engine.module.named_parameters() if not p.requires_grad}
    return {**_trained(engine), **frozen}


def _trained(engine: Any) -> dict[str, torch.Tensor]:
    from deepspeed.utils import safe_get_full_fp32_param

    found = [(n, p) for n, p in engine.module.named_parameters() if p.requires_grad]
    return {n: safe_get_full_fp32_param(p).detach().clone() for n, p in found}


def _norms(engine: Any) -> dict[str, dict[str, float]]:
    """Of each parameter's optimizer state."""
    from hp_plugin.deepspeed.access import full_value

    names = {p: n for n, p in engine.module.named_parameters()}
    return {
        names[p]: {key: float(full_value(value).norm()) for key, value in state.items() if torch.is_tensor(value)}
        for p, state in engine.basic_optimizer.state.items()
    }


def load_weights_alone(*, directory: str, tag: str) -> dict[str, Any]:
    """What is said of a checkpoint without optimizer state, and what `load_module_only` loads of it."""
    built = build("ours", spoil=True)
    facts: dict[str, Any] = {"with optimizer": told(lambda: built.load_checkpoint(directory, tag))}
    built.load_checkpoint(directory, tag, load_module_only=True)
    return {**facts, "weights": weights(built), "buffer": built.module.scale.clone()}
