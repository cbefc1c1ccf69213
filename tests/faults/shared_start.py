"""Rank functions of the tests of what is refused when memory is about to be shared, and of runs that differ by rank."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from hp_plugin import HyperAdamW, MixedPrecisionPolicy, fully_shard
from hp_plugin.core.fsdp.connect import TRANSPORT_VARIABLE
from hp_plugin.core.fsdp.root import unit_of
from hp_plugin.core.transport.shm import memory
from tests.faults.cases import FAILING_RANK, _loss, _sharded
from tests.faults.shared import _losses
from tests.faults.watched import End, segments_of, watch
from tests.support import init_gloo
from tests.support.told import told


def is_odd() -> bool:
    """Whether this is the rank that differs."""
    return dist.get_rank() == FAILING_RANK


# ---- other units --------------------------------------------------------------------------------------------------


class Layers(nn.Module):
    """Linear layers under names of their own: (batch, widths[0]) -> (batch, widths[-1])."""

    def __init__(self, *widths: int, names: str = "abcdef") -> None:
        super().__init__()
        self.layers = nn.ModuleDict(
            {name: nn.Linear(a, b) for name, a, b in zip(names, widths[:-1], widths[1:], strict=False)}
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


def _units(model: Layers, *units: str, **options: Any) -> nn.Module:
    """Makes units of the layers named in `units`, those of one string together, and of the rest with the root."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    for names in units:
        fully_shard([model.layers[name] for name in names], mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def _same(**options: Any) -> nn.Module:
    return _units(Layers(8, 6, 6, 4), "a", "b", "c", **options)


OTHERS: dict[str, Callable[[], nn.Module]] = {
    "name": lambda: _units(Layers(8, 6, 6, 4, names="axc"), "a", "x", "c"),
    "shape": lambda: _units(Layers(8, 6, 7, 4), "a", "b", "c"),
    "dtype": lambda: _same(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)),
    "reduce dtype": lambda: _same(mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)),
    "one more": lambda: _units(Layers(8, 6, 6, 4, 4), "a", "b", "c", "d"),
    "one less": lambda: _units(Layers(8, 6, 4), "a", "b"),
    "not sharded": lambda: _units(Layers(8, 6, 6, 4), "b", "c"),
    "two in one": lambda: _units(Layers(8, 6, 6, 4), "ab", "c"),
    "order of calls": lambda: _units(Layers(8, 6, 6, 4), "c", "b", "a"),
}


def run_with_other_units() -> dict[str, str]:
    """What a rank is told whose peer has other units, by how they differ; "runs" where it is told nothing."""
    init_gloo()
    found = {}
    for kind, make_other in OTHERS.items():
        model = make_other() if is_odd() else _same()
        found[kind] = told(lambda model=model: model(torch.ones(2, 8)))  # type: ignore[misc]
        del model
    return found


# ---- memory that does not suffice ---------------------------------------------------------------------------------


WIDTH = 1024
SEGMENT_BYTES = 4 * 3 * WIDTH * WIDTH
"""Full parameters alone; gradients come on top."""


def _large() -> nn.Module:
    return _units(Layers(WIDTH, WIDTH, WIDTH, WIDTH), "a", "b", "c")


@contextlib.contextmanager
def _limit(which: int, value: int) -> Iterator[None]:
    before = resource.getrlimit(which)
    resource.setrlimit(which, (value, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(which, before)


def _address_space() -> contextlib.AbstractContextManager[Any]:
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    return _limit(resource.RLIMIT_AS, used + SEGMENT_BYTES // 2)


SHORTAGES: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "host": lambda: mock.patch.object(memory, "_host_bytes", return_value=1 << 20),
    "control group": lambda: mock.patch.object(memory, "_group_bytes", return_value=2 << 20),
    "file size": lambda: _limit(resource.RLIMIT_FSIZE, 3 << 20),
    "address space": _address_space,
}


def start_with_shortages(*, odd: int) -> dict[str, Any]:
    """What is said where memory or a limit does not suffice on rank `odd`, and whether it works thereafter."""
    init_gloo()
    model = _large()
    x = torch.ones(1, WIDTH)
    found: dict[str, Any] = {}
    for kind, short_of in SHORTAGES.items():
        with short_of() if dist.get_rank() == odd else contextlib.nullcontext():
            found[kind] = told(lambda: model(x))
        found[f"left by {kind}"] = segments_of(os.getpid())
    again: Any = _large()
    for each in (again, model):
        each(x).sum().backward()
    unit = unit_of(again.layers["a"])
    assert unit is not None
    found["afterwards"] = [unit.describe()["transport"], len(set(segments_of(os.getpid())))]
    return found


def run_with_other_transport() -> str:
    """One rank was told to use collectives, the other to share memory."""
    init_gloo(timeout_s=5.0)
    os.environ[TRANSPORT_VARIABLE] = "c10d" if is_odd() else "shm"
    model = _same()
    return told(lambda: model(torch.ones(2, 8)))


def start_without_descriptors() -> str:
    """One rank may open no file at all."""
    init_gloo(timeout_s=5.0)
    _same()(torch.ones(2, 8))  # loads what is loaded late
    model = _same()
    free = os.open("/dev/null", os.O_RDONLY)
    os.close(free)
    with _limit(resource.RLIMIT_NOFILE, free) if is_odd() else contextlib.nullcontext():
        return told(lambda: model(torch.ones(2, 8)))


# ---- runs that differ by rank -------------------------------------------------------------------------------------


class Branches(nn.Module):
    """Two units whose order, or use, follows from what the caller says: (batch, 4) -> (batch, 4)."""

    def __init__(self, *, widths: tuple[int, int]) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Linear(4, widths[0]), nn.Linear(widths[0], 4))
        self.b = nn.Sequential(nn.Linear(4, widths[1]), nn.Linear(widths[1], 4))

    def forward(self, x: Tensor, order: str) -> Tensor:
        x = x + 0.0 * x.detach().requires_grad_()  # so that units have inputs with a gradient
        parts = []
        for name in order:
            parts.append(getattr(self, name)(x))
        return torch.stack(parts).sum(0)


def run_in_other_order(
    *, orders: tuple[str, str], widths: tuple[int, int], timeout_s: float, directory: str
) -> tuple[End, bool]:
    """Trains two steps; in the second, ranks run units in the order of `orders`, rank 0 in the first, 1 in the second.

    Returns:
        How it ended, and whether gradients that came out of the second step are wrong.
    """

    def work() -> bool:
        init_gloo(timeout_s=timeout_s)
        torch.manual_seed(3)
        model: Any = Branches(widths=widths)
        fully_shard(model.a)
        fully_shard(model.b)
        fully_shard(model)
        for order in ("ab", orders[dist.get_rank()]):
            model.zero_grad()
            model(torch.ones(2, 4), order).sum().backward()
        # The gradient of the sum is that of either rank, and equal on both.
        wanted = _gradients(widths, orders[0])
        return any(
            not torch.allclose(p.grad.full_tensor(), wanted[name])
            for name, p in model.named_parameters()
            if p.grad is not None and name in wanted
        )

    end = watch(work, directory=directory, ranks=2)
    return end, bool(end.value)


def _gradients(widths: tuple[int, int], order: str) -> dict[str, Tensor]:
    torch.manual_seed(3)
    model = Branches(widths=widths)
    model(torch.ones(2, 4), order).sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def freeze_on_one_rank(*, timeout_s: float, directory: str) -> End:
    """One rank freezes a bias: both write entries of that unit, of different sizes."""

    def work() -> None:
        init_gloo(timeout_s=timeout_s)
        model: Any = _same()
        if is_odd():
            model.layers["b"].bias.requires_grad_(False)
        model(torch.ones(2, 8)).sum().backward()

    return watch(work, directory=directory, ranks=2)


# ---- neighbours ---------------------------------------------------------------------------------------------------


def two_jobs_at_once(*, steps: int) -> list[float]:
    """Ranks 0 and 1 are one job, 2 and 3 another: each its own world of two, with modules of the same names."""
    rank = int(os.environ["RANK"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    job = dist.PrefixStore(f"job{rank // 2}", store)
    dist.init_process_group("gloo", store=job, rank=rank % 2, world_size=2)
    return _losses(_sharded(1, 2), steps)


def two_roots(*, steps: int) -> dict[str, Any]:
    """Two models of the same names take turns; then one goes, and the other trains on."""
    init_gloo()
    first, second = _sharded(1, 2), _sharded(1, 2)
    optimizers = [HyperAdamW(model.parameters(), lr=0.01) for model in (first, second)]
    losses: list[list[float]] = [[], []]
    for step in range(steps):
        for index, model in enumerate((first, second)):
            loss = _loss(model, step + index)
            loss.backward()
            losses[index].append(loss.item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    both = len(set(segments_of(os.getpid())))
    descriptors = len(os.listdir("/proc/self/fd"))
    del first, model, optimizer, loss
    optimizers.pop(0)
    gc.collect()
    closed = descriptors - len(os.listdir("/proc/self/fd"))
    one = len(set(segments_of(os.getpid())))
    _loss(second, steps + 1).backward()
    return {"losses": losses, "both": both, "one": one, "closed": closed}


def one_root(*, steps: int, first: int) -> list[float]:
    """What one of `two_roots` gives alone."""
    init_gloo()
    model = _sharded(1, 2)
    optimizer = HyperAdamW(model.parameters(), lr=0.01)
    found = []
    for step in range(steps):
        loss = _loss(model, step + first)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found
