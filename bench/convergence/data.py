"""Real text as bytes: the corpus of `examples/byte_corpus.py`, and which part of it each micro-batch sees."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import torch

from bench.errors import UnavailableError

VOCABULARY = 256
_REPOSITORY = Path(__file__).resolve().parents[2]
_TOKENS = 2_000_000


def corpus() -> Path:
    """Builds the corpus, or finds it, and gives its file of tokens (uint16).

    Raises:
        UnavailableError: It cannot be built: megatron-core is missing, or the disk is full.
    """
    prefix = _REPOSITORY / "build" / "corpus" / "convergence"
    try:
        _byte_corpus().build(prefix, tokens=_TOKENS)
    except (ImportError, OSError, ValueError) as error:
        message = (
            f"the corpus at {prefix} could not be built: {error}. `make setup` installs megatron-core, which it needs"
        )
        raise UnavailableError(message) from error
    return prefix.with_name(prefix.name + ".bin")


def _byte_corpus() -> ModuleType:
    path = _REPOSITORY / "examples" / "byte_corpus.py"
    spec = importlib.util.spec_from_file_location("byte_corpus", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Batches:
    """Micro-batches that depend on step, rank and index alone, so that every run sees the same ones.

    Args:
        path: File of tokens, uint16.
        ranks: Number of ranks.
        micro_batches: Micro-batches of a rank in a step.
        batch: Sequences of a micro-batch.
        length: Tokens of a sequence.
        seed: Chooses the places in the text.
    """

    def __init__(
        self, path: Path, *, ranks: int, micro_batches: int, batch: int, length: int, seed: int = 1234
    ) -> None:
        self._tokens = np.fromfile(path, dtype=np.uint16)
        self._shape = (ranks, micro_batches, batch)
        self._length = length
        self._seed = seed

    def get(self, step: int, rank: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets, the next bytes: int64, (batch, length) each."""
        random = np.random.default_rng((self._seed, step))
        starts = random.integers(0, len(self._tokens) - self._length - 1, size=self._shape)[rank, index]
        rows = np.stack([self._tokens[start : start + self._length + 1] for start in starts]).astype(np.int64)
        tokens = torch.from_numpy(rows)
        return tokens[:, :-1], tokens[:, 1:]
