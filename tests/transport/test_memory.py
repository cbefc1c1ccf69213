"""What a host can still give, from files as kernels write them, and from user limits."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from hp_plugin.core.transport.shm import memory
from hp_plugin.core.transport.shm.memory import shortage

Write = Callable[[str, str], None]
MIB = 1 << 20


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes files of a host on which every path lies under the temporary directory. There are none at first."""
    monkeypatch.setattr(memory, "Path", lambda path: tmp_path / str(path).lstrip("/"))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    def write_file(path: str, text: str) -> None:
        file = tmp_path / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    return write_file


def write_group(write: Write, folder: str, *, limit: str, used: int, cached: int = 0) -> None:
    """A control group of version 2."""
    write(f"/sys/fs/cgroup/{folder}/memory.max", f"{limit}\n")
    write(f"/sys/fs/cgroup/{folder}/memory.current", f"{used}\n")
    write(f"/sys/fs/cgroup/{folder}/memory.stat", f"anon 1\nfile 7\ninactive_file {cached}\n")


def write_old_group(write: Write, folder: str, *, limit: int, used: int, cached: int = 0) -> None:
    """A control group of version 1."""
    write(f"/sys/fs/cgroup/memory/{folder}/memory.limit_in_bytes", f"{limit}\n")
    write(f"/sys/fs/cgroup/memory/{folder}/memory.usage_in_bytes", f"{used}\n")
    write(f"/sys/fs/cgroup/memory/{folder}/memory.stat", f"cache 5\ntotal_inactive_file {cached}\n")


@pytest.mark.usefixtures("write")
def test_a_host_that_says_nothing_is_believed_to_have_enough() -> None:
    assert shortage(1 << 50) is None


def test_the_host_has_what_the_kernel_calls_available(write: Write) -> None:
    write("/proc/meminfo", "MemTotal:  8192 kB\nMemFree:  1 kB\nMemAvailable:    2048 kB\n")
    assert shortage(2 * MIB) is None
    assert shortage(2 * MIB + 1) == "this host has 2.0 MiB left"


def test_this_host_is_asked() -> None:
    assert shortage(1 << 50) is not None
    assert shortage(4096) is None


def test_the_tightest_group_around_the_process_decides(write: Write) -> None:
    write("/proc/self/cgroup", "0::/jobs/one/task\n")
    write_group(write, "jobs/one/task", limit="max", used=MIB)
    write_group(write, "jobs/one", limit=str(10 * MIB), used=8 * MIB, cached=MIB)
    write_group(write, "jobs", limit=str(100 * MIB), used=8 * MIB)
    write_group(write, "elsewhere", limit="1", used=1)
    assert shortage(3 * MIB) is None
    assert shortage(3 * MIB + 1) == "the control group of this job has 3.0 MiB left"


def test_in_a_container_the_group_is_the_root(write: Write) -> None:
    write("/proc/self/cgroup", "0::/docker/0123\n")  # the path outside, of which nothing is mounted
    write_group(write, ".", limit=str(5 * MIB), used=4 * MIB)
    assert shortage(MIB) is None
    assert shortage(MIB + 1) == "the control group of this job has 1.0 MiB left"


def test_a_group_that_is_over_its_limit_has_nothing(write: Write) -> None:
    write("/proc/self/cgroup", "0::/\n")
    write_group(write, ".", limit="10", used=20)
    assert shortage(1) == "the control group of this job has 0.0 MiB left"


def test_groups_of_the_old_version_count_too(write: Write) -> None:
    write("/proc/self/cgroup", "5:cpu,cpuacct:/a\n4:memory:/a/b:c\n0::/\n")
    write_old_group(write, "a/b:c", limit=9223372036854771712, used=MIB)
    write_old_group(write, "a", limit=6 * MIB, used=5 * MIB, cached=MIB)
    assert shortage(2 * MIB) is None
    assert shortage(2 * MIB + 1) == "the control group of this job has 2.0 MiB left"


def test_files_that_cannot_be_understood_do_not_stop_a_job(write: Write) -> None:
    write("/proc/meminfo", "MemAvailable:\n")
    write("/proc/self/cgroup", "nonsense\n")
    assert shortage(1 << 50) is None


def test_the_user_limit_on_file_sizes_counts(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    write("/proc/meminfo", "MemAvailable:    20480 kB\n")
    limits = {resource.RLIMIT_FSIZE: (3 * MIB, resource.RLIM_INFINITY)}
    monkeypatch.setattr(resource, "getrlimit", limits.__getitem__)
    assert shortage(3 * MIB) is None
    assert shortage(3 * MIB + 1) == "the user limit on file sizes (ulimit -f) is 3.0 MiB; raise it"
