"""Where ranks are: rank tables, fabric identifiers, launchers and host names, on files as vendors' tools write them.

The files in `files/` are our own, after the vendors' documents; none was written by a machine.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hp_plugin.core.devices.domains import Domain, fabric_domain, own_domain, parse_fabric, read_rank_table
from hp_plugin.core.topology import Topology
from hp_plugin.core.topology.detection import Clue, conclude, look_around
from hp_plugin.core.topology.launchers import expand_counts, expand_hosts
from hp_plugin.errors import ConfigurationError
from tests.support import init_gloo, run_ranks

FILES = Path(__file__).parent / "files"
A3, A2 = FILES / "rank_table_a3.json", FILES / "rank_table_a2.json"
NVL72, HGX = FILES / "nvidia_smi_nvl72.txt", FILES / "nvidia_smi_hgx.txt"


# ---- Ascend ---------------------------------------------------------------------------------------------------------


def test_super_pods_of_a_rank_table_are_the_supernodes() -> None:
    topology = Topology.from_rank_table(A3)
    assert topology.supernode_sizes == (32, 32)
    assert topology.ranks_of(1) == tuple(range(32, 64))
    assert "rank_table_a3.json (version 1.2; super pods)" in topology.source


def test_a_table_without_super_pods_gives_its_servers() -> None:
    topology = Topology.from_rank_table(A2)
    assert topology.supernode_sizes == (8, 8)
    assert "servers, since it names no super pod" in topology.source


def changed(tmp_path: Path, change: Any) -> Path:
    table = json.loads(A3.read_text())
    change(table)
    path = tmp_path / "table.json"
    path.write_text(json.dumps(table))
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.update(status="initializing"), "status 'initializing': it is still being filled"),
        (lambda t: t.pop("server_list"), "has no server_list; write one of version 1.0 or 1.2"),
        (lambda t: t.update(server_list=None, group_list=[]), "but a group_list, the form before version 1.0"),
        (lambda t: t["super_pod_list"].pop(), r"servers that are in no super pod: 10\.1\.1\.7, 10\.1\.1\.9"),
        (lambda t: t["server_list"].pop(1), "does not number its 48 ranks from 0 without gaps"),
        (lambda t: t["server_list"][1]["device"][0].update(rank_id="0"), r"rank 0 on two servers, 10\.1\.0\.1 and"),
        (lambda t: t["server_list"][1]["device"][0].update(rank_id="x"), "rank_id 'x' on server"),
        (lambda t: t["server_list"][0].pop("server_id"), "an entry without server_id"),
        (
            lambda t: t["super_pod_list"][1]["server_list"].append({"server_id": "10.1.0.1"}),
            r"server 10\.1\.0\.1 in two super pods, 0 and 1",
        ),
        (lambda t: t.update(server_list=[]), "does not number its 0 ranks"),
    ],
)
def test_a_table_that_contradicts_itself_is_refused(tmp_path: Path, change: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        read_rank_table(changed(tmp_path, change))


def test_a_table_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read: No such file"):
        read_rank_table(tmp_path / "absent.json")
    (tmp_path / "text").write_text("hello")
    with pytest.raises(ConfigurationError, match="is not JSON"):
        read_rank_table(tmp_path / "text")


# ---- NVIDIA ---------------------------------------------------------------------------------------------------------


def test_gpus_of_one_cluster_and_clique_share_a_domain() -> None:
    entries = parse_fabric(NVL72.read_text())
    assert [entry.state for entry in entries] == ["Completed"] * 3 + ["In Progress"]
    found = [fabric_domain(entries, entry.uuid) for entry in entries]
    assert found[0] is not None
    assert found[0] == found[1]
    assert found[2] is not None
    assert found[2].label != found[0].label, "another clique"
    assert found[3] is None, "a GPU that has not joined"


def test_a_uuid_as_torch_writes_it_is_found() -> None:
    entries = parse_fabric(NVL72.read_text())
    assert fabric_domain(entries, entries[0].uuid.removeprefix("GPU-").upper()) == fabric_domain(
        entries, entries[0].uuid
    )
    assert fabric_domain(entries, "GPU-absent") is None


def test_a_cluster_of_zeros_ends_at_the_host() -> None:
    entries = parse_fabric(HGX.read_text())
    assert len(entries) == 2
    assert all(entry.state == "Completed" and entry.cluster is None for entry in entries)
    assert fabric_domain(entries, entries[0].uuid) is None


def test_drivers_that_do_not_report_a_fabric_give_none() -> None:
    text = "\n".join(line for line in HGX.read_text().splitlines() if "Fabric" not in line)
    assert parse_fabric(text) == []
    assert parse_fabric("") == []


def test_without_a_cuda_device_no_driver_is_asked() -> None:
    assert own_domain() is None


# ---- launchers ------------------------------------------------------------------------------------------------------

TORCHRUN = {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8", "RANK": "9", "LOCAL_RANK": "1", "GROUP_RANK": "1"}
SLURM = {
    "SLURM_NTASKS": "20",
    "SLURM_STEP_NODELIST": "gpu[07-08,12]",
    "SLURM_STEP_TASKS_PER_NODE": "8(x2),4",
    "SLURM_JOB_NODELIST": "gpu[07-12]",
    "SLURM_TASKS_PER_NODE": "8(x6)",
    "SLURM_DISTRIBUTION": "block",
}


def test_torchrun_says_which_ranks_share_a_node() -> None:
    assert Topology.from_torchrun(TORCHRUN).supernode_sizes == (8, 8)


@pytest.mark.parametrize("change", [{"GROUP_RANK": ""}, {"LOCAL_WORLD_SIZE": "6"}, {"RANK": "7"}])
def test_nodes_of_different_sizes_and_missing_variables_are_refused(change: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError, match="torchrun"):
        Topology.from_torchrun({**TORCHRUN, **change})


def test_slurm_says_which_ranks_share_a_node() -> None:
    topology = Topology.from_slurm(SLURM)
    assert topology.supernode_sizes == (8, 8, 4)
    assert topology.ranks_of(2) == (16, 17, 18, 19)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"SLURM_DISTRIBUTION": "cyclic:cyclic"}, "--distribution=cyclic; neighbouring ranks"),
        ({"SLURM_NTASKS": "24"}, "3 nodes with 3 counts of tasks, 20 in all, for 24"),
        ({"SLURM_STEP_TASKS_PER_NODE": "8(x3"}, "cannot be read"),
        ({"SLURM_STEP_NODELIST": "", "SLURM_JOB_NODELIST": ""}, "this is no Slurm job"),
        ({"SLURM_NTASKS": ""}, "SLURM_NTASKS is ''"),
    ],
)
def test_what_slurm_says_must_fit_together(change: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Topology.from_slurm({**SLURM, **change})


def test_lists_of_hosts_and_counts() -> None:
    assert expand_hosts("n[01-03,7],gpu1") == ["n01", "n02", "n03", "n7", "gpu1"]
    assert expand_hosts("r[1-2]n[8-10]-ib") == ["r1n8-ib", "r1n9-ib", "r1n10-ib", "r2n8-ib", "r2n9-ib", "r2n10-ib"]
    assert expand_hosts("login") == ["login"]
    assert expand_counts("8(x2),4") == [8, 8, 4]
    for wrong in ("n[3-1]", "n[1-2", "n1-2]", "n[a-b]", ""):
        with pytest.raises(ConfigurationError, match="cannot be read"):
            expand_hosts(wrong)


# ---- what all ranks know --------------------------------------------------------------------------------------------

HOSTS = [Clue("a", "1"), Clue("a", "1"), Clue("b", "2"), Clue("b", "2")]


def with_fabric(clue: Clue, label: str) -> Clue:
    return replace(clue, fabric=Domain(label, "fabric identifiers"))


def with_table(clue: Clue, label: str, ranks: int = 4) -> Clue:
    return replace(clue, table=Domain(label, "the rank table"), table_ranks=ranks)


def test_the_table_comes_before_the_fabric_and_the_fabric_before_hosts() -> None:
    assert conclude(HOSTS) == (["a", "a", "b", "b"], "host names (2 different)")
    fabric = [with_fabric(clue, "x") for clue in HOSTS]
    assert conclude(fabric) == (["x"] * 4, "fabric identifiers")
    tables = [with_table(clue, label) for clue, label in zip(fabric, "ppqq")]
    assert conclude(tables) == (["p", "p", "q", "q"], "the rank table")


def test_machines_of_one_name_are_told_apart() -> None:
    labels, source = conclude([Clue("box", "1"), Clue("box", "1"), Clue("box", "2"), Clue("other", "3")])
    assert labels[0] == labels[1] != labels[2]
    assert len(set(labels)) == 3
    assert "several machines are called box" in source


def test_a_fabric_that_some_ranks_lack_does_not_decide() -> None:
    labels, source = conclude([with_fabric(HOSTS[0], "x"), *HOSTS[1:]])
    assert labels == ["a", "a", "b", "b"]
    assert "3 of 4 ranks are in no fabric" in source


@pytest.mark.parametrize(
    ("clues", "message"),
    [
        ([with_table(HOSTS[0], "p"), *HOSTS[1:]], "is set on rank 0 and not on rank 1"),
        ([with_table(clue, "p", ranks=8) for clue in HOSTS], "a table of 8 ranks, but the job has 4"),
        ([*HOSTS[:2], replace(HOSTS[2], problem="the rank table t is not JSON"), HOSTS[3]], "rank 2: the rank table t"),
    ],
)
def test_a_table_that_does_not_fit_the_job_is_refused(clues: list[Clue], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        conclude(clues)


def test_a_rank_states_its_domain_or_its_problem() -> None:
    clue = look_around(33, {"RANK_TABLE_FILE": str(A3)})
    assert (clue.table, clue.table_ranks) == (Domain("1", read_rank_table(A3).source), 64)
    assert look_around(0, {}).table is None
    problem = look_around(0, {"RANK_TABLE_FILE": "absent"}).problem
    assert problem is not None
    assert "absent cannot be read" in problem


def detect() -> tuple[Topology | str, ...]:
    init_gloo()
    try:
        return (Topology.detect(),)
    except ConfigurationError as error:
        return (str(error),)


def test_ranks_of_a_job_find_the_super_pods_of_its_table(tmp_path: Path) -> None:
    table = {
        "version": "1.2",
        "server_list": [{"server_id": str(n), "device": [{"rank_id": str(n)}]} for n in range(4)],
        "super_pod_list": [
            {"super_pod_id": "first", "server_list": [{"server_id": "0"}, {"server_id": "2"}]},
            {"super_pod_id": "second", "server_list": [{"server_id": "1"}, {"server_id": "3"}]},
        ],
    }
    path = tmp_path / "table.json"
    path.write_text(json.dumps(table))
    for (found,) in run_ranks(4, detect, env={"RANK_TABLE_FILE": str(path)}):
        assert isinstance(found, Topology)
        assert found.supernode_of == (0, 1, 0, 1)
