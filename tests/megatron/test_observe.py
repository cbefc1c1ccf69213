"""`--hyperfsdp-migrate observe`: the stock back end trains, and the job says what HyperFSDP would take and send."""

from __future__ import annotations

import re

import pytest

from hp_plugin.errors import UnsupportedError
from hp_plugin.megatron.arguments import validation
from hp_plugin.megatron.arguments.flags import HyperFSDPOptions
from hp_plugin.megatron.observation.model import (
    Bytes,
    Operands,
    Part,
    Precision,
    memory,
    operands,
    predicted,
    ring,
    traffic,
)
from tests.megatron import observed, training
from tests.megatron.cases import tiny_job
from tests.support import run_ranks

FP32 = Precision(compute=4, reduce=4)
BF16 = Precision(compute=2, reduce=4)
PART = Part(units=(100, 300), root=50, shard_ranks=(0, 1), replica_ranks=(0, 2))


def crosses(one: int, other: int) -> bool:
    return one // 2 != other // 2


class TestClosedForm:
    def test_memory_is_a_shard_of_everything_and_a_few_layers(self) -> None:
        found = memory([PART], BF16)
        assert (found.weights, found.gradients, found.states) == (225 * 4, 225 * 4, 225 * 8)
        # The root and two layers in compute precision, the gradients of one, and its operand in fp32.
        assert found.passing == (50 + 600) * 2 + 300 * 2 + 300 * 4
        assert found.total == 225 * 16 + found.passing

    def test_a_shard_of_one_rank_in_fp32_gathers_nothing(self) -> None:
        alone = Part((100,), 10, (0,), (0, 1))
        assert memory([alone], FP32).passing == 0
        assert operands(alone, FP32, micro_batches=3, reshard=True) == Operands(0, 0, 110 * 4)

    def test_a_step_gathers_twice_reduces_each_micro_batch_and_crosses_once(self) -> None:
        used = operands(PART, BF16, micro_batches=3, reshard=True)
        assert used == Operands(gathered=3 * 2 * (50 + 2 * 400), scattered=3 * 4 * 450, reduced=4 * 225)
        assert operands(PART, BF16, micro_batches=1, reshard=False).gathered == 2 * 450

    def test_bytes_go_to_the_tier_of_each_edge(self) -> None:
        used = Operands(gathered=1000, scattered=600, reduced=300)
        assert traffic(PART, used, crosses) == Bytes(intra=800.0, inter=300.0)
        assert ring((0, 1, 2, 3), 400, crosses) == Bytes(intra=150.0, inter=150.0)
        assert ring((5,), 400, crosses) == Bytes()

    def test_a_prediction_lies_between_all_hidden_and_none(self) -> None:
        assert predicted(10.0, 4.0, 3.0, stock_overlaps=False) == (6.0, 9.0)
        assert predicted(10.0, 4.0, 8.0, stock_overlaps=True) == (8.0, 18.0)


@pytest.mark.parametrize("flag", ["use_hypermuon", "use_megatron_fsdp"])
def test_only_megatrons_ddp_can_be_observed(flag: str) -> None:
    from tests.megatron.arguments.test_validation import megatron_arguments

    with pytest.raises(UnsupportedError, match=r"observe cannot be combined with --use-"):
        validation.check_observed_arguments(megatron_arguments(**{flag: True}), HyperFSDPOptions())


def test_what_would_be_refused_is_told_and_not_refused() -> None:
    from tests.megatron.arguments.test_validation import megatron_arguments

    args = megatron_arguments(fp8="hybrid", use_distributed_optimizer=True)
    (line,) = validation.check_observed_arguments(args, HyperFSDPOptions())
    assert line.startswith("observe: --use-hyperfsdp alone would refuse --fp8-format hybrid (")
    assert args.use_distributed_optimizer


def sizes(line: str) -> dict[str, float]:
    units = {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9}
    return {name: float(number) * units[unit] for name, number, unit in re.findall(r"(\w+) ([\d.]+) (\w?B)\b", line)}


CASES = [
    pytest.param("--train-iters 3", 2, id="ddp-short"),
    pytest.param(
        "--bf16 --use-distributed-optimizer --overlap-grad-reduce", 4, id="distributed", marks=pytest.mark.full
    ),
    pytest.param(
        "--pipeline-model-parallel-size 2 --num-experts 4 --moe-router-topk 2 --expert-model-parallel-size 2 "
        "--moe-token-dispatcher-type alltoall",
        4,
        id="experts-pp2",
        marks=pytest.mark.full,
    ),
]


@pytest.mark.parametrize(("arguments", "ranks"), CASES)
def test_stock_trains_unchanged_and_the_report_follows(corpus: list[str], arguments: str, ranks: int) -> None:
    argv = [*tiny_job("--train-iters", "6"), *corpus, *arguments.split()]
    watch = ["--use-hyperfsdp", "--hyperfsdp-supernode-size", str(ranks // 2), "--hyperfsdp-migrate", "observe"]
    stock = run_ranks(ranks, training.train, flavour="megatron", timeout=240, argv=argv)
    watched = run_ranks(ranks, observed.train, flavour="megatron", timeout=240, argv=[*argv, *watch])
    assert watched[-1].run.losses == stock[-1].losses
    assert watched[-1].run.norms == stock[-1].norms
    assert not any("DistributedDataParallel" in name or name.endswith("DDP") for name in watched[0].run.rebound)
    told = [line for line in watched[0].lines if line.startswith("observe: ")]
    assert len(told) == 7
    assert "2 supernodes" in told[0]
    theirs, ours = sizes(told[1]), sizes(told[2])
    kept = ("weights", "gradients", "optimizer")
    if ranks == 4:
        assert sum(ours[part] for part in kept) < sum(theirs[part] for part in kept)
    else:  # shards of one rank: the same bytes, all fp32
        assert [ours[part] for part in kept] == [theirs[part] for part in kept]
    assert re.search(r"a step takes [\d.]+ ms; .* hence a step between [\d.]+ ms, .*, and [\d.]+ ms", told[5])
