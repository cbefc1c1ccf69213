"""Commands of pages: found, run, and ended with what they have started."""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path

import pytest

from tests.support import pages
from tests.support.pages import Page


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Page:
    text = "One\n```sh\necho step 1 loss 2.5\n```\n```yaml\na: 1\n```\n```sh\nfalse | cat\n```\n"
    (tmp_path / "page.md").write_text(text)
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    return Page("page.md", re.compile(r"^step (\d+) loss (\S+)$", re.MULTILINE), time_limit_s=1.0)


def test_shell_commands_alone_are_found_and_run(page: Page, tmp_path: Path) -> None:
    first, second = page.blocks()
    assert page.losses(page.run(first, tmp_path)) == {1: 2.5}
    with pytest.raises(AssertionError, match="false"):
        page.run(second, tmp_path)
    page.assert_has("echo", "cat")
    with pytest.raises(AssertionError, match="torchrun"):
        page.assert_has("echo", "torchrun")


def test_a_run_that_goes_on_has_every_step_and_its_loss(page: Page) -> None:
    page.assert_goes_on({1: 2.0, 2: 1.0}, {1: 2.0, 2: 3.0}, 1, 2, without=frozenset({2}))
    for wrong in ({1: 2.0}, {1: 2.0, 2: 1.1}):
        with pytest.raises(AssertionError):
            page.assert_goes_on({1: 2.0, 2: 1.0}, wrong, 1, 2)


def test_the_time_limit_ends_what_was_started(page: Page, tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(subprocess.TimeoutExpired):
        page.run("sleep 47.25 & wait", tmp_path)
    assert time.monotonic() - started < 20.0
    deadline = time.monotonic() + 10.0
    while "sleep\0" + "47.25" in _command_lines():
        assert time.monotonic() < deadline, "the command outlived its page"
        time.sleep(0.05)


def _command_lines() -> str:
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(file.read_text(errors="replace"))
        except OSError:
            continue
    return "\n".join(found)
