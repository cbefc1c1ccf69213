"""Faults of Megatron's Muon that its users have reported, each as a test of `--use-hypermuon`.

References are to NVIDIA/Megatron-LM.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from hp_plugin.core.muon.splits import Split, blocks_of
from hp_plugin.errors import UnsupportedError
from hp_plugin.megatron.arguments import muon_validation
from tests.megatron.checkpoints.jobs import SavedJobs, assert_continues
from tests.megatron.muon.test_routing import SelfAttention, assigned, model
from tests.megatron.muon.test_training import MODERN, on_ddp, on_shards


def matrices(shape: tuple[int, int], split: Split | None) -> dict[str, tuple[int, ...]]:
    """Name and shape of each matrix that is orthogonalized by itself, in a weight of `shape`."""
    return {block.name: block.shape for block in blocks_of("weight", shape, split)[1]}


def fused(layer: nn.Module, tp_size: int = 1, **options: Any) -> dict[str, tuple[int, ...]]:
    """The same of the one weight of `layer`, as Megatron's module structure and the options decide."""
    ((name, found),) = [(name, each) for name, each in assigned(layer, tp_size, **options).items() if "." in name]
    return matrices(tuple(layer.get_parameter(name).shape), found.fusion.split)


def attention(rows: int, columns: int, **config: Any) -> nn.Module:
    layer = SelfAttention(SimpleNamespace(**config), linear_qkv=nn.Linear(columns, rows, bias=False))
    return nn.ModuleDict({"attention": layer})


def test_queries_of_gated_attention_have_their_gate_beside_them() -> None:
    """Issue 4731, PR 4728: with an output gate `linear_qkv` has 4608 rows in a group; viewing it as 2048 + 256 + 256
    of them failed.
    """
    gated = attention(4608, 16, num_attention_heads=8, num_query_groups=1, kv_channels=256, attention_output_gate=True)
    found = fused(gated)
    assert sorted(shape[0] for shape in found.values()) == [256, 256, 2048, 2048]


def test_latent_attention_is_orthogonalized_by_its_parts() -> None:
    """Issue 4091, PR 6326: projections of multi-head latent attention, which are not called `linear_qkv`, were taken
    for one matrix each.
    """
    config = SimpleNamespace(
        num_attention_heads=4, num_query_groups=4, kv_lora_rank=16, qk_head_dim=8, qk_pos_emb_head_dim=4, v_head_dim=8
    )
    layer = nn.ModuleDict({"a": SelfAttention(config, linear_kv_up_proj=nn.Linear(16, 64, bias=False))})
    assert sorted(fused(layer).values()) == [(32, 16), (32, 16)]
    down = nn.ModuleDict({"a": SelfAttention(config, linear_kv_down_proj=nn.Linear(32, 20, bias=False))})
    assert sorted(fused(down).values()) == [(4, 32), (16, 32)]


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_gate_and_up_are_two_matrices_on_any_number_of_tensor_parallel_ranks(tp_size: int) -> None:
    """PR 6688 (and PR 7078): `linear_fc1` of a gated MLP was orthogonalized as one matrix of gate over up. Each rank
    holds a part of both, so the pieces do not follow one another in the whole weight.
    """
    stage = model()
    found = assigned(stage, tp_size)["layers.mlp.linear_fc1.weight"]
    assert found.fusion.pieces == 2
    assert matrices((128, 32), found.fusion.split) == {"gate": (64, 32), "up": (64, 32)}


def test_query_groups_may_be_fewer_than_tensor_parallel_ranks() -> None:
    """Issues 4731 and 4091, in the discussion: with more ranks than query groups the local rows of `linear_qkv` are not
    whole groups. Matrices are those of the whole weight; `shards-more-tp-ranks-than-query-groups` trains with them.
    """
    few = attention(48, 16, num_attention_heads=4, num_query_groups=1, kv_channels=8)
    assert fused(few, tp_size=4) == {"q": (32, 16), "k": (8, 16), "v": (8, 16)}


def test_the_distributed_optimizer_is_refused_with_what_to_use_instead() -> None:
    """Issue 2164: `dist_muon` with --use-distributed-optimizer was rejected by a message about something else."""
    args = SimpleNamespace(use_hyperfsdp=False, optimizer="adam", use_distributed_optimizer=True)
    with pytest.raises(UnsupportedError, match=r"--use-distributed-optimizer \(.*--use-hyperfsdp, or remove the flag"):
        muon_validation.check_megatron_arguments(args)
    args.use_hyperfsdp = True
    muon_validation.check_megatron_arguments(args)


@pytest.mark.full
@pytest.mark.timeout(400)
def test_a_checkpoint_is_one_folder_and_loads_on_another_back_end(corpus: list[str], tmp_path: Path) -> None:
    """Issue 2625 (and Megatron-Bridge 2307): checkpoints of `dist_muon` could not be loaded; its state lay beside the
    iteration's folder in `layer_wise_optimizer_*.pt`, which the next save overwrote.
    """
    jobs = SavedJobs(corpus, tmp_path)
    saver = on_shards(2, 1)
    assert_continues(jobs.saved(MODERN, saver), jobs.resumed(MODERN, saver, on_ddp(2)))
    (place,) = [folder for folder in tmp_path.iterdir() if folder.is_dir()]
    beside = {path.name for path in place.iterdir() if not path.name.startswith("iter_")}
    assert beside == {"latest_checkpointed_iteration.txt"}
    assert not list(place.rglob("layer_wise_optimizer_*"))
