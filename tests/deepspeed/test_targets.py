"""What the adapter extends in DeepSpeed is there in every supported release, by recorded signatures of each."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path

import pytest

from hp_plugin.deepspeed import targets, versions
from hp_plugin.deepspeed.targets import EXTENDED, REPLACED, Target
from tests.deepspeed import signatures

RECORDED = signatures.recorded()


def missing(release: str, target: Target) -> list[str]:
    """Parameters that the adapter relies on and the release lacks; the target itself where it is not there."""
    words = RECORDED[release].get(target.path)
    return [target.path] if words is None else [name for name in target.parameters if name not in words.split()]


def test_a_release_of_every_supported_series_is_recorded() -> None:
    assert sorted(RECORDED) == sorted(versions.VERIFIED.values())


@pytest.mark.parametrize("release", sorted(RECORDED))
@pytest.mark.parametrize("target", [*EXTENDED, *REPLACED], ids=lambda target: target.path.split(":")[1])
def test_a_supported_release_has_what_is_extended(release: str, target: Target) -> None:
    assert missing(release, target) == []


def test_a_parameter_that_a_release_lacks_is_found() -> None:
    backward = next(target for target in EXTENDED if target.path.endswith(".backward"))
    assert missing("0.19.8", dataclasses.replace(backward, parameters=("loss", "elsewhere"))) == ["elsewhere"]
    assert missing("0.19.8", dataclasses.replace(backward, path="deepspeed.runtime.engine:Other")) != []


@pytest.mark.skipif(
    versions.deepspeed_version() not in RECORDED, reason="the installed DeepSpeed is none of the recorded releases"
)
def test_the_record_is_true_of_the_installed_release() -> None:
    version = versions.deepspeed_version()
    assert version is not None
    spec = importlib.util.find_spec("deepspeed")
    assert spec is not None
    assert spec.origin is not None
    assert signatures.signatures(Path(spec.origin).parents[1]) == RECORDED[version]
    assert [target for target in (*EXTENDED, *REPLACED) if targets.problem_of(target)] == []
