"""Weights of Megatron-LM's `torch_dist` checkpoints, of stock Megatron or of a job with HyperFSDP, by Megatron's names.

The folder is in torch's distributed format, and a file `metadata.json` names it. A key begins with `optimizer.` for
optimizer state; what is no tensor (random state, `_extra_state`) has no counterpart elsewhere. Megatron itself is not
imported.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from hp_plugin.convert.contents import Contents
from hp_plugin.convert.hyperfsdp import Reader

_NO_WEIGHT = re.compile(
    r"(^|\.)(optimizer|chained_\d+|rng_state|rerun_state_machine_state|opt_param_scheduler)(\.|$|/)"
)
_EXTRA = "_extra_state"


def is_torch_dist(folder: Path) -> bool:
    """Whether a folder is one iteration's checkpoint of Megatron in this format."""
    description = folder / "metadata.json"
    if not description.is_file() or not (folder / ".metadata").is_file():
        return False
    return json.loads(description.read_text(encoding="utf-8")).get("sharded_backend") == "torch_dist"


def read(folder: Path) -> Contents:
    """The weights of a checkpoint; layers that Megatron keeps in one tensor stay in one."""
    reader = Reader(str(folder))
    found = Contents("Megatron torch_dist", weights={})
    for key in reader.read_metadata().state_dict_metadata:
        if not _NO_WEIGHT.search(key) and _EXTRA not in key and reader.is_tensor(key):
            found.weights[key] = reader.tensor(key)
    found.missing.append("of a checkpoint of Megatron the weights alone are read, by Megatron's names")
    return found
