"""State dicts of torch's forms: keyed by index or name, nested or flattened; placements of the target."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from hp_plugin.core.muon.state_dicts import named_keys, nested, placed
from hp_plugin.errors import ConfigurationError, UnsupportedError


def adamw(model: nn.Module, *, named: bool) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.named_parameters() if named else model.parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("form", ["index", "param_names", "given", "name", "flattened"])
def test_states_are_found_by_name_in_every_form(form: str) -> None:
    model = nn.Linear(3, 2)
    optimizer = adamw(model, named=form == "param_names")
    state_dict: dict[str, Any] = optimizer.state_dict()
    if form in ("name", "flattened"):
        options = StateDictOptions(flatten_optimizer_state_dict=form == "flattened")
        state_dict = get_optimizer_state_dict(model, optimizer, options=options)
    if form == "index":
        with pytest.raises(ConfigurationError, match=r"keyed by index and has no names; give names=\[...\]"):
            named_keys(state_dict, None)
        return
    whole = nested(state_dict)
    keys = named_keys(whole, ["weight", "bias"] if form == "given" else None)
    found = {name: whole["state"][key]["exp_avg"] for key, (name, _) in keys.items()}
    for name, parameter in model.named_parameters():
        assert torch.equal(found[name], optimizer.state[parameter]["exp_avg"])
    assert all(group["lr"] == 0.1 for _, group in keys.values())


def test_as_many_names_as_parameters_are_needed() -> None:
    with pytest.raises(ConfigurationError, match="1 names are given for a state dict of 2 parameters"):
        named_keys(adamw(nn.Linear(3, 2), named=False).state_dict(), ["weight"])


@pytest.mark.parametrize("placements", [(Shard(0),), (Shard(1),), (Replicate(),)])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_whole_tensor_is_cut_to_the_placement_of_the_target(rank: int, placements: Any) -> None:
    """Without communication: the process group here cannot carry any."""
    whole = torch.arange(20.0).view(5, 4)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=3)
    try:
        mesh = init_device_mesh("cpu", (3,))
        dim = None if isinstance(placements[0], Replicate) else placements[0].dim
        part = whole if dim is None else whole.chunk(3, dim)[rank] if rank < len(whole.chunk(3, dim)) else whole[:, :0]
        own = DTensor.from_local(
            torch.zeros_like(part), mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
        )
        result = placed("w", "momentum_buffer", whole, own)
        assert isinstance(result, DTensor) and result.placements == placements and result.shape == whole.shape
        assert torch.equal(result._local_tensor, part)
        assert placed("w", "momentum_buffer", result, own) is result
        with pytest.raises(ConfigurationError, match="Load the source with torch.distributed.checkpoint"):
            placed("w", "momentum_buffer", result, whole)
    finally:
        dist.destroy_process_group()


def test_a_flat_buffer_is_not_taken_for_a_matrix() -> None:
    with pytest.raises(UnsupportedError, match="flat buffer"):
        placed("w", "momentum_buffer", torch.zeros(20), torch.zeros(5, 4))
