"""The corpus of the examples: complete or not there."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("megatron.core", reason="the corpus is written by Megatron's own builder")


@pytest.fixture
def byte_corpus(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = importlib.import_module("byte_corpus")
    monkeypatch.setattr(module, "_write", write_tiny)
    return module


def write_tiny(prefix: Path, tokens: int) -> dict[str, int]:
    """Stands for Megatron's builder, which takes seconds to import."""
    sizes = {}
    for suffix in (".bin", ".idx"):
        file = prefix.with_name(prefix.name + suffix)
        file.write_bytes(b"x" * tokens)
        sizes[suffix] = tokens
    manifest = {"tokens": tokens, "documents": 1, "limit": tokens, **sizes}
    prefix.with_name(prefix.name + ".json").write_text(json.dumps(manifest))
    return manifest


def test_a_corpus_is_built_and_described(byte_corpus: ModuleType, tmp_path: Path) -> None:
    prefix = tmp_path / "deep" / "c"
    assert byte_corpus.describe(prefix) is None
    manifest = byte_corpus.build(prefix, tokens=10)
    assert byte_corpus.describe(prefix) == manifest
    assert sorted(path.name for path in prefix.parent.iterdir()) == ["c.bin", "c.idx", "c.json"]


def test_a_complete_corpus_is_reused_and_another_size_is_built_anew(
    byte_corpus: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    byte_corpus.build(tmp_path / "c", tokens=10)
    assert byte_corpus.build(tmp_path / "c", tokens=20)["tokens"] == 20
    monkeypatch.setattr(byte_corpus, "_write", lambda *_: pytest.fail("built again"))
    assert byte_corpus.build(tmp_path / "c", tokens=20)["tokens"] == 20


@pytest.mark.parametrize("damage", ["c.bin", "c.idx", "c.json"])
def test_an_incomplete_corpus_does_not_count_and_is_built_anew(
    byte_corpus: ModuleType, tmp_path: Path, damage: str
) -> None:
    byte_corpus.build(tmp_path / "c", tokens=10)
    (tmp_path / damage).write_bytes(b"{")
    assert byte_corpus.describe(tmp_path / "c") is None
    assert byte_corpus.build(tmp_path / "c", tokens=10)["tokens"] == 10
    assert byte_corpus.describe(tmp_path / "c") is not None


def test_a_build_that_fails_leaves_nothing_that_counts(
    byte_corpus: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full_disk(prefix: Path, tokens: int) -> None:
        write_tiny(prefix, tokens)
        raise OSError(28, "No space left on device")

    byte_corpus.build(tmp_path / "c", tokens=10)
    monkeypatch.setattr(byte_corpus, "_write", full_disk)
    with pytest.raises(OSError, match="No space left"):
        byte_corpus.build(tmp_path / "c", tokens=20)
    assert byte_corpus.describe(tmp_path / "c") is None
    assert not list(tmp_path.glob(".c.*"))
