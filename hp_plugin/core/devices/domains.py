"""Which domain of fast links the device of a process is in, as files and drivers of vendors tell it.

* Ascend: the rank table, a JSON file that `RANK_TABLE_FILE` names. Version 1.2 (Atlas A3) lists super pods; in version
  1.0 (A2 and before) the fast links end at the server. The old form with `group_list` is not read.
* NVIDIA: the fabric that `nvidia-smi -q` reports for each GPU. GPUs of one cluster and clique reach one another over
  NVLink, across hosts too (GB200 NVL72); a cluster of zeros is NVLink inside one host, which host names tell as well.

Written from the vendors' documents (CANN 8.5 on rank tables; NVML's reference on `nvmlGpuFabricInfo`) and tested on
files of our own; no machine of either kind has been asked yet.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hp_plugin.errors import ConfigurationError

RANK_TABLE_VARIABLE = "RANK_TABLE_FILE"
_ASK_DRIVER_TIMEOUT_S = 30.0
_NO_CLUSTER = re.compile(r"[0-]*")


@dataclass(frozen=True)
class Domain:
    """Where a device is.

    Attributes:
        label: Equal for two devices exactly where they share fast links.
        source: One sentence, for people.
    """

    label: str
    source: str


# ---- Ascend ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankTable:
    """What a rank table says.

    Attributes:
        path: The file.
        version: "1.0" or "1.2".
        server_of: Server of every rank.
        super_pod_of: Super pod of every rank; None where the table has none.
    """

    path: str
    version: str
    server_of: tuple[str, ...]
    super_pod_of: tuple[str, ...] | None

    @property
    def domains(self) -> tuple[str, ...]:
        """The domain of fast links of every rank: its super pod, else its server."""
        return self.server_of if self.super_pod_of is None else self.super_pod_of

    @property
    def source(self) -> str:
        """One sentence, for people."""
        what = "servers, since it names no super pod" if self.super_pod_of is None else "super pods"
        return f"the rank table {self.path} (version {self.version}; {what})"


def read_rank_table(path: str | os.PathLike[str]) -> RankTable:
    """Reads a rank table.

    Raises:
        ConfigurationError: The file is missing, no JSON, not complete, or ranks or servers in it contradict each other.
    """
    try:
        table = json.loads(Path(path).read_text())
    except OSError as error:
        raise ConfigurationError(f"the rank table {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigurationError(f"the rank table {path} is not JSON: {error}") from error

    def refuse(why: str) -> ConfigurationError:
        return ConfigurationError(f"the rank table {path} {why}")

    if not isinstance(table, dict) or not isinstance(table.get("server_list"), list):
        old = (
            " but a group_list, the form before version 1.0"
            if isinstance(table, dict) and "group_list" in table
            else ""
        )
        raise refuse(f"has no server_list{old}; write one of version 1.0 or 1.2")
    if table.get("status", "completed") != "completed":
        raise refuse(f"has status {table['status']!r}: it is still being filled; start when it is 'completed'")
    servers = _servers_of_ranks(table["server_list"], refuse)
    pods = table.get("super_pod_list")
    pod_of = None if not pods else _pods_of_servers(pods, refuse)
    super_pods = None
    if pod_of is not None:
        missing = sorted({server for server in servers if server not in pod_of})
        if missing:
            raise refuse(f"has servers that are in no super pod: {', '.join(missing)}")
        super_pods = tuple(pod_of[server] for server in servers)
    return RankTable(os.fspath(path), str(table.get("version", "1.0")), servers, super_pods)


def _servers_of_ranks(server_list: list[Any], refuse: Any) -> tuple[str, ...]:
    server_of: dict[int, str] = {}
    for server in server_list:
        name = _text(server, "server_id", refuse)
        for device in server.get("device", ()):
            rank = _text(device, "rank_id", refuse)
            if not rank.isdecimal():
                raise refuse(f"has rank_id {rank!r} on server {name}, which is no number")
            if server_of.setdefault(int(rank), name) != name:
                raise refuse(f"has rank {rank} on two servers, {server_of[int(rank)]} and {name}")
    if sorted(server_of) != list(range(len(server_of))) or not server_of:
        raise refuse(f"does not number its {len(server_of)} ranks from 0 without gaps")
    return tuple(server_of[rank] for rank in range(len(server_of)))


def _pods_of_servers(pods: list[Any], refuse: Any) -> dict[str, str]:
    pod_of: dict[str, str] = {}
    for pod in pods:
        name = _text(pod, "super_pod_id", refuse)
        for server in pod.get("server_list", ()):
            if pod_of.setdefault(_text(server, "server_id", refuse), name) != name:
                raise refuse(
                    f"has server {server['server_id']} in two super pods, {pod_of[server['server_id']]} and {name}"
                )
    return pod_of


def _text(entry: Any, key: str, refuse: Any) -> str:
    if not isinstance(entry, dict) or key not in entry:
        raise refuse(f"has an entry without {key}: {str(entry)[:80]}")
    return str(entry[key])


# ---- NVIDIA ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FabricEntry:
    """The fabric of one GPU.

    Attributes:
        uuid: Of the GPU, "GPU-...".
        state: "Completed" once the GPU has joined; else why it has not.
        cluster: UUID of the cluster; None where there is none beyond the host.
        clique: Number of the clique in it.
    """

    uuid: str
    state: str
    cluster: str | None
    clique: str | None


def parse_fabric(text: str) -> list[FabricEntry]:
    """The fabric of every GPU in the output of `nvidia-smi -q`; of drivers that do not report it, none."""
    entries = []
    for block in re.split(r"^GPU [0-9A-Fa-f]+:", text, flags=re.MULTILINE)[1:]:
        uuid = re.search(r"^\s+GPU UUID\s+: (\S+)", block, flags=re.MULTILINE)
        section = re.search(r"^(\s+)Fabric\s*\n((?:\1\s+\S.*\n?)+)", block, flags=re.MULTILINE)
        if uuid is None or section is None:
            continue
        fields = dict(re.findall(r"^\s+(\S[^:]*?)\s+: (.*?)\s*$", section.group(2), flags=re.MULTILINE))
        cluster = fields.get("ClusterUUID", "N/A")
        is_alone = cluster == "N/A" or _NO_CLUSTER.fullmatch(cluster) is not None
        clique = fields.get("CliqueId", "N/A")
        entries.append(
            FabricEntry(
                uuid.group(1),
                fields.get("State", "N/A"),
                None if is_alone else cluster,
                None if clique == "N/A" else clique,
            )
        )
    return entries


def fabric_domain(entries: list[FabricEntry], uuid: str) -> Domain | None:
    """The domain of the GPU `uuid`; None where it is in no fabric that is larger than its host."""
    for entry in entries:
        if entry.uuid.removeprefix("GPU-").lower() == uuid.removeprefix("GPU-").lower():
            if entry.state != "Completed" or entry.cluster is None or entry.clique is None:
                return None
            return Domain(f"fabric {entry.cluster}/{entry.clique}", "fabric identifiers of the NVIDIA driver")
    return None


# ---- this process ---------------------------------------------------------------------------------------------------


def rank_table_in(environment: Mapping[str, str]) -> RankTable | None:
    """The rank table that the environment names; None where it names none. Raises as `read_rank_table`."""
    path = environment.get(RANK_TABLE_VARIABLE)
    return read_rank_table(path) if path else None


def own_domain() -> Domain | None:
    """The domain of the device of this process, as its driver tells; None where no driver does. No communication.

    Asks `nvidia-smi` where torch sees a CUDA device.
    """
    tool = shutil.which("nvidia-smi")
    if tool is None or not torch.cuda.is_available():
        return None
    uuid = getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", None)
    if uuid is None:
        return None
    try:
        answer = subprocess.run(
            [tool, "-q"], capture_output=True, text=True, timeout=_ASK_DRIVER_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return fabric_domain(parse_fabric(answer.stdout), str(uuid)) if answer.returncode == 0 else None
