"""The corpus that all Megatron jobs of a test run share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.megatron import training
from tests.support import run_ranks

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

CORPUS_TOKENS = 2_000_000


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Arguments that name a small corpus, built once."""
    directory: Path = tmp_path_factory.mktemp("corpus")
    prefix = str(directory / "stdlib")
    run_ranks(1, training.build_corpus, flavour="megatron", timeout=120, prefix=prefix, tokens=CORPUS_TOKENS)
    return ["--data-path", prefix, "--data-cache-path", str(directory / "cache")]
