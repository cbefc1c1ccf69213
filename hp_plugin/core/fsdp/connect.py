"""Chooses how bytes move inside the supernode for the units of a root, and makes what that needs.

It happens at the first gather of the root, where every rank is at the same place and all units are known.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hp_plugin.core.devices import backend_capabilities
from hp_plugin.core.fsdp.parameter import MeshInfo
from hp_plugin.core.fsdp.shared import SharedMemory
from hp_plugin.core.kernels import native_status
from hp_plugin.core.transport.shm import agree
from hp_plugin.errors import ConfigurationError, UnsupportedError

if TYPE_CHECKING:
    from hp_plugin.core.fsdp.root import Root
    from hp_plugin.core.fsdp.unit import Unit

_log = logging.getLogger(__name__)
TRANSPORT_VARIABLE = "HP_TRANSPORT"
"""What "auto" stands for: `shm` or `c10d`, instead of what suits the ranks."""


def connect(root: Root) -> list[SharedMemory]:
    """Connects every unit of `root` to its peers. Every rank of each shard group must call, at the same place.

    Returns:
        The memory that was made, one object for each mesh whose ranks share some.

    Raises:
        ConfigurationError: `HP_TRANSPORT` has an unknown value or differs between ranks.
        UnsupportedError: `transport="shm"` was asked for where ranks cannot share memory.
        SharedMemoryError: Memory does not suffice, or ranks have different units.
    """
    wanted = _wanted(root.options.transport)
    by_mesh: dict[tuple[object, object], list[Unit]] = {}
    for unit in root.units:
        if unit.communicates:
            by_mesh.setdefault((unit.info.shard_group, unit.info.replicate_group), []).append(unit)
    return [memory for units in by_mesh.values() if (memory := _share(root, units, wanted)) is not None]


def _wanted(option: str | None) -> str | None:
    if option is not None:
        return option
    value = os.environ.get(TRANSPORT_VARIABLE, "").strip().lower()
    if value not in ("", "auto", "c10d", "shm"):
        raise ConfigurationError(f"{TRANSPORT_VARIABLE}={value}: expected auto, c10d or shm")
    return value if value in ("c10d", "shm") else None


def _share(root: Root, units: Sequence[Unit], wanted: str | None) -> SharedMemory | None:
    """Shared memory for units of one mesh; None where they use collectives."""
    info = units[0].info
    obstacle = _obstacle(info, wanted)
    aliased = [unit for unit in units if unit.residence == "aliased"]
    if obstacle is not None:
        if aliased:
            raise UnsupportedError(
                f'unit {aliased[0].name} has residence="aliased", which needs shared memory, and that is not possible: '
                f'{obstacle}; use residence="private"'
            )
        if wanted == "shm":
            raise UnsupportedError(f'transport="shm" is not possible: {obstacle}; use transport="c10d"')
        if info.shard_rank == 0:
            _log.info("ranks of the shard group use collectives: %s", obstacle)
        return None
    for unit in aliased:
        _check_aliased(unit)
    memory = SharedMemory(info, units, root)
    for unit, fulls in zip(units, memory.fulls):
        unit.share(fulls, memory.ring)
    return memory


def _check_aliased(unit: Unit) -> None:
    for parameter in unit.parameters:
        if parameter.compute_dtype != parameter.master_dtype:
            why = f"is computed with in {parameter.compute_dtype} and kept in {parameter.master_dtype}"
        elif not parameter.slot.is_row_major:
            why = f"is sharded on dim {parameter.slot.dim}, so that a shard is not one piece of it"
        else:
            continue
        raise UnsupportedError(
            f'parameter {parameter.name} of unit {unit.name} {why}; residence="aliased" makes a shard a slice of the '
            'full parameter, so it needs one dtype and shards on dim 0. Use residence="private"'
        )


def _obstacle(info: MeshInfo, wanted: str | None) -> str | None:
    """Why the ranks of the shard group do not share memory, alike on all of them; None where they do."""
    if info.device.type != "cpu":
        return f"tensors are on {info.device.type}, and shared memory serves the CPU"
    backend = backend_capabilities(info.shard_group, device_type="cpu").backend
    if backend != "gloo":
        return f"the process group runs on {backend}, and shared memory is set up over gloo"
    status = native_status()
    missing = status.reason if status.library is None else None
    place, problem = _place()
    found = agree(info.shard_group, (wanted, missing, place), problem=problem)
    if len({each for each, _, _ in found}) > 1:
        raise ConfigurationError(
            f"ranks of one shard group were asked for different transports: {[each for each, _, _ in found]}; set "
            f"transport, or {TRANSPORT_VARIABLE}, alike on all of them"
        )
    if wanted == "c10d":
        return "they were asked to"
    for _, missing, _ in found:
        if missing is not None:
            return f"a rank lacks the native library. {missing.rstrip('.')}"
    if len({place for _, _, place in found}) > 1:
        return "they are on several hosts, in several network namespaces, or belong to several users"
    return None


def _place() -> tuple[tuple[str, int, int], str | None]:
    """Where this process runs, and what kept it from finding out.

    Processes of equal places can hand one another descriptors of files.
    """
    machine, namespace, problem = socket.gethostname(), 0, None
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.stat("/proc/self/ns/net").st_ino
    except (FileNotFoundError, PermissionError):
        pass  # no /proc: the name of the host must do
    except OSError as error:
        hint = "; raise the user limit on open files (ulimit -n)" if error.errno == errno.EMFILE else ""
        problem = f"asking the kernel where this rank runs failed: {error}{hint}"
    return (machine, namespace, os.geteuid()), problem
