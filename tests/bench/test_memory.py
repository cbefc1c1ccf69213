"""The memory benchmark: the tracker sees what lives, the formula adds up, the report takes the worst case."""

from __future__ import annotations

import gc
import itertools
import threading
from dataclasses import replace

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


def test_formula_on_one_unit_without_prefetch() -> None:
    # 3 x 4 x 100/2 at rest, 4 x 100/2 gradient, 400 full, 400 gradients; what it receives comes when full is gone.
    assert total(0, [100], Setting(prefetch=0)) == 600 + 200 + 800
    # Kept full parameters stay while the reduction receives.
    assert total(0, [100], Setting(prefetch=0, reshard=False)) == 600 + 200 + 400 + 400 + 400


def test_formula_on_two_units() -> None:
    resting = 3 * 4 * 100 + 4 * 100
    # Backward of the first: its full 400 and gradients 400, and of the second an operand and what it receives.
    assert total(0, [100, 100], Setting()) == resting + 400 + 400 + 800
    # Nothing in flight: backward of the second with the first gathered ahead, or its reduction.
    assert total(0, [100, 100], Setting(in_flight=0)) == resting + 400 + 400 + 400
    # The root's full parameters stay.
    assert total(10, [100, 100], Setting()) == resting + 16 * 5 + 40 + 400 + 400 + 800


def test_formula_in_bf16_has_small_gradients_and_large_operands() -> None:
    resting = 3 * 4 * 100 + 4 * 100
    assert total(0, [100, 100], Setting(compute=2)) == resting + 200 + 200 + 800


def test_formula_of_accumulation() -> None:
    plain = total(0, [100, 100], Setting())
    assert total(0, [100, 100], Setting(accumulation="grad_exists")) == plain + 400
    assert total(0, [100, 100], Setting(accumulation="grad_exists", bucket=50, window=1)) == plain + 100
    # The running reduce-scatter of 100 elements has a sum of its own to add.
    assert total(0, [100, 100], Setting(accumulation="all_reduce_last")) == plain + 200
    # Kept: of the first unit; the second's were its operand.
    assert total(0, [100, 100], Setting(accumulation="sync_last")) == plain + 400


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


def test_more_in_flight_costs_two_operands_each() -> None:
    blocks = [100] * 6
    by_bound = [total(0, blocks, Setting(in_flight=bound)) for bound in (1, 2, 3)]
    assert [b - a for a, b in itertools.pairwise(by_bound)] == [800, 800]
    assert total(0, blocks, replace(Setting(in_flight=2), exchanges=False)) == by_bound[1] - 800


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
