"""What the table promises for gloo is true on real gloo groups; other backends are read from their names."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from hp_plugin.core.devices import Capabilities, backend_capabilities
from hp_plugin.core.devices import capabilities as module
from hp_plugin.errors import ConfigurationError
from tests.support import init_gloo, run_ranks


def check_coalesced_calls(*, debug: bool = False) -> Capabilities:
    """All-gather and reduce-scatter of several tensors in one call each, one of them empty, one in place."""
    if debug:
        dist.set_debug_level(dist.DebugLevel.DETAIL)  # what TORCH_DISTRIBUTED_DEBUG=DETAIL does at import
    init_gloo()
    group, rank, world = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    found = backend_capabilities(group)
    assert found == backend_capabilities() == backend_capabilities(group, device_type="cpu")
    if found.coalesced_all_gather:
        full = torch.zeros(3 * world)
        mine = full[rank * 3 : rank * 3 + 3].fill_(rank + 1)
        outputs = [full, torch.zeros(0), torch.zeros(2 * world)]
        inputs = [mine, torch.zeros(0), torch.full((2,), float(rank))]
        group.allgather_into_tensor_coalesced(outputs, inputs).wait()
        assert outputs[0].tolist() == [float(r + 1) for r in range(world) for _ in range(3)]
        assert outputs[2].tolist() == [float(r) for r in range(world) for _ in range(2)]
    if found.coalesced_reduce_scatter:
        options = dist.ReduceScatterOptions()
        options.reduceOp = dist.ReduceOp.SUM
        outputs = [torch.zeros(2), torch.zeros(1, dtype=torch.float64)]
        inputs = [torch.arange(2.0 * world) + rank, torch.full((world,), float(rank), dtype=torch.float64)]
        group.reduce_scatter_tensor_coalesced(outputs, inputs, options).wait()
        ranks = sum(range(world))
        assert outputs[0].tolist() == [world * (2.0 * rank + i) + ranks for i in range(2)]
        assert outputs[1].item() == ranks
    return found


def test_gloo_coalesces_on_a_plain_group() -> None:
    for found in run_ranks(2, check_coalesced_calls):
        assert found.backend == "gloo"
        assert found.coalesced_all_gather
        assert found.coalesced_reduce_scatter
        assert found.waits_on_host
        assert not found.can_premultiply


def test_what_is_promised_under_the_debug_wrapper_works() -> None:
    for found in run_ranks(2, check_coalesced_calls, debug=True):
        assert found.coalesced_all_gather == (module._torch_version() >= (2, 13))


def check_average() -> bool:
    init_gloo()
    rank, world = dist.get_rank(), dist.get_world_size()
    found = backend_capabilities()
    if found.can_average:
        value, part = torch.tensor([float(rank)]), torch.zeros(1)
        dist.all_reduce(value, op=dist.ReduceOp.AVG)
        assert value.item() == (world - 1) / 2
        dist.group.WORLD._reduce_scatter_base(part, torch.full((world,), float(rank)), average_options()).wait()
        assert part.item() == (world - 1) / 2
    return found.can_average


def average_options() -> dist.ReduceScatterOptions:
    options = dist.ReduceScatterOptions()
    options.reduceOp = dist.ReduceOp.AVG
    return options


def test_gloo_averages_only_where_it_divides() -> None:
    assert run_ranks(2, check_average) == [module._torch_version() >= (2, 13)] * 2


def with_backends(monkeypatch: pytest.MonkeyPatch, config: str) -> Callable[..., Capabilities]:
    monkeypatch.setattr(module.dist, "get_backend_config", lambda group: config)
    monkeypatch.setattr(module, "_is_wrapped", lambda group, kind: False)
    return backend_capabilities


def test_nccl_and_hccl_are_read_from_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    nccl = with_backends(monkeypatch, "cuda:nccl")()
    assert nccl.can_average
    assert nccl.can_premultiply
    assert nccl.coalesced_all_gather
    assert not nccl.waits_on_host
    hccl = with_backends(monkeypatch, "npu:hccl")()
    assert hccl.reduce_ops == {"sum", "product", "min", "max"}
    assert not hccl.coalesced_all_gather
    assert not hccl.coalesced_reduce_scatter
    assert nccl.all_to_all
    assert hccl.all_to_all


def test_coalesced_calls_of_hccl_are_for_those_who_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    ask = with_backends(monkeypatch, "npu:hccl")
    monkeypatch.setenv(module.HCCL_COALESCED_VARIABLE, "1")
    assert ask().coalesced_all_gather == ask().coalesced_reduce_scatter == (module._torch_version() >= (2, 13))
    monkeypatch.setattr(module, "_torch_version", lambda: (2, 7))
    assert not ask().coalesced_all_gather


def test_a_group_with_two_backends_promises_what_both_can(monkeypatch: pytest.MonkeyPatch) -> None:
    ask = with_backends(monkeypatch, "cpu:gloo,cuda:nccl")
    both = ask()
    assert both.backend == "gloo+nccl"
    assert not both.can_premultiply
    assert both.waits_on_host
    assert ask(device_type="cuda").can_premultiply


def test_a_device_type_without_a_backend_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match=r"backends for \['cuda'\], but none for 'cpu'"):
        with_backends(monkeypatch, "cuda:nccl")(device_type="cpu")


def test_an_unknown_backend_promises_elementary_reductions_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert with_backends(monkeypatch, "cpu:mybackend")() == Capabilities("mybackend")
