"""Which node each rank of a job runs on, as launchers tell it in the environment, without asking the other ranks."""

from __future__ import annotations

import re
from collections.abc import Mapping

from hp_plugin.errors import ConfigurationError


def nodes_of_torchrun(environment: Mapping[str, str]) -> list[str]:
    """The node of every rank of a job that torchrun started with as many processes on each node.

    Raises:
        ConfigurationError: Variables are missing, or nodes have different numbers of processes.
    """
    world, local, rank, local_rank, node = _numbers(
        environment, ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK", "LOCAL_RANK", "GROUP_RANK"), "torchrun"
    )
    if world % local or rank != node * local + local_rank:
        raise ConfigurationError(
            f"torchrun says that rank {rank} of {world} is process {local_rank} of {local} on node {node}, so nodes "
            'have different numbers of processes; supernode_size="auto" asks every rank instead'
        )
    return [f"node {rank // local}" for rank in range(world)]


def nodes_of_slurm(environment: Mapping[str, str]) -> list[str]:
    """The node of every task of a Slurm step whose tasks are laid out node by node (`--distribution=block`).

    Raises:
        ConfigurationError: Variables are missing, contradict one another, or tasks are laid out in another way.
    """
    nodes = expand_hosts(_either(environment, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"))
    counts = expand_counts(_either(environment, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"))
    (world,) = _numbers(environment, ("SLURM_NTASKS",), "Slurm")
    way = environment.get("SLURM_DISTRIBUTION", "block").split(":")[0].split(",")[0]
    if way not in ("block", "*"):
        raise ConfigurationError(
            f"Slurm lays tasks out by --distribution={way}; neighbouring ranks are then on different nodes. Use "
            "--distribution=block"
        )
    if len(nodes) != len(counts) or sum(counts) != world:
        raise ConfigurationError(
            f"Slurm names {len(nodes)} nodes with {len(counts)} counts of tasks, {sum(counts)} in all, for {world} "
            "tasks; start the job with srun, which sets these variables for the step"
        )
    return [node for node, count in zip(nodes, counts) for _ in range(count)]


def expand_hosts(text: str) -> list[str]:
    """Host names of a Slurm list: `n[01-03,7],gpu1` is `n01, n02, n03, n7, gpu1`.

    Raises:
        ConfigurationError: Brackets do not match, or a range runs backwards.
    """
    hosts: list[str] = []
    for entry in re.findall(r"(?:\[[^\[\]]*\]|[^,\[\]])+", text):
        names = [""]
        for fixed, ranges in re.findall(r"([^\[\]]+)|\[([^\[\]]*)\]", entry):
            parts = [fixed] if fixed else _expand_ranges(ranges, text)
            names = [name + part for name in names for part in parts]
        hosts += names
    if not hosts or re.sub(r"\[[^\[\]]*\]", "", text).count("[") or re.sub(r"\[[^\[\]]*\]", "", text).count("]"):
        raise ConfigurationError(f"the list of hosts {text!r} cannot be read")
    return hosts


def expand_counts(text: str) -> list[int]:
    """Numbers of a Slurm list: `8(x3),4` is `8, 8, 8, 4`."""
    counts: list[int] = []
    for entry in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", entry.strip())
        if match is None:
            raise ConfigurationError(f"the list of tasks for each node {text!r} cannot be read")
        counts += [int(match.group(1))] * int(match.group(2) or 1)
    return counts


def _expand_ranges(text: str, whole: str) -> list[str]:
    names = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        first, last = (match.group(1), match.group(2) or match.group(1)) if match else ("1", "0")
        if int(first) > int(last):
            raise ConfigurationError(f"the list of hosts {whole!r} cannot be read")
        names += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return names


def _either(environment: Mapping[str, str], *names: str) -> str:
    for name in names:
        if environment.get(name):
            return environment[name]
    raise ConfigurationError(f"none of {', '.join(names)} is set: this is no Slurm job")


def _numbers(environment: Mapping[str, str], names: tuple[str, ...], launcher: str) -> list[int]:
    found = []
    for name in names:
        value = environment.get(name, "")
        if not value.isdecimal():
            raise ConfigurationError(f"{name} is {value!r}, but {launcher} sets it to a number")
        found.append(int(value))
    return found
