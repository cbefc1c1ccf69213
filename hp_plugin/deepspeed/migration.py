"""From a configuration of MiCS, ZeRO++ hpZ or DeepSpeed's Muon to one of HyperFSDP. DeepSpeed is not imported."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hp_plugin.deepspeed.schema import BLOCK


@dataclass(frozen=True)
class Migration:
    """A rewritten configuration.

    Attributes:
        config: The new one; what was given is unchanged.
        changes: One sentence for each change, in order.
    """

    config: dict[str, Any]
    changes: tuple[str, ...]


def migrate(config: Mapping[str, Any]) -> Migration:
    """Rewrites what has a clear counterpart; everything else stays as it is.

    * `mics_shard_size: k` becomes `shard_size: k`, and the other keys of MiCS go.
    * `zero_hpz_partition_size: k` becomes `shard_size: "world"` with `reshard_after_forward: k`.
    * the optimizer `Muon` becomes `HyperMuon`, with `muon_lr` as its `lr`.
    * a configuration with stage 3 and none of these gets an empty block, which asks for the defaults.
    """
    new: dict[str, Any] = copy.deepcopy(dict(config))
    changes: list[str] = []
    zero = new.get("zero_optimization")
    zero = zero if isinstance(zero, dict) else {}
    block: dict[str, Any] = dict(new.get(BLOCK) or {})
    _replace_mics(zero, block, changes)
    _replace_hpz(zero, block, changes)
    if BLOCK not in new and not block and zero.get("stage") == 3:
        changes.append(f'the block "{BLOCK}" is added with its defaults')
    if block or changes:
        new[BLOCK] = block
    _replace_muon(new, changes)
    return Migration(new, tuple(changes))


def _replace_mics(zero: dict[str, Any], block: dict[str, Any], changes: list[str]) -> None:
    size = zero.pop("mics_shard_size", None)
    hierarchical = zero.pop("mics_hierarchical_params_gather", None)
    if isinstance(size, int) and size > 0:
        block.setdefault("shard_size", size)
        changes.append(f'"mics_shard_size": {size} is replaced by "{BLOCK}.shard_size": {block["shard_size"]}')
    elif size is not None:
        changes.append(f'"mics_shard_size": {size} asked for nothing and is removed')
    if hierarchical is not None:
        changes.append(
            '"mics_hierarchical_params_gather" is removed: a shard group inside a supernode gathers on fast links only'
        )


def _replace_hpz(zero: dict[str, Any], block: dict[str, Any], changes: list[str]) -> None:
    size = zero.pop("zero_hpz_partition_size", None)
    if isinstance(size, int) and size > 1:
        block.setdefault("shard_size", "world")
        block.setdefault("reshard_after_forward", size)
        changes.append(
            f'"zero_hpz_partition_size": {size} is replaced by "{BLOCK}.shard_size": "{block["shard_size"]}" and '
            f'"{BLOCK}.reshard_after_forward": {block["reshard_after_forward"]}: backward gathers inside {size} ranks; '
            'where weights fit into a supernode, "shard_size": "supernode" keeps forward there too'
        )
    elif size is not None:
        changes.append(f'"zero_hpz_partition_size": {size} asked for nothing and is removed')


def _replace_muon(new: dict[str, Any], changes: list[str]) -> None:
    optimizer = new.get("optimizer")
    if not isinstance(optimizer, dict) or str(optimizer.get("type", "")).lower() != "muon":
        return
    optimizer["type"] = "HyperMuon"
    changes.append('"type": "Muon" is replaced by "HyperMuon", which clips gradients instead of updates')
    params = optimizer.get("params")
    if isinstance(params, dict) and "muon_lr" in params:
        params["lr"] = params.pop("muon_lr")
        changes.append('"muon_lr" is called "lr"')
    for name in ("ns_method", "per_head_muon"):
        if isinstance(params, dict) and params.pop(name, None) is not None:
            changes.append(f'"{name}" has no counterpart and is removed')
