"""The commands of docs/migrating-megatron.md, as they stand there: from stock to HyperFSDP and Muon, and back."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.pages import ROOT, Page

# The second line that Megatron prints after a start has the mean of two iterations, so it is left out below.
PAGE = Page("docs/migrating-megatron.md", re.compile(r"iteration\s+(\d+)/.*lm loss: (\S+) "))


def test_the_page_has_commands_for_every_step() -> None:
    PAGE.assert_has(
        "hp-plugin check",
        "--hyperfsdp-migrate observe",
        "--use-hyperfsdp",
        "--use-hypermuon",
        "--load ckpt",
    )


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_a_job_moves_over_and_back_with_the_commands_of_the_page(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    setup, first, checked, observed, alone, muon, back = PAGE.blocks()
    environment = setup.splitlines()[0] + "\n"
    PAGE.run(setup, tmp_path)
    started = PAGE.losses(PAGE.run(environment + first, tmp_path))
    # What the page does not need: the job without an interruption.
    reference = PAGE.losses(PAGE.run(environment + first.replace("--exit-interval 6 --save ckpt", ""), tmp_path))
    assert started == {iteration: reference[iteration] for iteration in range(1, 7)}
    assert "a job with these arguments starts" in PAGE.run(environment + checked, tmp_path)
    watched = PAGE.run(environment + observed, tmp_path)
    PAGE.assert_goes_on(reference, PAGE.losses(watched), 7, 12, without=frozenset({8}))
    assert watched.count("hp_plugin: observe: ") == 7
    PAGE.assert_goes_on(reference, PAGE.losses(PAGE.run(environment + alone, tmp_path)), 7, 12, without=frozenset({8}))
    with_muon = PAGE.losses(PAGE.run(environment + muon, tmp_path))
    assert sorted(with_muon) == list(range(13, 19))
    assert with_muon[13] == pytest.approx(reference[13], rel=PAGE.printed), "the weights before Muon's first step"
    assert with_muon[18] != pytest.approx(reference[18], rel=1e-4)
    PAGE.assert_goes_on(reference, PAGE.losses(PAGE.run(environment + back, tmp_path)), 13, 18, without=frozenset({14}))
