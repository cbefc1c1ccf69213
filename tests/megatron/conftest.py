"""The corpus that all Megatron jobs of a test run share."""

from __future__ import annotations

import pytest

from tests.megatron.training import make_corpus

pytest.importorskip("megatron.core", reason="megatron-core is not installed")


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Arguments that name a small corpus, built once."""
    return make_corpus(tmp_path_factory.mktemp("corpus"))
