"""The memory benchmark: the tracker sees what lives, the formula adds up, the report takes the worst case."""

from __future__ import annotations

import gc
import itertools
import threading

import pytest
import torch
from torch import nn

from bench.memory.cases import CASES, SIZE
from bench.memory.command import expected, fill
from bench.memory.formula import Moment, Setting, moments, peak
from bench.memory.model import make_model, units
from bench.memory.tracker import StorageTracker
from bench.report import Report
from tests.support import init_gloo
from tests.support.ranks import run_ranks

# ---- the tracker ----------------------------------------------------------------------------------------------------


def test_tracker_counts_a_storage_once_and_forgets_it() -> None:
    tracker = StorageTracker()
    with tracker:
        tensor = torch.empty(1000)
        view = tensor.view(10, 100)[2:]
        assert tracker.current == 4000
        del tensor
        assert tracker.current == 4000, "the view keeps the storage"
        del view
        assert tracker.current == 0
    assert tracker.peak == 4000


def test_tracker_sees_a_storage_emptied_and_refilled() -> None:
    tracker = StorageTracker()
    with tracker:
        tensor = torch.empty(1000)
        tensor.untyped_storage().resize_(0)
        assert tracker.current == 0
        tensor.untyped_storage().resize_(8000)
        assert (tracker.current, tracker.peak) == (8000, 8000)
        tracker.reset_peak()
        tensor.untyped_storage().resize_(0)
        assert (tracker.current, tracker.peak) == (0, 8000)
    before = tracker.current
    torch.empty(4).untyped_storage().resize_(64)
    assert tracker.current == before, "it watches only while it is active"


def test_tracker_sees_gradients_and_the_release_of_saved_tensors() -> None:
    tracker = StorageTracker()
    layer = nn.Linear(100, 100, bias=False)
    x = torch.randn(50, 100)
    tracker.track([*layer.parameters(), x])
    resting = tracker.current
    assert resting == 40_000 + 20_000
    with tracker:
        hidden = layer(x).relu()
        loss = hidden.sum()
        assert tracker.current >= resting + 20_000
        loss.backward()
        del hidden, loss
        gc.collect()
        assert tracker.current == resting + 40_000, "the gradient is left"
        layer.zero_grad(set_to_none=True)
        assert tracker.current == resting


def test_tracker_sees_what_another_thread_allocates_under_it() -> None:
    tracker = StorageTracker()
    found: list[torch.Tensor] = []

    def allocate() -> None:
        with tracker:
            found.append(torch.empty(1000))

    with tracker:
        thread = threading.Thread(target=allocate)
        thread.start()
        thread.join()
        assert tracker.current == 4000
        found.clear()
        assert tracker.current == 0


def _track_dtensor() -> tuple[int, int]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    init_gloo()
    mesh = init_device_mesh("cpu", (2,))
    tracker = StorageTracker()
    with tracker:
        sharded = DTensor.from_local(torch.ones(10, 10), mesh, [Shard(0)], run_check=False)
        one = tracker.current
        doubled = sharded + sharded
        two = tracker.current
    del doubled
    return one, two


def test_tracker_counts_the_local_part_of_a_dtensor() -> None:
    assert run_ranks(2, _track_dtensor) == [(400, 800)] * 2


# ---- the formula ----------------------------------------------------------------------------------------------------


def total(root: int, blocks: list[int], setting: Setting) -> int:
    return peak(root, blocks, setting).total


def test_formula_on_one_unit() -> None:
    # 3 x 4 x 100/2 at rest, 400 full and 400 gradients; or 400 gradients and 200 sharded ones, which also receive.
    assert total(0, [100], Setting()) == 600 + 800
    # Kept full parameters stay while the reduction receives.
    assert total(0, [100], Setting(reshard=False)) == 600 + 400 + 400 + 200


def test_formula_on_two_units() -> None:
    # Backward of the first: its full 400 and gradients 400; of the second an operand and its bucket.
    resting, running = 3 * 4 * 100, 400
    assert total(0, [100, 100], Setting(bucket=200)) == resting + 400 + 400 + running + 200
    # One bucket for all is allocated as a whole.
    assert total(0, [100, 100], Setting()) == resting + 400 + 400 + running + 400
    # Nothing in flight: backward of the second, the first gathered ahead, or its reduction.
    assert total(0, [100, 100], Setting(in_flight=0, bucket=200)) == resting + 400 + 400 + 400
    # Without prefetch nothing is in flight either, nor gathered ahead.
    assert total(0, [100, 100], Setting(prefetch=0, bucket=200)) == resting + 400 + 400 + 200
    # The root's full parameters stay.
    assert total(10, [100, 100], Setting(bucket=200)) == resting + 12 * 5 + 40 + 400 + 400 + running + 200


def test_formula_in_bf16_has_small_gradients_and_large_operands() -> None:
    assert total(0, [100, 100], Setting(compute=2, bucket=200)) == 1200 + 200 + 200 + 400 + 200


def test_formula_of_accumulation() -> None:
    blocks = [100] * 4
    # All sharded gradients exist from the micro-batches before; backward of unit 2, with one more gathered ahead or
    # the one before in flight.
    base = 12 * 200 + 4 * 200 + 400 + 400 + 400
    assert total(0, blocks, Setting(accumulation="grad_exists", bucket=200)) == base + 2 * 200
    assert total(0, blocks, Setting(accumulation="grad_exists", bucket=200, window=1)) == base + 200
    assert total(0, blocks, Setting(accumulation="grad_exists")) == base + 800
    # The running reduce-scatter of 100 elements has a sum of its own to add.
    assert total(0, blocks, Setting(accumulation="all_reduce_last", bucket=200)) == base + 200
    # Backward of unit 3: kept gradients of all units, no sharded ones yet.
    assert total(0, blocks, Setting(accumulation="sync_last", bucket=200)) == base - 4 * 200 + 4 * 400


def test_buckets_are_filled_in_the_order_of_backward() -> None:
    held = {m.name: m.parts["sharded gradients"] for m in moments(50, [100] * 3, Setting(bucket=400))}
    assert held["backward of unit 2"] == 0
    assert held["reduction of unit 2"] == held["reduction of unit 1"] == 400
    # The third unit begins the second bucket, which the root shares.
    assert held["reduction of unit 0"] == 400 + 200 + 100


def test_formula_of_another_master_dtype() -> None:
    # Gradients of the optimizer's dtype are stored beside the sums, whose buffers live only while they are reduced.
    moment = peak(0, [100, 100], Setting(compute=2, reduce=2, master=4))
    assert moment.parts["sharded gradients"] == 400


@pytest.mark.parametrize("prefetch", [None, 0, 900, 10_000])
def test_prefetch_is_within_its_budget(prefetch: int | None) -> None:
    ahead = {m.name: m.parts["full, others"] for m in moments(0, [100] * 6, Setting(prefetch=prefetch))}
    expected_units = {None: 1, 0: 0, 900: 2, 10_000: 5}[prefetch]
    assert ahead["backward of unit 5"] == expected_units * 400
    assert ahead["backward of unit 0"] == 0


def test_more_in_flight_costs_an_operand_and_the_slices_of_others_each() -> None:
    blocks = [100] * 6
    by_bound = [total(0, blocks, Setting(shard_size=4, in_flight=bound)) for bound in (1, 2, 3)]
    assert [b - a for a, b in itertools.pairwise(by_bound)] == [600, 600]
    assert total(0, blocks, Setting(shard_size=4, in_flight=2, exchanges=False)) == by_bound[1] - 2 * 200
    held = {f: moments(0, blocks, Setting(shard_size=f))[3].parts["in flight"] for f in (2, 4)}
    # One of the slices of others is received where the sum goes.
    assert held == {2: 400, 4: 400 + 200}


def test_formula_needs_a_unit() -> None:
    with pytest.raises(ValueError, match="at least one unit"):
        peak(100, [], Setting())


# ---- the report and the model ---------------------------------------------------------------------------------------


def test_units_are_those_of_the_model() -> None:
    model = make_model(SIZE)
    root, block = units(SIZE)
    assert sorted(p.numel() for p in model.blocks[0].parameters()) == sorted(block)
    assert sum(p.numel() for p in model.parameters()) == sum(root) + SIZE.blocks * sum(block)


def test_parameters_dominate_every_case() -> None:
    for case in CASES:
        moment = expected(case)
        assert 0 < moment.parts["activations"] < 0.02 * moment.total


def test_report_takes_the_worst_case_of_each_ratio() -> None:
    report = Report("memory")
    formula = [Moment("backward of unit 0", {"all": 100})] * 3
    peaks = [{"ours": 104, "fsdp2": 100}, {"ours": 90, "fsdp2": 100}, {"ours": 100, "fsdp2": 125}]
    fill(report, CASES[:3], peaks, formula)
    assert report.ratios["peak_vs_formula"] == pytest.approx(0.9)
    assert report.ratios["formula_vs_peak"] == pytest.approx(1 / 0.9)
    assert report.ratios["peak_vs_fsdp2"] == pytest.approx(1.04)
    report.to_json()
