"""The commands of docs/migrating-deepspeed.md, as they stand there: from ZeRO-3 to HyperFSDP and Muon, and back."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.pages import Page

PAGE = Page("docs/migrating-deepspeed.md", re.compile(r"^step (\d+) loss (\S+)$", re.MULTILINE))


def test_the_page_has_commands_for_every_step() -> None:
    PAGE.assert_has(
        "hp-plugin check ds_config.json --fix",
        "--to hyperfsdp --verify",
        "--to universal --verify",
        "--to safetensors",
        "HyperMuon",
        "load_universal",
    )


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_a_job_moves_over_and_back_with_the_commands_of_the_page(tmp_path: Path) -> None:
    setup, first, checked, supernode, resumed, converted, muon, back, weights = PAGE.blocks()
    environment = setup.splitlines()[0] + "\n"
    PAGE.run(setup, tmp_path)
    started = PAGE.losses(PAGE.run(environment + first, tmp_path))
    # What the page does not need: the job without an interruption.
    reference = PAGE.losses(PAGE.run(environment + first.replace("--until 4 --save ckpt", "--until 12"), tmp_path))
    assert started == {step: reference[step] for step in range(4)}
    assert "a job with this configuration starts" in PAGE.run(checked, tmp_path)
    PAGE.run(supernode, tmp_path)
    moved = PAGE.run(environment + resumed, tmp_path)
    assert "is a checkpoint of ZeRO-3 of 2 ranks" in moved and "HyperFSDP: " in moved
    PAGE.assert_goes_on(reference, PAGE.losses(moved), 4, 7)
    assert "verified" in PAGE.run(converted, tmp_path)
    with_muon = PAGE.run(environment + muon, tmp_path)
    assert "parameters: muon from exp_avg" in with_muon
    assert PAGE.losses(with_muon)[8] == pytest.approx(reference[8], rel=PAGE.printed), (
        "the weights before Muon's first step"
    )
    assert PAGE.losses(with_muon)[11] != pytest.approx(reference[11], rel=1e-4)
    PAGE.assert_goes_on(reference, PAGE.losses(PAGE.run(environment + back, tmp_path)), 8, 11)
    assert "verified" in PAGE.run(weights, tmp_path)
    assert (tmp_path / "model" / "model.safetensors").is_file()
