"""Rank functions of the tests with real processes."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from hp_plugin import HyperMuon
from hp_plugin.core.checkpoint import load_checkpoint, save_checkpoint
from hp_plugin.core.layout import Layout, local_tensor
from hp_plugin.core.muon.splits import Stack
from tests.fsdp.comparison import full
from tests.fsdp.models import loss_of, make_model, micro_batch
from tests.muon.reference import ReferenceMuon, values
from tests.muon.simulation import assert_same, shard_of
from tests.support import init_gloo

SHAPES = [(16, 16), (24, 10), (7, 13), (16, 16), (2, 9), (5, 30)]


# ---- DTensors --------------------------------------------------------------------------------------------------------


def make_mesh(shape: tuple[int, ...]) -> DeviceMesh:
    names = {1: ("shard",), 2: ("replicate", "shard"), 3: ("replicate", "shard", "tensor")}[len(shape)]
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def placed(value: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """A DTensor made of local shards, which also says strided ones as FSDP2 does."""
    layout = Layout.from_mesh(value.shape, mesh, placements)
    rank = mesh.mesh.flatten().tolist().index(dist.get_rank())
    local = shard_of(value, layout, rank)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=value.shape, stride=tuple(value.stride()))


def full_value(tensor: DTensor, rank_values: list[Tensor] | None = None) -> Tensor:
    """The whole of a DTensor, by Layout: torch cannot redistribute every strided placement."""
    layout = Layout.from_dtensor(tensor)
    from tests.muon.simulation import assemble

    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, local_tensor(tensor).detach())
    return assemble([parts[rank] for rank in tensor.device_mesh.mesh.flatten().tolist()], layout)


def placements_on(mesh: DeviceMesh) -> list[list[Placement]]:
    """Ways to place a matrix on a mesh of 1, 2 or 3 axes."""
    if mesh.ndim == 1:
        return [[Shard(0)], [Shard(1)], [Replicate()]]
    if mesh.ndim == 2:
        return [[Replicate(), Shard(0)], [Shard(0), Shard(1)], [_StridedShard(0, split_factor=mesh.size(1)), Shard(0)]]
    factor = mesh.size(2)
    return [
        [Replicate(), Shard(0), Shard(1)],
        [Replicate(), _StridedShard(0, split_factor=factor), Shard(0)],
        [Shard(1), Replicate(), Shard(0)],
    ]


def step_dtensors(*, meshes: list[tuple[int, ...]]) -> list[dict[str, Any]]:
    """Exact steps of DTensors in every placement on every mesh, each way of exchange; the counters of the last step."""
    init_gloo()
    found = []
    for shape in meshes:
        mesh = make_mesh(shape)
        ways = placements_on(mesh)
        chosen = [ways[index % len(ways)] for index in range(len(SHAPES))]
        for exchange in ("a2a", "gather"):
            params = [nn.Parameter(placed(v, mesh, p)) for v, p in zip(values(SHAPES, 1), chosen, strict=True)]
            optimizer = HyperMuon(params, exact=True, exchange=exchange, wave_bytes=2000)
            reference = ReferenceMuon(values(SHAPES, 1))
            for step in range(3):
                gradients = values(SHAPES, 2 + step)
                for param, gradient, placement in zip(params, gradients, chosen, strict=True):
                    param.grad = placed(gradient, mesh, placement)
                optimizer.step()
                reference.step(gradients)
                # Replicas are compared by `assemble` after each step.
                assert_same([full_value(param) for param in params], reference.weights)
            for param, buffer in zip(params, reference.buffers, strict=True):
                momentum = optimizer.state[param]["momentum_buffer"]
                assert isinstance(momentum, DTensor) and momentum.placements == param.placements
                assert torch.equal(full_value(momentum), buffer)
            found.append({**optimizer.counters.as_dict(), "waves": len(optimizer.plan.waves)})
    return found


# ---- several domains -------------------------------------------------------------------------------------------------


def step_experts_and_dense() -> tuple[int, int, list[int]]:
    """Experts over 2 expert-parallel ranks, replicated twice; dense matrices over all 4, in one optimizer."""
    init_gloo()
    dense_mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("shard",))
    expert_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "expert"))
    shapes = [(3, 8, 6), (16, 12), (3, 6, 8), (9, 9)]
    places: list[tuple[DeviceMesh, list[Placement]]] = [
        (expert_mesh, [Replicate(), Shard(0)]),
        (dense_mesh, [Shard(0)]),
        (expert_mesh, [Replicate(), Shard(0)]),
        (dense_mesh, [Shard(0)]),
    ]
    params = [nn.Parameter(placed(v, *place)) for v, place in zip(values(shapes, 1), places, strict=True)]
    splits = [Stack(), None, Stack(), None]
    optimizer = HyperMuon(
        params, exact=True, splits={param: split for param, split in zip(params, splits, strict=True) if split}
    )
    reference = ReferenceMuon(values(shapes, 1), splits=splits)
    for step in range(3):
        gradients = values(shapes, 2 + step)
        for param, gradient, place in zip(params, gradients, places, strict=True):
            param.grad = placed(gradient, *place)
        optimizer.step()
        reference.step(gradients)
    assert_same([full_value(param) for param in params], reference.weights)
    counters = optimizer.counters
    return counters.newton_schulz_calls, counters.collectives, sorted(optimizer.plan.loads.items())


def step_apart_groups() -> int:
    """Ranks 0 and 1 train one matrix, 2 and 3 another: neither pair may wait for the other."""
    init_gloo()
    meshes = [DeviceMesh("cpu", ranks) for ranks in ([0, 1], [2, 3])]
    mine = dist.get_rank() // 2
    [value] = values([(6, 5)], 1 + mine)
    param = nn.Parameter(placed_on_pair(value, meshes[mine]))
    optimizer = HyperMuon([param], exact=True)
    reference = ReferenceMuon([value])
    for step in range(2 + mine):  # not even equally often
        [gradient] = values([(6, 5)], 5 + step)
        param.grad = placed_on_pair(gradient, meshes[mine])
        optimizer.step()
        reference.step([gradient])
    local = local_tensor(param).detach()
    start = 3 * (dist.get_rank() % 2)
    assert torch.equal(local, reference.weights[0][start : start + 3])
    return optimizer.counters.collectives


def placed_on_pair(value: Tensor, mesh: DeviceMesh) -> DTensor:
    start = 3 * mesh.get_local_rank()
    return DTensor.from_local(value[start : start + 3].clone(), mesh, [Shard(0)], run_check=False)


# ---- gradients that ranks lack ---------------------------------------------------------------------------------------


def step_with_missing_gradients() -> list[list[int]]:
    """Rank 1 never has a gradient of parameter 0, rank 2 none of 1 and 2, nobody one of 3; calls and collectives."""
    init_gloo()
    mesh, rank = make_mesh((4,)), dist.get_rank()
    shapes = [(8, 5), (8, 8), (7, 4), (6, 6)]
    lacking = {(0, 1), (1, 2), (2, 2), *((3, each) for each in range(4))}
    params = [nn.Parameter(placed(v, mesh, [Shard(0)])) for v in values(shapes, 1)]
    optimizer = HyperMuon(params, exact=True)
    reference = ReferenceMuon(values(shapes, 1))
    found = []
    for step in range(3):
        gradients: list[Tensor | None] = [*values(shapes, 2 + step)]
        for index, (param, gradient) in enumerate(zip(params, gradients, strict=True)):
            assert gradient is not None
            layout = Layout.from_mesh(gradient.shape, mesh, [Shard(0)])
            for each in range(4):
                if (index, each) in lacking:
                    rows = layout.local_segments((each,), 0)
                    for start, length in rows:
                        gradient[start : start + length] = 0
            param.grad = None if (index, rank) in lacking else placed(gradient, mesh, [Shard(0)])
        gradients[3] = None
        optimizer.step()
        reference.step(gradients)
        found.append([optimizer.counters.newton_schulz_calls, optimizer.counters.collectives])
    for param, expected in zip(params, reference.weights, strict=True):
        torch.testing.assert_close(full_value(param), expected, rtol=2e-2, atol=2e-3)
    for index in (0, 1, 2):
        buffer = full_value(optimizer.state[params[index]]["momentum_buffer"])
        torch.testing.assert_close(buffer, reference.buffers[index], rtol=1e-6, atol=1e-7)
    assert torch.equal(full_value(params[3]), values(shapes, 1)[3])
    return found


# ---- replicas outside any mesh ---------------------------------------------------------------------------------------


def step_replicas(*, momentum_placement: str) -> tuple[int, int, int]:
    """Plain tensors, alike on all ranks, as after DDP."""
    init_gloo()
    params = [nn.Parameter(value) for value in values(SHAPES, 1)]
    optimizer = HyperMuon(params, exact=True, process_group=dist.group.WORLD, momentum_placement=momentum_placement)
    reference = ReferenceMuon(values(SHAPES, 1))
    for step in range(3):
        gradients = values(SHAPES, 2 + step)
        for param, gradient in zip(params, gradients, strict=True):
            param.grad = gradient.clone()
        optimizer.step()
        reference.step(gradients)
        assert_same([param.detach() for param in params], reference.weights)
    kept = sum("momentum_buffer" in optimizer.state[param] for param in params)
    state = optimizer.state_dict()["state"]
    assert_same([state[index]["momentum_buffer"] for index in range(len(params))], reference.buffers)
    return optimizer.counters.newton_schulz_calls, optimizer.counters.collectives, kept


# ---- our fully_shard -------------------------------------------------------------------------------------------------


def train_sharded(*, replicate: int, shard: int, micro_batches: int, steps: int) -> list[float]:
    """A transformer whose whole gradients, as they are before each step, are fed to the reference as well."""
    from hp_plugin import fully_shard

    init_gloo()
    mesh = init_device_mesh("cpu", (replicate, shard), mesh_dim_names=("dp_replicate", "dp_shard"))
    model: Any = make_model("transformer")
    for block in model.units():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = HyperMuon(model, exact=True)
    muon = {p for group in optimizer.param_groups if group["algorithm"] == "muon" for p in group["params"]}
    named = [(name, param) for name, param in model.named_parameters() if param in muon]
    assert len(named) == 3 * 4
    reference = ReferenceMuon([full(param).clone() for _, param in named])
    losses = []
    for step in range(steps):
        total = 0.0
        for index in range(micro_batches):
            inputs, targets = micro_batch(
                "transformer", step=step, index=index, count=micro_batches, share=dist.get_rank(), shares=mesh.size()
            )
            loss = loss_of("transformer", model(inputs), targets) / micro_batches
            loss.backward()
            total += float(loss.detach())
        gradients = [full(param.grad).clone() for _, param in named]
        optimizer.step()
        optimizer.zero_grad()
        reference.step(gradients)
        assert_same([full(param) for _, param in named], reference.weights)
        calls = torch.tensor(optimizer.counters.newton_schulz_calls)
        dist.all_reduce(calls)
        assert int(calls) == len(named)
        mean = torch.tensor(total)
        dist.all_reduce(mean)
        losses.append(float(mean) / mesh.size())
    return losses


# ---- checkpoints -----------------------------------------------------------------------------------------------------


class Holder(nn.Module):
    """A module that owns parameters, as checkpoints need names."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__()
        self.items = nn.ParameterList(params)


ADAMW = 4  # parameters from this index on


def make_job(mesh: DeviceMesh, options: dict[str, Any]) -> tuple[Holder, HyperMuon, list[list[Placement]]]:
    ways = [way for way in placements_on(mesh) if mesh.ndim == 1 or not isinstance(way[-2], _StridedShard)]
    chosen = [ways[index % len(ways)] for index in range(len(SHAPES))]
    params = [nn.Parameter(placed(v, mesh, p)) for v, p in zip(values(SHAPES, 1), chosen, strict=True)]
    groups = [{"params": params[:ADAMW]}, {"params": params[ADAMW:], "algorithm": "adamw"}]
    return Holder(params), HyperMuon(groups, exact=True, **options), chosen


def go_on(holder: Holder, optimizer: HyperMuon, chosen: list[list[Placement]], steps: range) -> None:
    for step in steps:
        for param, gradient, placement in zip(holder.items, values(SHAPES, 2 + step), chosen, strict=True):
            param.grad = placed(gradient, param.device_mesh, placement)
        optimizer.step()
    optimizer.zero_grad()


def whole_state(holder: Holder, optimizer: HyperMuon) -> dict[str, Tensor]:
    state = optimizer.state_dict()["state"]
    found = {}
    for index, param in enumerate(holder.items):
        found[f"{index}.weight"] = full_value(param)
        for key, value in state[index].items():
            found[f"{index}.{key}"] = full_value(value) if isinstance(value, DTensor) else value
    return found


def save_and_go_on(
    *, mesh: tuple[int, ...], directory: str, options: dict[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Trains, saves, trains on; the whole state when saved and in the end."""
    init_gloo()
    holder, optimizer, chosen = make_job(make_mesh(mesh), options)
    go_on(holder, optimizer, chosen, range(2))
    saved = copy.deepcopy(whole_state(holder, optimizer))
    save_checkpoint(directory, holder, optimizers=optimizer)
    go_on(holder, optimizer, chosen, range(2, 4))
    return saved, whole_state(holder, optimizer)


def load_and_go_on(
    *, mesh: tuple[int, ...], directory: str, options: dict[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Loads into a job that had gone elsewhere, trains on; the whole state after loading and in the end."""
    init_gloo()
    holder, optimizer, chosen = make_job(make_mesh(mesh), options)
    go_on(holder, optimizer, chosen, range(7, 8))
    load_checkpoint(directory, holder, optimizers=optimizer)
    loaded = copy.deepcopy(whole_state(holder, optimizer))
    go_on(holder, optimizer, chosen, range(2, 4))
    return loaded, whole_state(holder, optimizer)


# ---- overflow --------------------------------------------------------------------------------------------------------


def overflow_on_one_rank(*, plain: bool) -> list[float]:
    """Infinity in the shard of rank 1 alone: no rank steps, and all scale the next loss alike."""
    init_gloo()
    mesh, rank = make_mesh((2,)), dist.get_rank()
    [value] = values([(6, 5)], 1)
    options: dict[str, Any] = {"process_group": dist.group.WORLD} if plain else {}
    others = nn.Parameter(torch.ones(3) if plain else placed(torch.ones(4), mesh, [Shard(0)]))
    matrix = nn.Parameter(value.clone() if plain else placed(value, mesh, [Shard(0)]))
    optimizer = HyperMuon([{"params": [matrix]}, {"params": [others], "algorithm": "adamw"}], **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    scales = []
    for step in range(3):
        scaler.scale(torch.ones(()))
        before = [local_tensor(p).detach().clone() for p in (matrix, others)]
        momentum = local_tensor(optimizer.state[matrix]["momentum_buffer"]).clone()
        [gradient] = values([(6, 5)], 2 + step)
        gradient *= scaler.get_scale()
        matrix.grad = gradient.clone() if plain else placed(gradient, mesh, [Shard(0)])
        others.grad = torch.ones_like(others) * scaler.get_scale()
        if step == 1 and (rank == 1 or plain):
            local_tensor(matrix.grad)[0, 0] = math.inf
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        changed = not torch.equal(local_tensor(matrix), before[0])
        moved = not torch.equal(local_tensor(optimizer.state[matrix]["momentum_buffer"]), momentum)
        assert changed == moved == (step != 1)
        assert torch.equal(local_tensor(others), before[1]) == (step == 1)
    return scales


# ---- refusals --------------------------------------------------------------------------------------------------------


def refuse_partial() -> None:
    from torch.distributed.tensor import Partial

    init_gloo()
    mesh = make_mesh((2,))
    param = nn.Parameter(DTensor.from_local(torch.ones(4, 4), mesh, [Partial()], run_check=False))
    param.grad = DTensor.from_local(torch.ones(4, 4), mesh, [Partial()], run_check=False)
    _refused(lambda: HyperMuon([param]).step(), "Partial")
    right = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]))
    right.grad = DTensor.from_local(torch.ones(4, 2), mesh, [Shard(1)], run_check=False)
    _refused(lambda: HyperMuon([right]).step(), "placed as")


def disagree() -> None:
    init_gloo()
    mesh = make_mesh((2,))
    param = nn.Parameter(placed(torch.ones(4, 4), mesh, [Shard(0)]))
    param.grad = placed(torch.ones(4, 4), mesh, [Shard(0)])
    steps = 5 + dist.get_rank()
    _refused(lambda: HyperMuon([("layers.7.weight", param)], steps=steps).step(), "layers.7.weight")


def _refused(call: Callable[[], Any], word: str) -> None:
    try:
        call()
    except Exception as error:
        if word not in str(error):
            raise
    else:
        raise AssertionError(f"nothing was refused, but {word!r} should have been")


# ---- trajectories ----------------------------------------------------------------------------------------------------

TRAJECTORY: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1}
ADAMW_OPTIONS: dict[str, Any] = {"lr": 3e-3, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1}
BATCHES = 4  # that come again and again, so that the loss falls


def train_trajectory(*, replicate: int, shard: int, steps: int, options: dict[str, Any]) -> list[float]:
    """The losses of a transformer under our fully_shard and HyperMuon, each step on the mean over all ranks."""
    from hp_plugin import fully_shard

    init_gloo()
    mesh = init_device_mesh("cpu", (replicate, shard), mesh_dim_names=("dp_replicate", "dp_shard"))
    model: Any = make_model("transformer")
    for block in model.units():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    adamw = {f"adam_{name}": value for name, value in ADAMW_OPTIONS.items()}
    optimizer = HyperMuon(model, **TRAJECTORY, **adamw, **options)
    losses = []
    for step in range(steps):
        inputs, targets = micro_batch(
            "transformer", step=step % BATCHES, index=0, count=1, share=dist.get_rank(), shares=mesh.size()
        )
        loss = loss_of("transformer", model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().double()
        dist.all_reduce(mean)
        losses.append(float(mean) / mesh.size())
    return losses


def reference_trajectory(*, steps: int, nesterov: bool = True) -> list[float]:
    """The same in one process with the reference and torch.optim.AdamW."""
    model = make_model("transformer")
    blocks = [param for name, param in model.named_parameters() if param.ndim == 2 and name.startswith("blocks.")]
    others = [param for param in model.parameters() if all(param is not each for each in blocks)]
    muon = ReferenceMuon([param.detach() for param in blocks], nesterov=nesterov, **TRAJECTORY)
    adamw = torch.optim.AdamW(others, **ADAMW_OPTIONS)
    losses = []
    for step in range(steps):
        inputs, targets = micro_batch("transformer", step=step % BATCHES, index=0, count=1)
        loss = loss_of("transformer", model(inputs), targets)
        loss.backward()
        muon.step([param.grad for param in blocks])
        adamw.step()
        model.zero_grad()
        losses.append(float(loss.detach()))
    return losses


# ---- faults of others ------------------------------------------------------------------------------------------------


def norm_of_experts_and_dense() -> tuple[float, float]:
    """The norm over experts on an expert-parallel x tensor-parallel mesh and a dense matrix, and the right one."""
    from hp_plugin import clip_grad_norm_

    init_gloo()
    experts_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("expert", "tensor"))
    dense_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "tensor"))
    shapes = [(4, 6, 6), (8, 6)]
    places: list[tuple[DeviceMesh, list[Placement]]] = [
        (experts_mesh, [Shard(0), Shard(1)]),
        (dense_mesh, [Replicate(), Shard(0)]),
    ]
    params = []
    for value, place in zip(values(shapes, 1), places, strict=True):
        param = nn.Parameter(placed(value, *place))
        param.grad = placed(value, *place)
        params.append(param)
    expected = sum(float((value.double() ** 2).sum()) for value in values(shapes, 1)) ** 0.5
    return float(clip_grad_norm_(params, 1e9)), expected


def small_update_of_mixed_precision() -> list[float]:
    """A step far below the resolution of bfloat16, on weights that are computed with in bfloat16."""
    from hp_plugin import MixedPrecisionPolicy, fully_shard

    init_gloo()
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    layer = nn.Linear(8, 8, bias=False)
    nn.init.constant_(layer.weight, 1.0)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, master_dtype=torch.float32)
    fully_shard(layer, mesh=mesh, mp_policy=policy)
    optimizer = HyperMuon(layer.parameters(), lr=1e-5, weight_decay=0.0)
    moved = []
    for _ in range(2):
        layer(torch.eye(8)).float().square().mean().backward()
        before = local_tensor(layer.weight).detach().clone()
        optimizer.step()
        optimizer.zero_grad()
        moved.append(float((local_tensor(layer.weight).detach() - before).abs().max()))
    return moved
