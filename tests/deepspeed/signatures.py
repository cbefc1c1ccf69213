"""Parameters of functions and methods in DeepSpeed's sources, read without importing them.

`recorded_signatures.json` holds those of every supported release's targets. After a change of the table:

    python -m tests.deepspeed.signatures FOLDER...

with, for each release, a folder that holds its `deepspeed` package; the file is written anew for these releases.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path

from hp_plugin.deepspeed.targets import EXTENDED, REPLACED, Target

RECORD = Path(__file__).with_name("recorded_signatures.json")


def recorded() -> dict[str, dict[str, str]]:
    """Release -> path of a target -> names of its parameters; the path is absent where the release lacks it."""
    found: dict[str, dict[str, str]] = json.loads(RECORD.read_text()) if RECORD.is_file() else {}
    return found


def parameters(root: Path, target: Target) -> str | None:
    """Names of the parameters of a target in the sources under `root`, separated by blanks; None where it is not."""
    module, _, attribute = target.path.partition(":")
    body = ast.parse(root.joinpath(*module.split(".")).with_suffix(".py").read_text()).body
    *classes, name = attribute.split(".")
    for each in classes:
        body = next(node.body for node in body if isinstance(node, ast.ClassDef) and node.name == each)
    for node in body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            found = node.args
            return " ".join(each.arg for each in (*found.posonlyargs, *found.args, *found.kwonlyargs))
    return None


def signatures(root: Path) -> dict[str, str]:
    """All targets under `root`."""
    found = {target.path: parameters(root, target) for target in (*EXTENDED, *REPLACED)}
    return {path: words for path, words in found.items() if words is not None}


def version_of(root: Path) -> str:
    """Release of the sources under `root`."""
    installed = re.search(
        r'version ?= ?"([^"+]+)', (root / "deepspeed" / "git_version_info_installed.py").read_text().replace("'", '"')
    )
    assert installed is not None
    return installed[1].strip()


def main() -> None:
    record = recorded()
    for root in map(Path, sys.argv[1:]):
        record[version_of(root)] = signatures(root)
    RECORD.write_text(json.dumps(dict(sorted(record.items())), indent=1) + "\n")


if __name__ == "__main__":
    main()
