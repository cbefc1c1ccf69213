"""Every optimizer and back end to every other, from mesh to mesh: one table of jobs that save and jobs that resume.

Each pair is compared in losses, gradient norms and, at the end, in the weights of all ranks. What it is compared with
is its oracle:

* `SAVER`, where the optimizer stays: the job that saved, which went on without a stop.
* From Adam to Muon: Muon in one process on stock's DDP, from the same checkpoint. That its momentum and moments are
  those which the checkpoint has is a test of its own, against the file.
* From Muon to Adam, which takes weights alone: stock Megatron in one process, from the same checkpoint.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest

from tests.megatron.checkpoints import started
from tests.megatron.checkpoints.jobs import (
    EXACT,
    FP32_GRAM,
    HALF,
    INTERLEAVED,
    PP,
    TP,
    Layout,
    Limits,
    SavedJobs,
    assert_continues,
    limits_of,
    ours,
    stock,
)

MUON = "--use-hypermuon --hypermuon-ns-dtype fp32"
MODELS = {
    "dense": "--swiglu --normalization RMSNorm --group-query-attention --num-query-groups 2 "
    "--untie-embeddings-and-output-weights",
    "tied": "",
    "experts": "--swiglu --num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall "
    "--moe-aux-loss-coeff 0.01",
    "bf16": "--bf16 --swiglu",
}
PARALLEL = {
    "tp2": TP,
    "sp2": f"{TP} --sequence-parallel",  # which Megatron asks for where experts are trained with tensor parallelism
    "pp2": PP,
    "interleaved": INTERLEAVED,
    "ep2": "--expert-model-parallel-size 2",
    "ep4": "--expert-model-parallel-size 4",
}
WEIGHTS_ALONE = "--no-load-optim --override-opt_param-scheduler"  # what the refusal advises

NORMS = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}

SAVER = "the job that saved"
MUON_ON_ONE, ADAM_ON_ONE = "muon/ddp 1", "adam/ddp 1"


@dataclass(frozen=True)
class Pair:
    """A job that saves and one that resumes.

    Attributes:
        saver: Optimizer, back end, mesh and more: `adam/ddp 2 tp2` is stock on two data-parallel ranks, each cut in two
            by tensor parallelism, `muon/shards 2x1 pp2` has two replicas of one shard of each of two pipeline stages.
        loader: The same.
        oracle: `SAVER`, or a job that resumes from the same checkpoint.
        model: Of `MODELS`.
        full: Runs in `make test-full` only.
        limits: Other ones than those of the model.
    """

    saver: str
    loader: str
    oracle: str = SAVER
    model: str = "dense"
    full: bool = True
    limits: Limits | None = None

    def __str__(self) -> str:
        return f"{self.model}: {self.saver} -> {self.loader}"


def layout(text: str, more: str = "") -> Layout:
    """What a job that `Pair` describes is started with."""
    kind, mesh, *parallel = text.split()
    optimizer, back_end = kind.split("/")
    arguments = " ".join([MUON if optimizer == "muon" else "", *(PARALLEL[word] for word in parallel), more])
    cut = 2 if {"tp2", "sp2"} & set(parallel) else 1
    stages = 2 if {"pp2", "interleaved"} & set(parallel) else 1
    if back_end == "ddp":
        return stock(int(mesh) * cut * stages, arguments)
    replicas, shards = map(int, mesh.split("x"))
    return ours(replicas * shards * cut * stages, shards * cut, arguments)


PAIRS = (
    # Stock alone: how much the order of sums makes.
    Pair("adam/ddp 4", "adam/ddp 2"),
    Pair("adam/ddp 4", "adam/ddp 2 tp2"),
    Pair("adam/ddp 2 pp2", "adam/ddp 2", model="tied"),
    Pair("adam/ddp 2 ep2", "adam/ddp 2 ep2 sp2", model="experts"),
    # Stock to Adam on shards, and back.
    Pair("adam/ddp 4", "adam/shards 1x2"),
    Pair("adam/ddp 4", "adam/shards 2x1 interleaved"),
    Pair("adam/ddp 2 tp2", "adam/shards 2x2"),
    Pair("adam/ddp 2 tp2", "adam/shards 1x2 tp2"),
    Pair("adam/ddp 2 pp2", "adam/shards 2x2", model="tied"),
    Pair("adam/shards 2x2", "adam/ddp 2"),
    Pair("adam/shards 2x2", "adam/ddp 1 tp2"),
    Pair("adam/shards 2x2", "adam/ddp 2 pp2"),
    Pair("adam/shards 1x2 pp2", "adam/ddp 2", model="tied"),
    Pair("adam/shards 2x2", "adam/ddp 2", model="bf16"),
    # Adam on shards: the same mesh, the number of data-parallel ranks alone, the supernode alone, TP, PP.
    Pair("adam/shards 2x2", "adam/shards 2x2", limits=EXACT),
    Pair("adam/shards 2x2", "adam/shards 2x2", model="bf16", limits=EXACT),
    Pair("adam/shards 2x2", "adam/shards 1x2"),
    Pair("adam/shards 2x2", "adam/shards 1x4"),
    Pair("adam/shards 2x2", "adam/shards 4x1"),
    Pair("adam/shards 2x2", "adam/shards 1x1"),
    Pair("adam/shards 2x2", "adam/shards 2x1 tp2"),
    Pair("adam/shards 2x2", "adam/shards 2x1 pp2"),
    Pair("adam/shards 1x2 pp2", "adam/shards 1x2", model="tied"),
    Pair("adam/shards 2x2 ep2", "adam/shards 1x2 ep2 sp2", model="experts"),
    Pair("adam/shards 1x2 ep2 sp2", "adam/shards 1x2", model="experts"),
    # Adam to Muon.
    Pair("adam/ddp 2", "muon/ddp 2", MUON_ON_ONE, full=False),
    Pair("adam/ddp 2", "muon/ddp 2 pp2", MUON_ON_ONE),
    Pair("adam/ddp 2", "muon/shards 2x2", MUON_ON_ONE),
    Pair("adam/ddp 2", "muon/shards 2x1 tp2", MUON_ON_ONE),
    Pair("adam/shards 2x2", "muon/shards 2x2", MUON_ON_ONE),
    Pair("adam/shards 2x2", "muon/shards 2x1 pp2", MUON_ON_ONE),
    Pair("adam/shards 2x2", "muon/ddp 2", MUON_ON_ONE),
    Pair("adam/shards 2x2", "muon/ddp 2 tp2", MUON_ON_ONE),
    Pair("adam/ddp 2 ep2", "muon/ddp 2 ep2", MUON_ON_ONE, model="experts"),
    Pair("adam/ddp 2", "muon/ddp 2 ep2", MUON_ON_ONE, model="experts"),
    Pair("adam/shards 2x2 ep2", "muon/shards 1x2", MUON_ON_ONE, model="experts"),
    Pair("adam/shards 2x2 ep2", "muon/ddp 4 ep4", MUON_ON_ONE, model="experts"),
    # Muon on shards.
    Pair("muon/shards 2x2", "muon/shards 2x2", limits=EXACT),
    Pair("muon/shards 2x2", "muon/shards 2x2", model="bf16", limits=EXACT),
    Pair("muon/shards 2x2", "muon/shards 1x2"),
    Pair("muon/shards 2x2", "muon/shards 1x4"),
    Pair("muon/shards 2x2", "muon/shards 4x1"),
    Pair("muon/shards 2x2", "muon/shards 2x1 tp2"),
    Pair("muon/shards 2x1 tp2", "muon/shards 2x1"),
    Pair("muon/shards 2x2", "muon/shards 2x1 pp2"),
    Pair("muon/shards 1x2 pp2", "muon/shards 1x2 pp2", model="tied", limits=EXACT),
    Pair("muon/shards 1x2 pp2", "muon/shards 1x2", model="tied", limits=FP32_GRAM),
    Pair("muon/shards 1x2 pp2", "muon/shards 2x1 interleaved", model="tied", limits=FP32_GRAM),
    # Muon on DDP.
    Pair("muon/ddp 2", "muon/ddp 2", limits=EXACT),
    Pair("muon/ddp 2", "muon/ddp 4"),
    Pair("muon/ddp 2", "muon/ddp 1 tp2"),
    Pair("muon/ddp 2", "muon/ddp 2 pp2"),
    Pair("muon/ddp 2 pp2", "muon/ddp 2"),
    # Muon from shards to DDP, and back.
    Pair("muon/shards 2x2", "muon/ddp 1"),
    Pair("muon/shards 2x2", "muon/ddp 2 tp2"),
    Pair("muon/shards 1x2 pp2", "muon/ddp 2", model="tied", limits=FP32_GRAM),
    Pair("muon/shards 2x2", "muon/ddp 2", model="bf16"),
    Pair("muon/ddp 2", "muon/shards 2x2", full=False),
    Pair("muon/ddp 2", "muon/shards 2x1 tp2"),
    Pair("muon/ddp 2 pp2", "muon/shards 1x2"),
    Pair("muon/ddp 2", "muon/shards 2x2", model="bf16"),
    # Muon and experts: more, fewer and no expert-parallel ranks, TP.
    Pair("muon/shards 1x4 ep2", "muon/shards 2x2 ep4", model="experts"),
    Pair("muon/shards 2x2 ep2", "muon/shards 2x1", model="experts"),
    Pair("muon/shards 2x2 ep2", "muon/ddp 2 ep2", model="experts"),
    Pair("muon/shards 2x1", "muon/shards 2x2 ep2", model="experts"),
    Pair("muon/shards 2x2 ep2", "muon/shards 1x2 ep2 sp2", model="experts"),
    Pair("muon/ddp 2 ep2", "muon/shards 2x2 ep2", model="experts"),
    Pair("muon/ddp 2 ep2", "muon/ddp 4 ep4", model="experts"),
    Pair("muon/ddp 2 ep2", "muon/ddp 2", model="experts"),
    Pair("muon/ddp 2", "muon/ddp 2 ep2", model="experts"),
    # Muon to Adam: weights alone.
    Pair("muon/shards 2x2", "adam/ddp 2 tp2", ADAM_ON_ONE),
    Pair("muon/shards 2x2", "adam/shards 1x2", ADAM_ON_ONE),
    Pair("muon/ddp 2", "adam/ddp 2", ADAM_ON_ONE),
    Pair("muon/ddp 2", "adam/shards 2x2", ADAM_ON_ONE),
    Pair("muon/ddp 2 pp2", "adam/shards 2x1 tp2", ADAM_ON_ONE),
)


@pytest.fixture(scope="module")
def jobs(corpus: list[str], tmp_path_factory: pytest.TempPathFactory) -> SavedJobs:
    return SavedJobs(corpus, tmp_path_factory.mktemp("matrix"))


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "pair", [pytest.param(pair, id=str(pair), marks=[pytest.mark.full] if pair.full else []) for pair in PAIRS]
)
def test_a_job_goes_on_with_another_optimizer_back_end_and_mesh(pair: Pair, jobs: SavedJobs) -> None:
    model, saver = MODELS[pair.model], layout(pair.saver)
    more = WEIGHTS_ALONE if pair.oracle == ADAM_ON_ONE else ""
    reference = saved = jobs.saved(model, saver)
    if pair.oracle != SAVER:
        reference = jobs.resumed(model, saver, layout(pair.oracle, more))
    resumed = jobs.resumed(model, saver, layout(pair.loader, more))
    # The first loss is that of the weights that were read, whatever becomes of the optimizer.
    limits = pair.limits or limits_of(model)
    assert resumed[-1].losses[HALF + 1] == pytest.approx(saved[-1].losses[HALF + 1], rel=limits.loss, abs=0)
    assert_continues(reference, resumed, limits=limits)
    if pair.oracle != SAVER:  # and another optimizer goes elsewhere
        assert resumed[-1].losses[HALF + 3] != pytest.approx(saved[-1].losses[HALF + 3], rel=1e-4)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("saver", ["adam/ddp 2", "adam/shards 2x2"])
@pytest.mark.parametrize("start", ["adam", "fresh"])
def test_muon_starts_from_what_the_checkpoint_of_adam_has(start: str, saver: str, jobs: SavedJobs) -> None:
    """The momentum is Adam's first moment or zero, moments and step of AdamW's parameters go on."""
    model, source = MODELS["dense"], layout(saver)
    loader = layout(MUON_ON_ONE, f"--hypermuon-start-from {start}")
    (states,) = jobs.resumed(model, source, loader, rank=started.train)
    folder = jobs.place(model, source) / f"iter_{HALF:07d}"
    first, second = (started.saved_states(folder, name) for name in ("exp_avg", "exp_avg_sq"))
    matrices = 0
    for name, state in states.items():
        layer = re.fullmatch(r"(.*layers\.)(\d+)\.(.*)", name)
        # Layers are stacked along a first axis, and a norm is saved with the layer behind it.
        key = layer[1] + NORMS.get(layer[3], layer[3]) if layer else name
        saved_first, saved_second = (saved[key][int(layer[2])] if layer else saved[key] for saved in (first, second))
        if "momentum_buffer" in state:
            matrices += 1
            expected = saved_first if start == "adam" else 0 * saved_first
            assert saved_first.abs().max() > 0 and state["momentum_buffer"].equal(expected), name
        else:
            assert state["exp_avg"].equal(saved_first) and state["exp_avg_sq"].equal(saved_second), name
            assert state["step"] == HALF
    assert matrices == 4 * 4 and len(states) > matrices


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("saver", ["muon/shards 2x2", "muon/ddp 2"])
def test_adam_on_shards_refuses_the_state_of_muon_and_says_what_to_do(saver: str, jobs: SavedJobs) -> None:
    with pytest.raises(Exception, match="the checkpoint was saved with Muon") as failure:
        jobs.resumed(MODELS["dense"], layout(saver), layout("adam/shards 2x2"))
    assert WEIGHTS_ALONE.replace(" ", " and ") in " ".join(str(failure.value).split())


@pytest.mark.full
@pytest.mark.timeout(600)
def test_stock_does_not_take_the_state_of_muon_for_one_of_adam(jobs: SavedJobs) -> None:
    with pytest.raises(Exception, match="param_groups|exp_avg"):
        jobs.resumed(MODELS["dense"], layout("muon/ddp 2"), layout("adam/ddp 2"))
