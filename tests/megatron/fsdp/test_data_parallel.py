"""The wrapper that Megatron's loop sees: its interface, its units, and its gradients against Megatron's own DDP."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.megatron import wrapped
from tests.support import RanksFailedError, run_ranks

pytest.importorskip("megatron.core")

from hp_plugin.errors import ConfigurationError
from hp_plugin.megatron.fsdp.data_parallel import compute_dtype, unit_modules


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)


class Model(nn.Module):
    def __init__(self, *, tied: bool, first: bool = True, last: bool = True) -> None:
        super().__init__()
        self.share_embeddings_and_output_weights = tied
        if first:
            self.embedding = nn.Embedding(4, 2)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.output_layer = nn.Linear(2, 4) if last else nn.Identity()


def units(model: nn.Module) -> list[nn.Module]:
    return unit_modules(model, lambda module: isinstance(module, Layer))


def test_untied_ends_are_units_of_their_own_in_forward_order():
    model = Model(tied=False)
    assert units(model) == [model.embedding, *model.layers, model.output_layer]


def test_tied_weights_stay_in_the_root():
    model = Model(tied=True)
    assert units(model) == list(model.layers)


def test_a_stage_without_ends_has_layers_only():
    model = Model(tied=False, first=False, last=False)
    assert units(model) == list(model.layers)


def test_a_layer_inside_a_layer_belongs_to_the_outer_unit():
    model = Model(tied=True)
    model.layers[0].inner = Layer()
    assert units(model) == list(model.layers)


def test_the_compute_dtype_is_that_of_the_model_and_mixtures_are_refused():
    half, full = torch.zeros(1, dtype=torch.bfloat16), torch.zeros(1)
    assert compute_dtype([("a", half), ("b", half)], torch.float32) == torch.bfloat16
    assert compute_dtype([], torch.float32) == torch.float32
    with pytest.raises(ConfigurationError, match=r"a is torch\.bfloat16, b is torch\.float32"):
        compute_dtype([("a", half), ("b", full)], torch.float32)


def test_importing_the_seam_does_not_import_megatron():
    import subprocess
    import sys

    rooms = ("fsdp.data_parallel", "fsdp.optimizer", "checkpoints.save")
    modules = ", ".join(f"hp_plugin.megatron.{room}" for room in rooms)
    code = f"import {modules}, sys; print('megatron.core' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


def run(ranks: int, function: Any, **kwargs: Any) -> list[Any]:
    return run_ranks(ranks, function, flavour="megatron", timeout=60.0, **kwargs)


MESHES = [
    pytest.param(1, 1, id="1x1"),
    pytest.param(2, 2, id="1x2"),
    pytest.param(2, 1, id="2x1"),
    pytest.param(4, 2, id="2x2", marks=pytest.mark.full),
    pytest.param(4, 4, id="1x4", marks=pytest.mark.full),
]


@pytest.mark.parametrize(("ranks", "supernode_size"), MESHES)
@pytest.mark.parametrize("per_token", [False, True], ids=["mean", "sum"])
def test_gradients_of_three_micro_batches_equal_those_of_megatrons_ddp(ranks, supernode_size, per_token):
    for found in run(ranks, wrapped.gradients, supernode_size=supernode_size, per_token=per_token):
        assert found.keys() and all(difference < 2e-6 for difference in found.values()), found


def test_a_wrong_divisor_would_be_seen():
    """The negative control of the test above: gradients that are doubled differ."""
    for found in run(2, wrapped.gradients, supernode_size=2, per_token=False, wrong_factor=2.0):
        assert all(difference > 0.1 for difference in found.values())


@pytest.mark.full
def test_options_of_the_engine_reach_it_and_change_no_gradient():
    options = {"bucket_bytes": 1000, "window": 1, "prefetch": 0, "reshard_after_forward": 2}
    for found, arrived in run(4, wrapped.tuned, supernode_size=4, **options):
        assert arrived == [1000, 1, 0, False, 2, 2], "the root stays gathered, the two layers go to groups of two"
        assert found.keys() and all(difference < 2e-6 for difference in found.values()), found


def test_the_interface_that_megatron_uses_is_there():
    for facts in run(2, wrapped.interface, supernode_size=1):
        assert facts == dict.fromkeys(facts, True), facts


def test_random_initialisation_is_made_equal_to_that_of_data_parallel_rank_0():
    for equal in run(2, wrapped.random_init, supernode_size=1) + run(2, wrapped.random_init, supernode_size=2):
        assert equal


def test_broadcast_params_makes_replicas_equal_to_the_first():
    assert run(2, wrapped.diverged_replicas, supernode_size=1) == [True, True]


def test_a_parameter_without_gradient_gets_zeros_like_megatrons_buffers():
    assert run(2, wrapped.unused_parameter, supernode_size=2) == [True, True]


def test_a_nan_ends_the_step_on_some_rank():
    with pytest.raises(RanksFailedError, match="NaN in the norm of this rank's gradient shards"):
        run(2, wrapped.nan_gradient, supernode_size=2)


def test_chunks_of_an_interleaved_pipeline_share_one_mesh_and_list_their_no_sync():
    from hp_plugin.megatron.fsdp.wrapper import HyperFSDP, _first_chunk

    config = SimpleNamespace(no_sync_func=None)
    assert _first_chunk(config, SimpleNamespace(vp_stage=0)) is None
    chunk = HyperFSDP.__new__(HyperFSDP)
    config.no_sync_func = [chunk.no_sync]
    assert _first_chunk(config, SimpleNamespace(vp_stage=1)) is chunk
    assert _first_chunk(config, SimpleNamespace(vp_stage=0)) is None
    assert _first_chunk(config, SimpleNamespace(vp_stage=None)) is None
