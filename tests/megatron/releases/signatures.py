"""Parameters of functions and classes in Megatron's sources, read without importing them.

`recorded_signatures.json` holds those of every release's rebinding targets. After a change of the table:

    python -m tests.megatron.releases.signatures FOLDER...

with, for each release, a folder that holds its `megatron` package; the file is written anew for these releases.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path

RECORD = Path(__file__).with_name("recorded_signatures.json")


def recorded() -> dict[tuple[int, int], dict[str, list[str]]]:
    """Release series -> full name of a target -> names of its parameters, with the stars of variadic ones."""
    found = json.loads(RECORD.read_text()) if RECORD.is_file() else {}
    series = {name: tuple(map(int, name.split("."))) for name in found}
    return {
        (series[name][0], series[name][1]): {target: words.split() for target, words in targets.items()}
        for name, targets in found.items()
    }


def parameters(root: Path, module: str, attribute: str) -> list[str]:
    """Parameters of what `module.attribute` is in the sources under `root`, through any `from ... import`.

    Raises:
        LookupError: There is no such function or class.
    """
    path = root.joinpath(*module.split("."))
    is_package = not path.with_suffix(".py").is_file()
    tree = ast.parse((path / "__init__.py" if is_package else path.with_suffix(".py")).read_text())
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == attribute:
            return _names(node)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                source = _source(module, is_package, node)
                if (alias.asname or alias.name) == attribute and source.startswith("megatron"):
                    return parameters(root, source, alias.name)
    raise LookupError(f"{module}.{attribute} is not defined under {root}")


def _source(module: str, is_package: bool, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    base = parts[: len(parts) - node.level + (1 if is_package else 0)]
    return ".".join([*base, *([node.module] if node.module else [])])


def _names(node: ast.FunctionDef | ast.ClassDef) -> list[str]:
    if isinstance(node, ast.ClassDef):
        node = next(inner for inner in node.body if isinstance(inner, ast.FunctionDef) and inner.name == "__init__")
    found = node.args
    names = [each.arg for each in (*found.posonlyargs, *found.args) if each.arg != "self"]
    names += [f"*{found.vararg.arg}"] if found.vararg else ["*"] if found.kwonlyargs else []
    names += [each.arg for each in found.kwonlyargs]
    return names + ([f"**{found.kwarg.arg}"] if found.kwarg else [])


def series_of(root: Path) -> tuple[int, int]:
    """Release series of the sources under `root`."""
    text = (root / "megatron" / "core" / "package_info.py").read_text()
    major, minor = (re.search(rf"^{name} = (\d+)", text, re.MULTILINE) for name in ("MAJOR", "MINOR"))
    assert major is not None
    assert minor is not None
    return int(major[1]), int(minor[1])


def main() -> None:
    from hp_plugin.megatron.releases.targets import TABLES

    record = recorded()
    for root in map(Path, sys.argv[1:]):
        series = series_of(root)
        record[series] = {target.name: parameters(root, target.module, target.attribute) for target in TABLES[series]}
    text = {
        f"{series[0]}.{series[1]}": {name: " ".join(words) for name, words in targets.items()}
        for series, targets in sorted(record.items())
    }
    RECORD.write_text(json.dumps(text, indent=1) + "\n")


if __name__ == "__main__":
    main()
