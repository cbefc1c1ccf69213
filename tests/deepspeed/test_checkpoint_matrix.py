"""Jobs change engine and world at a checkpoint, and go on as stock DeepSpeed does without a break.

The oracle is the engine that saved: it trains on without an interruption. Losses are equal on any world, since all
ranks see the same data.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hp_plugin.convert import convert, open_checkpoint
from tests.deepspeed import convert_jobs
from tests.deepspeed.convert_jobs import MORE, STEPS
from tests.deepspeed.training import Run
from tests.support import run_ranks

ENGINES = ("zero1", "zero2", "zero3", "ours")
WORLDS = (2, 3, 4)
TIME_LIMIT_S = 200


def run(ranks: int, function: Any, **arguments: Any) -> list[Any]:
    return run_ranks(ranks, function, flavour="deepspeed", timeout=TIME_LIMIT_S, **arguments)


def assert_goes_on(found: Run, expected: Run, *, tolerance: float = 2e-6) -> None:
    assert len(found.losses) == len(expected.losses) == MORE
    for a, b in [(found.losses, expected.losses), (found.norms, expected.norms)]:
        assert max(abs(x - y) / abs(y) for x, y in zip(a, b)) < tolerance
    assert found.rates == expected.rates
    assert found.weights.keys() == expected.weights.keys()
    for name, weight in expected.weights.items():
        assert float((found.weights[name] - weight).norm() / weight.norm()) < tolerance, name


def assert_loaded(facts: dict[str, Any]) -> None:
    assert facts["steps"] == STEPS
    assert facts["client"]["epoch"] == 7 and torch.equal(facts["client"]["seen"], torch.tensor([STEPS]))
    assert "module" not in facts["client"]
    assert torch.equal(facts["buffer"], torch.tensor([1.5, 2.0]))


def check(directory: Path, saver: str, ranks: int, worlds: tuple[int, ...]) -> None:
    place = str(directory)
    saved = run(ranks, convert_jobs.save_and_go_on, directory=place, engine=saver)
    assert saved[0].engine == ("HyperFSDPEngine" if saver == "ours" else "DeepSpeedEngine")
    for world in worlds:
        for found, facts in run(
            world, convert_jobs.load_and_go_on, directory=place, engine="ours", supernode_size=1 + (world == 4)
        ):
            assert found.engine == "HyperFSDPEngine"
            assert_loaded(facts)
            assert_goes_on(found, saved[0])


@pytest.mark.timeout(600)
def test_ours_goes_on_from_zero_3_on_another_number_of_ranks(tmp_path: Path) -> None:
    check(tmp_path, "zero3", 2, (3,))


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("ranks", WORLDS)
@pytest.mark.parametrize("saver", ENGINES)
def test_ours_goes_on_from_every_engine_on_every_number_of_ranks(tmp_path: Path, saver: str, ranks: int) -> None:
    check(tmp_path, saver, ranks, WORLDS)


def go_back(directory: Path, stock: str, worlds: tuple[int, ...]) -> None:
    # In stage 3 stock gives the options of the first parameter group to all, so there is one group.
    kind = {"groups": stock != "zero3"}
    saved = run(2, convert_jobs.save_and_go_on, directory=str(directory / "ours"), engine="ours", **kind)
    convert(directory / "ours", directory / "universal", to="universal", verify=True)
    for world in worlds:
        loaded = run(
            world,
            convert_jobs.load_and_go_on,
            directory=str(directory / "universal"),
            engine=stock,
            universal=True,
            **kind,
        )
        for found, facts in loaded:
            assert found.engine == "DeepSpeedEngine"
            assert facts["steps"] == STEPS and facts["client"]["epoch"] == 7
            assert_goes_on(found, saved[0])


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("stock", ["zero1", "zero2", "zero3"])
def test_stock_goes_on_from_ours_through_the_universal_layout(tmp_path: Path, stock: str) -> None:
    go_back(tmp_path, stock, WORLDS)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("saver", ["zero2", "zero3"])
@pytest.mark.parametrize("to", ["hyperfsdp", "universal"])
def test_ours_goes_on_from_what_was_converted(tmp_path: Path, saver: str, to: str) -> None:
    saved = run(3, convert_jobs.save_and_go_on, directory=str(tmp_path / "zero"), engine=saver, frozen=False)
    report = convert(tmp_path / "zero", tmp_path / "new", to=to, verify=True)
    assert report.source_format == f"ZeRO-{saver[-1]} of 3 ranks" and report.verified
    place, asked = str(tmp_path / "new"), {"universal": to == "universal", "frozen": False}
    for found, facts in run(2, convert_jobs.load_and_go_on, directory=place, engine="ours", **asked):
        assert_loaded(facts)
        assert_goes_on(found, saved[0])


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("saver", "ranks"), [("zero2", 3), ("zero3", 2), ("ours", 2)])
def test_hyper_muon_starts_from_the_state_of_adam(tmp_path: Path, saver: str, ranks: int) -> None:
    # Stock tells its state in full in stage 3 alone; the same data give the same state in every stage.
    told = run(2, convert_jobs.save_and_tell, directory=str(tmp_path / "zero3"), engine="zero3")[0]
    place = str(tmp_path / saver)
    run(2, convert_jobs.save_and_go_on, directory=place, engine=saver, more=0)
    expected = run(1, convert_jobs.muon_alone, saved=told, momentum="exp_avg")[0]
    assert expected.losses[-1] != pytest.approx(expected.losses[0])
    loaded = run(ranks, convert_jobs.load_and_go_on, directory=place, engine="ours", optimizer="HyperMuon")
    for found, facts in loaded:
        matrix, vector = facts["state"]["blocks.1.up.weight"], facts["state"]["blocks.1.up.bias"]
        assert matrix.keys() == {"momentum_buffer"}
        assert matrix["momentum_buffer"] == pytest.approx(float(told["exp_avg"]["blocks.1.up.weight"].norm()))
        assert vector["step"] == STEPS
        assert vector["exp_avg_sq"] == pytest.approx(float(told["exp_avg_sq"]["blocks.1.up.bias"].norm()))
        assert_goes_on(found, expected)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_hyper_muon_goes_on_with_the_momentum_of_deepspeeds_muon(tmp_path: Path) -> None:
    kind = {"tied": False, "frozen": False}
    momenta: list[dict[str, torch.Tensor]] = []
    for saver in ("zero1", "zero2", "zero3"):
        place = str(tmp_path / saver)
        saved = run(2, convert_jobs.save_and_go_on, directory=place, engine=saver, optimizer="Muon", **kind)
        contents = open_checkpoint(tmp_path / saver / f"global_step{STEPS}")
        assert contents.optimizer == "muon"
        momenta.append({n: s["momentum_buffer"].read() for n, s in contents.state.items() if "momentum_buffer" in s})
        loaded = run(3, convert_jobs.load_and_go_on, directory=place, engine="ours", optimizer="HyperMuon", **kind)
        for found, facts in loaded:
            assert found.losses[0] == pytest.approx(saved[0].losses[0], rel=2e-6)
            assert facts["state"]["blocks.1.up.bias"]["step"] == STEPS
            for name, momentum in momenta[-1].items():
                if name != "head.weight":  # Muon's there, AdamW's here
                    told = facts["state"][name]["momentum_buffer"]
                    assert told == pytest.approx(float(momentum.norm()), rel=2e-6)
    # Stages 1 and 2 keep whole matrices in flat buffers that overlap, stage 3 pieces of them. All train alike, but for
    # the rounding in stage 3's Newton-Schulz iteration; a piece in the wrong place would change a momentum altogether.
    assert len(momenta[0]) == 7 and momenta[0].keys() == momenta[1].keys() == momenta[2].keys()
    for name, momentum in momenta[0].items():
        for other, tolerance in ((momenta[1], 2e-6), (momenta[2], 5e-3)):
            assert float((other[name] - momentum).norm() / momentum.norm()) < tolerance, name


@pytest.mark.full
@pytest.mark.timeout(600)
def test_weights_alone_are_loaded_when_asked_for_and_else_refused(tmp_path: Path) -> None:
    saved = run(2, convert_jobs.save_and_go_on, directory=str(tmp_path / "zero"), engine="zero2", more=0)
    convert(tmp_path / "zero", tmp_path / "files", to="safetensors", max_bytes=20_000, verify=True)
    convert(tmp_path / "files", tmp_path / "new", to="hyperfsdp", verify=True)
    for facts in run(2, convert_jobs.load_weights_alone, directory=str(tmp_path / "new"), tag="files"):
        assert "ConfigurationError" in facts["with optimizer"] and "load_module_only=True" in facts["with optimizer"]
        assert torch.equal(facts["buffer"], torch.tensor([1.5, 2.0]))
        assert all(torch.equal(facts["weights"][name], weight) for name, weight in saved[0].weights.items())
