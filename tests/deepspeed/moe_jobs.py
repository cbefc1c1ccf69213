"""Rank functions with layers of `deepspeed.moe`, whose experts are known by their number among all of a layer."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from tests.deepspeed.models import VOCABULARY, WIDTH, batch
from tests.deepspeed.training import Run, base_config, start
from tests.support.told import told

EXPERTS, STEPS = 4, 4


class Expert(nn.Module):
    """Two linears with biases."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(hidden)))


class MixtureBlock(nn.Module):
    """A norm, and a mixture layer with a residual around it."""

    def __init__(self, *, ep_size: int, k: int, use_residual: bool) -> None:
        super().__init__()
        from deepspeed.moe.layer import MoE

        self.norm = nn.LayerNorm(WIDTH)
        # No token is dropped, so that what an expert sees does not depend on which rank asks.
        self.mixture = MoE(
            WIDTH,
            Expert(),
            num_experts=EXPERTS,
            ep_size=ep_size,
            k=k,
            drop_tokens=False,
            use_rts=False,
            top2_2nd_expert_sampling=False,
            use_residual=use_residual,
        )

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found, auxiliary, _ = self.mixture(self.norm(hidden))
        return hidden + found, auxiliary


class MixtureModel(nn.Module):
    """A language model whose layers are mixtures; the loss has the auxiliary losses of the gates."""

    def __init__(self, ep_sizes: list[int], *, k: int, use_residual: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(MixtureBlock(ep_size=e, k=k, use_residual=use_residual) for e in ep_sizes)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden, auxiliary = self.embedding(tokens[:, :-1]), 0.0
        for block in self.blocks:
            hidden, found = block(hidden)
            auxiliary = auxiliary + found
        logits = self.head(hidden).float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) + 0.1 * auxiliary


def ep_rank(ep_size: int) -> int:
    import torch.distributed as dist

    return dist.get_rank() % ep_size


def build(ep_sizes: list[int], *, k: int = 1, use_residual: bool = False) -> MixtureModel:
    """The same weights whatever `ep_sizes`: those of an expert follow from its number in the layer."""
    torch.manual_seed(0)
    model = MixtureModel(ep_sizes, k=k, use_residual=use_residual)
    for layer, (block, ep_size) in enumerate(zip(model.blocks, ep_sizes)):
        experts = block.mixture.deepspeed_moe.experts.deepspeed_experts
        for index, expert in enumerate(experts):
            torch.manual_seed(100 * layer + ep_rank(ep_size) * len(experts) + index)
            for linear in (expert.up, expert.down):
                linear.reset_parameters()
    torch.manual_seed(1)  # the same everywhere from here on
    for name, parameter in model.named_parameters():
        if "deepspeed_experts" not in name:
            with torch.no_grad():
                parameter.normal_(std=0.2)
    return model


def config(**more: Any) -> dict[str, Any]:
    return base_config(gradient_clipping=0.5, **more)


def stock_config(stage: int, **more: Any) -> dict[str, Any]:
    """ZeRO below stage 3, which is where stock takes native mixtures."""
    made = config(**more)
    del made["hyperfsdp"]
    made["zero_optimization"] = {"stage": stage, "reduce_scatter": True}
    return made


def initialize(config: dict[str, Any], ep_sizes: list[int], *, groups: bool = False, **model: Any) -> Any:
    """The engine; with `groups`, from the parameter groups that DeepSpeed's documentation asks for."""
    deepspeed = start()
    deepspeed.init_distributed("gloo", verbose=False)
    module = build(ep_sizes, **model)
    parameters: list[Any] = list(module.parameters())
    if groups:
        from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

        parameters = split_params_into_different_moe_groups_for_optimizer({"params": parameters, "name": "all"})
    engine, *_ = deepspeed.initialize(model=module, model_parameters=parameters, config=config)
    return engine


def named_globally(named: dict[str, torch.Tensor], ep_sizes: list[int]) -> dict[str, torch.Tensor]:
    """The same with an expert's number among all of its layer."""
    found = {}
    for name, value in named.items():
        match = re.match(r"blocks\.(\d+)(\..*deepspeed_experts\.)(\d+)(\..*)", name)
        if match:
            layer, middle, index, rest = int(match[1]), match[2], int(match[3]), match[4]
            ep_size = ep_sizes[layer]
            name = f"blocks.{layer}{middle}{ep_rank(ep_size) * (EXPERTS // ep_size) + index}{rest}"
        found[name] = value
    return found


def weights_of(engine: Any, ep_sizes: list[int]) -> dict[str, torch.Tensor]:
    """Full fp32 weights of this rank, by global names."""
    from hp_plugin.deepspeed.access import full_value

    named = {name: full_value(p.detach()).clone() for name, p in engine.module.named_parameters()}
    return named_globally(named, ep_sizes)


def train_steps(engine: Any, run: Run, first: int, steps: int, *, ranks_of_data: int) -> None:
    """Train; every rank its own data, or all of `ranks_of_data` ranks' one after the other."""
    for step in range(first, first + steps):
        for data in range(ranks_of_data) if ranks_of_data else [engine.global_rank]:
            loss = engine(batch(step, 0, data))
            run.losses.append(loss.item())
            engine.backward(loss)
            engine.step()
        run.norms.append(float(engine.get_global_grad_norm()))


def train(*, config: dict[str, Any], ep_sizes: list[int], ranks_of_data: int = 0, **model: Any) -> Run:
    """Train on the data of this rank, or alone on that of `ranks_of_data` ranks."""
    if ranks_of_data:
        config = {**config, "gradient_accumulation_steps": ranks_of_data}
    engine = initialize(config, ep_sizes, **model)
    run = Run(engine=type(engine).__name__)
    train_steps(engine, run, 0, STEPS, ranks_of_data=ranks_of_data)
    run.weights = weights_of(engine, ep_sizes)
    return run


def save(*, directory: str, ep_sizes: list[int]) -> Run:
    """Train two steps on the same data, save, and two more. Also write full weights."""
    made = config()
    made["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    engine = initialize(made, ep_sizes)
    _train_alike(engine, Run(), 0)
    engine.save_checkpoint(directory)
    engine.save_16bit_model(directory, "full.bin")
    run = Run(weights=weights_of(engine, ep_sizes))
    _train_alike(engine, run, 2)
    return run


def load(*, directory: str, ep_sizes: list[int]) -> Run:
    engine = initialize(config(), ep_sizes)
    with torch.no_grad():
        for parameter in engine.module.parameters():
            parameter.add_(1.0)
    engine.load_checkpoint(directory)
    run = Run(weights=weights_of(engine, ep_sizes))
    _train_alike(engine, run, 2)
    return run


def _train_alike(engine: Any, run: Run, first: int) -> None:
    for step in range(first, first + 2):
        loss = engine(batch(step, 0, 0))
        run.losses.append(loss.item())
        engine.backward(loss)
        engine.step()
        run.norms.append(float(engine.get_global_grad_norm()))


def write_experts() -> dict[str, Any]:
    """`GatheredParameters` writes the experts of the ranks that hold the same; others keep theirs."""
    import deepspeed
    import torch.distributed as dist

    engine = initialize(config(hyperfsdp={"supernode_size": 4}), [2])
    weight = engine.module.blocks[0].mixture.deepspeed_moe.experts.deepspeed_experts[0].up.weight
    with deepspeed.zero.GatheredParameters([weight], modifier_rank=1):
        weight.data.fill_(float(dist.get_rank()))
    with deepspeed.zero.GatheredParameters([weight]):
        return {"shape": tuple(weight.shape), "value": float(weight.data.mean())}


def refusals() -> dict[str, str]:
    """What is said about experts that cannot be sharded."""
    deepspeed = start()
    deepspeed.init_distributed("gloo", verbose=False)
    found = {}
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    for parameter in model[1].parameters():
        parameter.allreduce, parameter.group_name = False, "ep_size_1"

    def outside() -> None:
        from deepspeed.utils import groups

        groups._create_expert_and_data_parallel(1)
        deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=base_config())

    found["outside"] = told(outside)

    def inside_zero_init() -> None:
        with deepspeed.zero.Init(config_dict_or_path=config()):
            module = MixtureModel([2], k=1, use_residual=False)
        deepspeed.initialize(model=module, model_parameters=list(module.parameters()), config=config())

    found["zero.Init"] = told(inside_zero_init)

    import torch.distributed as dist

    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]

    class Parallel:
        """An mpu all of whose ranks are model-parallel."""

        def __getattr__(self, name: str) -> Any:
            if not name.startswith("get_"):
                raise AttributeError(name)
            group = dist.group.WORLD if "model_parallel" in name else alone
            if name.endswith("world_size"):
                return lambda: dist.get_world_size(group)
            return (lambda: dist.get_rank(group)) if name.endswith("rank") else (lambda: group)

    def with_mpu() -> None:
        plain = torch.nn.Sequential(torch.nn.Linear(2, 2))
        deepspeed.initialize(
            model=plain, model_parameters=list(plain.parameters()), config=base_config(), mpu=Parallel()
        )

    found["mpu"] = told(with_mpu)
    return found


MUON = {"type": "HyperMuon", "params": {"lr": 0.02, "adam_lr": 0.003, "weight_decay": 0.1, "ns_dtype": "float32"}}
SGD = {"type": "SGD", "params": {"lr": 0.1}}


def save_stock(*, directory: str, stage: int, ep_sizes: list[int]) -> Run:
    """Stock trains two steps on the same data, saves, and trains two more."""
    engine = initialize(stock_config(stage), ep_sizes)
    _train_alike(engine, Run(), 0)
    engine.save_checkpoint(directory)
    run = Run(weights=weights_of(engine, ep_sizes), engine=type(engine).__name__)
    _train_alike(engine, run, 2)
    return run
