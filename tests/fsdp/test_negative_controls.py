"""Wrong runs fail the comparison that right runs pass, and for the right reason."""

from __future__ import annotations

import copy
import functools

import pytest

from tests.fsdp.comparison import FLOAT32, Record, assert_same_training, differences
from tests.fsdp.models import make_model
from tests.fsdp.runs import Runs, single_record
from tests.fsdp.variants import Variant, single_process

MESH = (2, 2)
SOUND = Variant(micro_batches=3)
EVERYTHING = {name for name, _ in make_model("transformer").named_parameters()}
NORMS = {name for name in EVERYTHING if "norm" in name}
# Which parameters' gradients and weights are wrong after the first step. A mean over the wrong number of ranks, and a
# replica that is left out, touch all; AdamW forgives a factor, hence no claim about weights where gradients are scaled.
EXPECTED: dict[str, dict[str, set[str]]] = {
    "gradients_doubled": {"gradient": EVERYTHING},
    "replica_dropped": {"gradient": EVERYTHING, "weight": EVERYTHING},
    "all_reduce_skipped": {"gradient": EVERYTHING, "weight": EVERYTHING},
    "norms_unsynchronised": {"gradient": NORMS},
    "micro_batch_dropped": {"gradient": EVERYTHING, "weight": EVERYTHING},
    "shard_stale": {"gradient": set(), "weight": {"embedding.weight"}},
}


@functools.cache
def runs() -> Runs:
    return Runs(MESH, [SOUND, *map(faulty, EXPECTED)], "shm")


def faulty(fault: str) -> Variant:
    return Variant(micro_batches=3, fault=fault)


def reference() -> Record:
    return single_record(single_process(SOUND, MESH))


def test_the_sound_run_passes() -> None:
    for record in runs().records(SOUND):
        assert_same_training(record, reference(), FLOAT32)


@pytest.mark.parametrize("fault", EXPECTED)
def test_wrong_run_fails(fault: str) -> None:
    failing = []
    for record in runs().records(faulty(fault)):
        try:
            assert_same_training(record, reference(), FLOAT32)
        except AssertionError:
            failing.append(record)
    assert failing, f"the comparison did not notice {fault} on any replica"
    first = [each for each in differences(failing[-1], reference(), FLOAT32) if each.step == 0]
    assert not [each for each in first if each.quantity == "loss"], (
        "the first loss is computed before anything is wrong"
    )
    for quantity, names in EXPECTED[fault].items():
        assert {each.name for each in first if each.quantity == quantity} == names


@pytest.mark.parametrize("fault", sorted(EXPECTED.keys() - {"shard_stale"}))
def test_wrong_gradients_show_in_the_norm(fault: str) -> None:
    found = differences(runs().records(faulty(fault))[0], reference(), FLOAT32)
    assert (0, "norm") in {(each.step, each.quantity) for each in found}


@pytest.mark.parametrize("quantity", ["losses", "norms", "gradients", "weights"])
def test_a_small_difference_in_one_quantity_alone_is_noticed(quantity: str) -> None:
    record = copy.deepcopy(reference())
    values = getattr(record, quantity)
    if quantity in ("losses", "norms"):
        values[1] *= 1 + 1e-5
    else:
        values[1]["norm.bias"].view(-1)[3] += 1e-5
    with pytest.raises(AssertionError, match="step 1"):
        assert_same_training(record, reference(), FLOAT32)


@pytest.mark.parametrize("quantity", ["losses", "norms", "gradients", "weights"])
def test_not_a_number_is_noticed(quantity: str) -> None:
    record = copy.deepcopy(reference())
    values = getattr(record, quantity)
    if quantity in ("losses", "norms"):
        values[1] = float("nan")
    else:
        values[1]["head.weight"].view(-1)[0] = float("nan")
    with pytest.raises(AssertionError, match="step 1.*nan"):
        assert_same_training(record, reference(), FLOAT32)


@pytest.mark.parametrize("quantity", ["losses", "norms", "gradients", "weights"])
def test_a_missing_step_is_noticed(quantity: str) -> None:
    record = copy.deepcopy(reference())
    getattr(record, quantity).pop()
    with pytest.raises(AssertionError, match="steps"):
        assert_same_training(record, reference(), FLOAT32)
