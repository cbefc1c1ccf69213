"""What `fully_shard` refuses, by name and with the way out, on a mesh of one rank."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy as TorchCPUOffloadPolicy
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchMixedPrecisionPolicy
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from hp_plugin import (
    ConfigurationError,
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    UnsupportedError,
    fully_shard,
)
from hp_plugin.core.fsdp.options import RootOptions
from hp_plugin.core.fsdp.root import unit_of


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp_replicate", "dp_shard"))
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("transport", "symm_mem"),
        ("mode", "validation"),
        ("optimizer_sharding", "shard_replicate"),
        ("offload_policy", CPUOffloadPolicy()),
        ("offload_policy", TorchCPUOffloadPolicy()),
    ],
)
def test_an_option_that_is_not_built_is_refused_by_name(mesh: DeviceMesh, option: str, value: Any) -> None:
    model = nn.Linear(2, 2)
    weight = model.weight
    with pytest.raises(UnsupportedError, match=f"{option}.*use|{option}.*instead"):
        fully_shard(model, mesh=mesh, **{option: value})
    assert model.weight is weight, "a refused call must leave the module as it was"


@pytest.mark.parametrize(
    ("option", "value"),
    [("bucket_bytes", 0), ("bucket_bytes", 1.5), ("window", 0), ("window", True), ("prefetch", -1)],
)
def test_a_number_out_of_range_is_refused(mesh: DeviceMesh, option: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"{option}={value}: expected an integer of at least"):
        fully_shard(nn.Linear(2, 2), mesh=mesh, **{option: value})


def test_a_number_of_ranks_that_does_not_divide_the_shard_group_is_refused(mesh: DeviceMesh) -> None:
    for number in (0, 2, -1):
        with pytest.raises(ConfigurationError, match=f"reshard_after_forward={number}: expected .* divides the 1 "):
            fully_shard(nn.Linear(2, 2), mesh=mesh, reshard_after_forward=number)
    model = fully_shard(nn.Linear(2, 2), mesh=mesh)
    with pytest.raises(ConfigurationError, match="reshard_after_forward=2"):
        model.set_reshard_after_forward(2)  # type: ignore[operator]


def test_options_of_the_whole_root_must_agree_where_they_are_given(mesh: DeviceMesh) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    fully_shard(model[0], mesh=mesh, window=3)
    fully_shard(model[1], mesh=mesh, prefetch=0)
    fully_shard(model, mesh=mesh, window=3, bucket_bytes=1)
    model(torch.ones(1, 2))
    unit = unit_of(model)
    assert unit is not None
    assert unit.root.options == RootOptions(bucket_bytes=1, window=3, prefetch=0)

    other = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    fully_shard(other[0], mesh=mesh, window=3)
    fully_shard(other, mesh=mesh, window=4)
    with pytest.raises(ConfigurationError, match=r"root \(FSDPSequential\) has window=4 and unit 0 has window=3"):
        other(torch.ones(1, 2))


def test_the_dtype_of_the_slow_link_must_be_floating() -> None:
    assert MixedPrecisionPolicy(inter_reduce_dtype=torch.bfloat16).inter_reduce_dtype == torch.bfloat16
    with pytest.raises(ConfigurationError, match=r"inter_reduce_dtype=torch\.int32 is not a floating dtype"):
        MixedPrecisionPolicy(inter_reduce_dtype=torch.int32)


@pytest.mark.parametrize("option", ["transport", "mode", "optimizer_sharding"])
def test_an_unknown_choice_lists_the_known_ones(mesh: DeviceMesh, option: str) -> None:
    with pytest.raises(ConfigurationError, match=f'{option}="nccl" is unknown; expected one of'):
        fully_shard(nn.Linear(2, 2), mesh=mesh, **{option: "nccl"})


def test_modules_that_cannot_be_units_are_refused(mesh: DeviceMesh) -> None:
    with pytest.raises(ConfigurationError, match="ModuleList, which has no forward"):
        fully_shard(nn.ModuleList([nn.Linear(2, 2)]), mesh=mesh)
    with pytest.raises(ConfigurationError, match="empty list"):
        fully_shard([], mesh=mesh)
    model = fully_shard(nn.Linear(2, 2), mesh=mesh)
    with pytest.raises(ConfigurationError, match="called on this FSDPLinear before"):
        fully_shard(model, mesh=mesh)


def test_parameters_that_cannot_be_sharded_are_refused_by_name(mesh: DeviceMesh) -> None:
    class Holder(nn.Module):
        def __init__(self, parameter: torch.Tensor) -> None:
            super().__init__()
            self.special = nn.Parameter(parameter, requires_grad=parameter.is_floating_point())

    with pytest.raises(UnsupportedError, match="special has shape"):
        fully_shard(Holder(torch.tensor(1.0)), mesh=mesh)
    with pytest.raises(UnsupportedError, match=r"special has shape \(0, 3\)"):
        fully_shard(Holder(torch.empty(0, 3)), mesh=mesh)
    with pytest.raises(UnsupportedError, match=r"special has dtype torch\.int64"):
        fully_shard(Holder(torch.ones(3, dtype=torch.int64)), mesh=mesh)
    tensor = distribute_tensor(torch.ones(4, 4), mesh, [Replicate(), Shard(0)])
    with pytest.raises(UnsupportedError, match="special is a DTensor"):
        fully_shard(Holder(tensor), mesh=mesh)


def test_a_parameter_tied_across_units_is_refused_with_both_names(mesh: DeviceMesh) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    fully_shard(model[0], mesh=mesh)
    with pytest.raises(UnsupportedError, match=r"1\.weight is tied to weight.*one unit"):
        fully_shard(model, mesh=mesh)


def test_a_bad_shard_dim_is_refused(mesh: DeviceMesh) -> None:
    with pytest.raises(ConfigurationError, match="has 1 dims"):
        fully_shard(nn.Linear(2, 2), mesh=mesh, shard_placement_fn=lambda p: Shard(1))
    with pytest.raises(ConfigurationError, match=r"expected Shard\(dim\) or None"):
        fully_shard(nn.Linear(2, 2), mesh=mesh, shard_placement_fn=lambda p: Replicate())  # type: ignore[arg-type, return-value]


def test_a_mesh_of_three_axes_is_refused(mesh: DeviceMesh) -> None:
    cube = init_device_mesh("cpu", (1, 1, 1), mesh_dim_names=("pp", "dp_replicate", "dp_shard"))
    with pytest.raises(ConfigurationError, match="3-D mesh"):
        fully_shard(nn.Linear(2, 2), mesh=cube)


def test_torch_policies_are_accepted_and_others_are_not() -> None:
    adopted = MixedPrecisionPolicy.adopt(
        TorchMixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False)
    )
    assert adopted == MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False)
    with pytest.raises(TypeError, match="mp_policy is a str"):
        MixedPrecisionPolicy.adopt("bf16")  # type: ignore[arg-type]


def test_the_module_keeps_its_identity_names_and_class(mesh: DeviceMesh) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    names = [name for name, _ in model.named_parameters()]
    model[0].weight.special = "kept"  # type: ignore[assignment]
    sharded = fully_shard(model, mesh=mesh)
    assert sharded is model
    assert isinstance(model, nn.Sequential)
    assert isinstance(model, FSDPModule)
    assert [name for name, _ in model.named_parameters()] == names
    assert model[0].weight.special == "kept"
    model.unshard()
    assert model[0].weight.special == "kept"
    model.reshard()
    assert type(model[:1]) is nn.Sequential, "a slice of a sharded container is a plain container"
    with pytest.raises(UnsupportedError, match="cannot be deep-copied"):
        copy.deepcopy(model)
