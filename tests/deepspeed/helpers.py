"""Rank functions on the parts of the engine beside training: full values, checkpoints, refusals."""

from __future__ import annotations

import copy
import importlib
from pathlib import Path
from typing import Any

import torch

from tests.deepspeed.models import batch
from tests.deepspeed.training import Run, base_config, full_weights, initialize, one_micro_batch, start
from tests.support.told import told


def read_and_write_full_values(*, supernode_size: int) -> None:
    """`GatheredParameters` and `safe_*` on our parameters, inside and outside a step."""
    import torch.distributed as dist
    from deepspeed.utils import (
        safe_get_full_fp32_param,
        safe_get_full_grad,
        safe_get_full_optimizer_state,
        safe_get_local_fp32_param,
        safe_set_full_fp32_param,
        safe_set_full_grad,
        safe_set_full_optimizer_state,
    )
    from torch.distributed.tensor import DTensor

    deepspeed = start()
    engine = initialize(deepspeed, base_config(hyperfsdp={"supernode_size": supernode_size}))
    before = full_weights(engine)
    head, rank = engine.module.head, dist.get_rank()
    kept = head.weight
    assert isinstance(kept, DTensor)

    gathered = deepspeed.zero.GatheredParameters
    with gathered(list(engine.module.parameters())):
        for name, parameter in engine.module.named_parameters():
            assert not isinstance(parameter.data, DTensor)
            assert torch.equal(parameter.data, before[name]) and torch.equal(
                engine.module.state_dict()[name], before[name]
            )
        with torch.no_grad():
            kept.zero_()  # without a modifier, changes are dropped
    assert isinstance(kept.data, DTensor) and head.weight is kept
    assert torch.equal(safe_get_full_fp32_param(kept), before["head.weight"])

    with gathered([kept], modifier_rank=1):
        kept.data.fill_(rank + 3.0)  # through the kept reference
        with gathered([kept]):
            assert float(kept.data[0, 0]) == rank + 3.0
    assert torch.equal(safe_get_full_fp32_param(kept), torch.full_like(before["head.weight"], 4.0))
    with gathered(head.weight, modifier_rank=0), torch.no_grad():
        head.weight.copy_(before["head.weight"])
    assert torch.equal(safe_get_full_fp32_param(kept), before["head.weight"])

    assert safe_get_full_grad(kept) is None and safe_get_full_optimizer_state(kept, "exp_avg") is None
    loss = engine(batch(0, 0, rank))
    engine.backward(loss)
    gradient = safe_get_full_grad(kept)
    assert not isinstance(gradient, DTensor) and gradient.shape == kept.shape and float(gradient.norm()) > 0
    # The function is given full plain gradients: a plain result that depends on the whole fits them.
    deepspeed.utils.safe_update_full_grad_vectorized([kept], lambda g, _: g + torch.ones(kept.shape) * g.flatten()[-1])
    assert torch.equal(safe_get_full_grad(kept), gradient + gradient.flatten()[-1])
    safe_set_full_grad(kept, 2.0 * gradient)
    assert torch.equal(safe_get_full_grad(kept), 2.0 * gradient)
    kept.requires_grad_(False)
    assert safe_get_full_fp32_param(kept) is None and safe_get_local_fp32_param(kept) is None  # as in ZeRO
    kept.requires_grad_(True)
    engine.step()
    moment = safe_get_full_optimizer_state(kept, "exp_avg")
    torch.testing.assert_close(moment, 0.1 * 2.0 * gradient)  # AdamW saw what was written
    safe_set_full_optimizer_state(kept, moment + 1.0, "exp_avg")
    assert torch.equal(safe_get_full_optimizer_state(kept, "exp_avg"), moment + 1.0)
    value = torch.arange(kept.numel(), dtype=torch.float32).view(kept.shape)
    safe_set_full_fp32_param(kept, value)
    assert torch.equal(safe_get_full_fp32_param(kept), value)
    assert "give the full" in told(lambda: safe_set_full_fp32_param(kept, value[:1]))

    # What was written is what the next forward uses.
    safe_set_full_fp32_param(kept, torch.zeros_like(value))
    with torch.no_grad():
        loss = engine(batch(1, 0, rank)).item()
    assert abs(loss - torch.log(torch.tensor(float(value.shape[0]))).item()) < 1e-5

    full = engine._zero3_consolidated_16bit_state_dict()
    assert (full is None) == (rank != 0)
    if full is not None:
        assert full.keys() == engine.module.state_dict().keys()
        assert all(type(tensor) is torch.Tensor for tensor in full.values())


def read_and_write_local_parts(*, supernode_size: int) -> None:
    """`safe_*_local_*`: a rank's own rows, flattened; some ranks have none of a small parameter."""
    import torch.distributed as dist
    from deepspeed import utils

    deepspeed = start()
    engine = initialize(deepspeed, base_config(hyperfsdp={"supernode_size": supernode_size}))
    rank = dist.get_rank()
    place, shards = rank % supernode_size, supernode_size
    named = dict(engine.module.named_parameters())
    kept = named["head.weight"]

    def rows(full: torch.Tensor) -> torch.Tensor:
        """The arithmetic of even shards along the first dim, the last ones shorter or empty."""
        size = -(-full.shape[0] // shards)
        return full[place * size : (place + 1) * size].flatten()

    assert utils.safe_get_local_grad(kept) is None and utils.safe_get_local_optimizer_state(kept, "exp_avg") is None
    loss = engine(batch(0, 0, rank))
    engine.backward(loss)
    for parameter in named.values():
        assert torch.equal(utils.safe_get_local_grad(parameter), rows(utils.safe_get_full_grad(parameter)))
        assert torch.equal(utils.safe_get_local_fp32_param(parameter), rows(utils.safe_get_full_fp32_param(parameter)))
    gradient = utils.safe_get_full_grad(kept)
    utils.safe_set_local_grad(kept, 2.0 * utils.safe_get_local_grad(kept))
    assert torch.equal(utils.safe_get_full_grad(kept), 2.0 * gradient)
    engine.step()
    moment = utils.safe_get_local_optimizer_state(kept, "exp_avg")
    torch.testing.assert_close(moment, 0.1 * 2.0 * rows(gradient))  # AdamW saw what was written
    utils.safe_set_local_optimizer_state(kept, moment + 1.0, "exp_avg")
    full_moment = utils.safe_get_full_optimizer_state(kept, "exp_avg")
    assert torch.equal(rows(full_moment), moment + 1.0)

    value = torch.arange(kept.numel(), dtype=torch.float32).view(kept.shape)
    utils.safe_get_local_fp32_param(kept).zero_()  # a copy
    utils.safe_set_local_fp32_param(kept, rows(value))
    assert torch.equal(utils.safe_get_full_fp32_param(kept), value)
    assert "elements were given" in told(lambda: utils.safe_set_local_fp32_param(kept, torch.zeros(1)))
    with deepspeed.zero.GatheredParameters([kept]):
        assert "is gathered" in told(lambda: utils.safe_set_local_fp32_param(kept, rows(value)))
    # What was written is what the next forward uses.
    utils.safe_set_local_fp32_param(kept, torch.zeros_like(rows(value)))
    with torch.no_grad():
        loss = engine(batch(1, 0, rank)).item()
    assert abs(loss - torch.log(torch.tensor(float(value.shape[0]))).item()) < 1e-5


def save_16bit(*, directory: str) -> bool:
    """Whether weights were written, which are in bf16 and whole."""
    deepspeed = start()
    config = base_config(bf16={"enabled": True})
    engine = initialize(deepspeed, config)
    refused = engine.save_16bit_model(directory)
    config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    engine = initialize(deepspeed, config)
    weights = full_weights(engine)
    written = engine.save_16bit_model(directory, "weights.bin")
    stored = torch.load(Path(directory, "weights.bin"))
    for name, weight in weights.items():
        assert torch.equal(stored[name], weight.to(torch.bfloat16))
    return not refused and written


SCHEDULED = {"type": "WarmupLR", "params": {"warmup_num_steps": 6, "warmup_max_lr": 0.01}}


def train_and_save(*, directory: str, steps: int, more: int, supernode_size: int, clients_differ: bool = False) -> Run:
    """Train `steps`, save, and train `more` without a break; of every rank the same data, whatever its rank."""
    import torch.distributed as dist

    engine = _same_data_engine(supernode_size)
    _train_on_same_data(engine, Run(), 0, steps)
    state = {"epoch": 7, "seen": torch.tensor([steps]), "rank": dist.get_rank() if clients_differ else 0}
    assert engine.save_checkpoint(directory, client_state=state)
    run = Run()
    _train_on_same_data(engine, run, steps, more)
    run.weights = full_weights(engine)
    return run


def load_and_train(*, directory: str, steps: int, more: int, supernode_size: int) -> tuple[Run, dict[str, Any]]:
    """Load what `train_and_save` saved into an engine with other weights, and train on."""
    engine = _same_data_engine(supernode_size, spoil=True)
    path, client = engine.load_checkpoint(directory)
    assert path == str(Path(directory, f"global_step{steps}"))
    assert (engine.global_steps, engine.skipped_steps) == (steps, 0)
    run = Run()
    _train_on_same_data(engine, run, steps, more)
    run.weights = full_weights(engine)
    return run, client


def load_in_part(*, directory: str) -> dict[str, Any]:
    """What each of the options of `load_checkpoint` leaves alone."""
    engine = _same_data_engine(1, spoil=True)
    facts: dict[str, Any] = {"nothing": engine.load_checkpoint(directory + "/elsewhere")}
    facts["unknown"] = told(lambda: engine.load_checkpoint(directory, tag="global_step99"))
    zero = Path(directory, "zero")
    zero.mkdir(exist_ok=True)
    (zero / "mp_rank_00_model_states.pt").touch()
    facts["zero"] = told(lambda: engine.load_checkpoint(directory, tag="zero"))
    facts["function"] = told(lambda: engine.load_checkpoint(directory, custom_load_fn=print))
    engine.load_checkpoint(directory, load_module_only=True)
    facts["weights only"] = (engine.global_steps, len(engine.optimizer.state), engine.get_lr()[0])
    engine.load_checkpoint(directory, load_optimizer_states=False, load_lr_scheduler_states=False)
    facts["no optimizer"] = (engine.global_steps, len(engine.optimizer.state), engine.get_lr()[0])
    return facts


def save_without_frozen(*, directory: str) -> None:
    """A frozen embedding is left out of the checkpoint, and keeps its values when that is loaded."""
    deepspeed = start()
    engines = []
    for _ in range(2):
        config = copy.deepcopy(base_config())
        from tests.deepspeed.models import build_model

        model = build_model()
        model.embedding.weight.requires_grad_(False)
        trained = [p for p in model.parameters() if p.requires_grad]
        engines.append(deepspeed.initialize(model=model, model_parameters=trained, config=config)[0])
    first, second = engines
    run = Run()
    for step in range(2):
        one_micro_batch(first, run, "engine", step, 0, is_last=True)
    first.save_checkpoint(directory, exclude_frozen_parameters=True)
    with torch.no_grad():
        second.module.embedding.weight.fill_(5.0)
    second.load_checkpoint(directory)
    ours, expected = full_weights(second), full_weights(first)
    assert float(ours.pop("embedding.weight").min()) == 5.0
    assert all(torch.equal(ours[name], expected[name]) for name in ours)


def _same_data_engine(supernode_size: int, *, spoil: bool = False) -> Any:
    config = base_config(hyperfsdp={"supernode_size": supernode_size}, scheduler=SCHEDULED, gradient_clipping=0.5)
    engine = initialize(start(), config)
    if spoil:
        with torch.no_grad():
            for parameter in engine.module.parameters():
                parameter.add_(1.0)
    return engine


def _train_on_same_data(engine: Any, run: Run, first: int, steps: int) -> None:
    for step in range(first, first + steps):
        loss = engine(batch(step, 0, 0))
        run.losses.append(loss.item())
        engine.backward(loss)
        engine.step()
        run.norms.append(engine.get_global_grad_norm())
        run.rates.append(engine.get_lr()[0])


def what_initialize_says(*, configs: dict[str, dict[str, Any]], model: str = "plain") -> dict[str, str]:
    """What `deepspeed.initialize` raises for each configuration, and for models that are refused."""
    deepspeed = start()
    found = {name: told(lambda config=config: initialize(deepspeed, config)) for name, config in configs.items()}
    if model == "pipeline":
        layers = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)]
        module = deepspeed.pipe.PipelineModule(layers=layers, num_stages=1)
        config = base_config()
        found["pipeline"] = told(lambda: deepspeed.initialize(model=module, config=config))
    engine = initialize(deepspeed, base_config())
    found["compile"] = told(engine.compile)
    found["offload_states"] = told(engine.offload_states)
    other = torch.nn.Linear(4, 4)
    dead = torch.optim.AdamW(other.parameters())
    from tests.deepspeed.models import build_model

    found["dead"] = told(lambda: deepspeed.initialize(model=build_model(), optimizer=dead, config=_without_optimizer()))
    return found


def _without_optimizer() -> dict[str, Any]:
    config = base_config()
    del config["optimizer"]
    return config


def step_with_infinite_gradients() -> dict[str, Any]:
    """A step whose gradients are not finite on one rank is skipped by all."""
    import torch.distributed as dist

    engine = initialize(start(), base_config(scheduler=SCHEDULED))
    before = full_weights(engine)
    loss = engine(batch(0, 0, dist.get_rank()))
    engine.backward(loss * float("inf") if dist.get_rank() == 1 else loss)
    engine.step()
    after = full_weights(engine)
    facts = {
        "unchanged": all(torch.equal(before[name], after[name]) for name in before),
        "skipped": engine.skipped_steps,
        "applied": engine.was_step_applied(),
        "overflow": engine.optimizer.overflow,
        "steps": engine.global_steps,
    }
    one_micro_batch(engine, Run(), "engine", 1, 0, is_last=True)
    facts["applied later"] = engine.was_step_applied()
    engine.destroy()
    return facts


MUON = {"lr": 0.02, "adam_lr": 0.003, "weight_decay": 0.1, "ns_dtype": "float32"}


def train_with_muon(*, supernode_size: int, ranks_of_data: int) -> Run:
    """HyperMuon from the JSON, with clipping that bites; every rank sees the batches of all `ranks_of_data` ranks."""
    config = base_config(
        hyperfsdp={"supernode_size": supernode_size},
        optimizer={"type": "HyperMuon", "params": MUON},
        gradient_clipping=0.1,
        gradient_accumulation_steps=ranks_of_data,
    )
    engine = initialize(start(), config)
    assert {group["algorithm"] for group in engine.optimizer.param_groups} == {"muon", "adamw"}
    run = Run(engine=type(engine).__name__)
    for step in range(4):
        for data in range(ranks_of_data):
            loss = engine(batch(step, 0, data))
            run.losses.append(loss.item())
            engine.backward(loss)
            engine.step()
        run.norms.append(engine.get_global_grad_norm())
    run.weights = full_weights(engine)
    return run


def muon_refusals() -> dict[str, str]:
    """What is said about schedulers that set one rate, and about groups."""
    deepspeed = start()
    config = base_config(optimizer={"type": "HyperMuon", "params": MUON}, scheduler=SCHEDULED)
    found = {"scheduler": told(lambda: initialize(deepspeed, config))}
    from tests.deepspeed.models import build_model

    model = build_model()
    groups = [{"params": list(model.parameters()), "weight_decay": 0.0}]
    plain = base_config(optimizer={"type": "HyperMuon", "params": MUON})
    found["groups"] = told(lambda: deepspeed.initialize(model=model, model_parameters=groups, config=plain))
    listed = {"type": "WarmupLR", "params": {"warmup_num_steps": 2, "warmup_max_lr": [0.02, 0.003]}}
    listed["params"]["warmup_min_lr"] = [0.0, 0.0]
    engine = initialize(deepspeed, base_config(optimizer={"type": "HyperMuon", "params": MUON}, scheduler=listed))
    for step in range(3):
        one_micro_batch(engine, Run(), "engine", step, 0, is_last=True)
    found["rates"] = str(engine.get_lr())
    return found


def observe(*, directory: str) -> dict[str, Any]:
    """Monitors, timers, profiler, communication logger and activation checkpointing, all at once."""
    deepspeed = start()
    config = base_config(
        wall_clock_breakdown=True,
        csv_monitor={"enabled": True, "output_path": directory, "job_name": "job"},
        comms_logger={"enabled": True, "prof_all": True, "verbose": False},
        flops_profiler={"enabled": True, "profile_step": 1, "output_file": f"{directory}/profile.txt"},
        hyperfsdp={"supernode_size": 1},
    )
    from tests.deepspeed.models import build_model

    model = build_model()
    deepspeed.init_distributed("gloo", verbose=False)
    deepspeed.checkpointing.configure(None, partition_activations=False)
    for block in model.blocks:
        plain = block.forward
        block.forward = lambda hidden, plain=plain: deepspeed.checkpointing.checkpoint(plain, hidden)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    run = Run()
    for step in range(3):
        one_micro_batch(engine, run, "engine", step, 0, is_last=True)
        run.norms.append(engine.get_global_grad_norm())
    timers = engine.get_wall_clock_timers()
    logged = importlib.import_module("deepspeed.comm.comm").comms_logger.comms_dict
    return {
        "run": run,
        "timers": timers,
        "logged": {name: sum(entry[0] for entry in sizes.values()) for name, sizes in logged.items()},
        "counted": engine.module.fsdp_counters().all_reduces,
        "monitored": sorted(path.name for path in Path(directory).rglob("*.csv")),
        "profile": Path(directory, "profile.txt").exists(),
    }
