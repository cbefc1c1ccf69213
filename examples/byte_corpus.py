"""A small real corpus from nothing: the Python standard library's own sources as a byte-level Megatron data set.

Every byte of a source file is one token (0 to 255); a document ends with 255, which never occurs in UTF-8 and is
what Megatron's ``NullTokenizer --vocab-size 256`` takes for the end of a document.

    python examples/byte_corpus.py build/corpus/stdlib
    ... --data-path build/corpus/stdlib --tokenizer-type NullTokenizer --vocab-size 256

Importing this module does not import Megatron; :func:`describe` tells whether a corpus is there and complete.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

END_OF_DOCUMENT = 255
DEFAULT_TOKENS = 8_000_000
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
_SUFFIXES = (".bin", ".idx")


def describe(prefix: Path) -> dict[str, int] | None:
    """``{"tokens", "documents", "limit", ...}`` of the corpus at ``prefix``, or None unless it is complete.

    The manifest is written last, and holds the sizes of the two data files.
    """
    try:
        manifest = json.loads(_manifest(prefix).read_text(encoding="utf-8"))
        sizes = {suffix: _with_suffix(prefix, suffix).stat().st_size for suffix in _SUFFIXES}
        complete = all(manifest[suffix] == size for suffix, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return manifest if complete else None


def build(prefix: Path, *, tokens: int = DEFAULT_TOKENS) -> dict[str, int]:
    """Build ``prefix.bin``, ``prefix.idx`` and ``prefix.json``, or reuse them when they are there and complete.

    The files are written beside their final place and moved there when all of them are whole; the manifest
    goes last. Whoever reads a corpus that :func:`describe` accepts reads a complete one.

    Args:
        prefix: Path without suffix, as for Megatron's ``--data-path``.
        tokens: Stop after the document with which this many tokens are reached.

    Returns:
        The manifest.

    Raises:
        OSError: The files cannot be written; nothing is left at ``prefix`` then.
        ValueError: No source file was found.
    """
    present = describe(prefix)
    if present is not None and present.get("limit") == tokens:
        return present
    prefix.parent.mkdir(parents=True, exist_ok=True)
    _manifest(prefix).unlink(missing_ok=True)  # from here on, what lies at the prefix does not count as a corpus
    workspace = Path(tempfile.mkdtemp(prefix=f".{prefix.name}.", dir=prefix.parent))
    try:
        manifest = _write(workspace / prefix.name, tokens)
        for suffix in (*_SUFFIXES, ".json"):
            os.replace(_with_suffix(workspace / prefix.name, suffix), _with_suffix(prefix, suffix))
    finally:
        shutil.rmtree(workspace, ignore_errors=True)
    return manifest


def _write(prefix: Path, tokens: int) -> dict[str, int]:
    import numpy as np
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder, get_bin_path, get_idx_path

    builder = IndexedDatasetBuilder(get_bin_path(str(prefix)), dtype=np.uint16)
    total = documents = 0
    for data in _sources():
        document = np.append(np.frombuffer(data, np.uint8).astype(np.uint16), np.uint16(END_OF_DOCUMENT))
        builder.add_document(document, [document.size])
        total, documents = total + document.size, documents + 1
        if total >= tokens:
            break
    if not documents:
        raise ValueError(f"no Python sources were found under {sysconfig.get_paths()['stdlib']}")
    builder.finalize(get_idx_path(str(prefix)))
    sizes = {suffix: _with_suffix(prefix, suffix).stat().st_size for suffix in _SUFFIXES}
    manifest = {"tokens": int(total), "documents": documents, "limit": tokens, **sizes}
    _manifest(prefix).write_text(json.dumps(manifest) + "\n", encoding="utf-8")
    return manifest


def _sources() -> Iterator[bytes]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        if _LEFT_OUT.isdisjoint(path.relative_to(root).parts):
            data = path.read_bytes()
            if data and END_OF_DOCUMENT not in data:
                yield data


def _manifest(prefix: Path) -> Path:
    return _with_suffix(prefix, ".json")


def _with_suffix(prefix: Path, suffix: str) -> Path:
    return prefix.with_name(prefix.name + suffix)


def main() -> None:
    """Command line of this file."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("prefix", type=Path, help="path without suffix, as for --data-path")
    parser.add_argument("--tokens", type=int, default=DEFAULT_TOKENS, help="size in tokens (default: %(default)s)")
    options = parser.parse_args()
    try:
        manifest = build(options.prefix, tokens=options.tokens)
    except (OSError, ValueError) as error:
        sys.exit(f"error: the corpus {options.prefix} could not be built: {error}")
    print(f"{manifest['documents']} documents, {manifest['tokens']} tokens at {options.prefix}")


if __name__ == "__main__":
    main()
