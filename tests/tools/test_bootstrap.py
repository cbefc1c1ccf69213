"""tools/bootstrap.sh: candidates are run before they are believed, and a set-up is complete or it is not there."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
COMPLETE = "complete "


def write_executable(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n" + body)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def fake_python(path: Path, version: tuple[int, int, int]) -> Path:
    """A script that answers the probe as this version of Python would."""
    major, minor, micro = version
    hexversion = (major << 24) | (minor << 16) | (micro << 8) | 0xF0
    return write_executable(path, f'echo "{major * 100 + minor} {hexversion} {path}"\n')


def fake_shim(path: Path) -> Path:
    """What pyenv leaves in PATH for a version that is installed and not selected."""
    return write_executable(path, f'echo "pyenv: {path.name}: command not found" >&2\nexit 127\n')


class Machine:
    """A home folder and a PATH of their own: nothing of the real machine's interpreters is seen."""

    def __init__(self, root: Path) -> None:
        self.bin = root / "bin"
        self.home = root / "home"
        self.bin.mkdir()
        self.home.mkdir()
        tools = root / "tools"
        tools.mkdir()
        for name in ("cat", "cksum", "dirname", "find", "head", "ls", "mkdir", "mv", "rm", "sleep", "tail", "tr"):
            (tools / name).symlink_to(next(p for p in (Path("/bin") / name, Path("/usr/bin") / name) if p.exists()))
        self.environment = {"PATH": f"{self.bin}:{tools}", "HOME": str(self.home), "CONDA_ROOT": str(root / "no-conda")}

    def run(self, *arguments: str, script: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["/bin/sh", str(script or REPOSITORY / "tools" / "bootstrap.sh"), *arguments],
            env={**self.environment, **variables},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_newest_suitable_python_wins_wherever_it_is(machine: Machine) -> None:
    fake_python(machine.bin / "python3.12", (3, 12, 9))
    newest = fake_python(machine.home / ".pyenv/versions/3.13.1/bin/python3", (3, 13, 1))
    fake_python(machine.home / ".local/share/uv/python/cpython-3.13.0/bin/python3", (3, 13, 0))
    result = machine.run("find", "reference")
    assert (result.returncode, result.stdout) == (0, f"{newest}\n")


@pytest.mark.parametrize(
    "place",
    [
        ".pyenv/versions/3.12.1/bin/python3",
        ".local/share/uv/python/cpython-3.12.1/bin/python3",
        "miniconda3/bin/python3",
        "miniforge3/envs/work/bin/python3",
    ],
)
def test_python_outside_path_is_found(machine: Machine, place: str) -> None:
    expected = fake_python(machine.home / place, (3, 12, 1))
    assert machine.run("find", "reference").stdout == f"{expected}\n"


def test_shim_that_fails_is_passed_over(machine: Machine) -> None:
    fake_shim(machine.bin / "python3.12")
    expected = fake_python(machine.home / ".pyenv/versions/3.12.1/bin/python3", (3, 12, 1))
    assert machine.run("find", "reference").stdout == f"{expected}\n"


def test_what_a_command_is_called_does_not_count(machine: Machine) -> None:
    fake_python(machine.bin / "python3.12", (3, 11, 7))
    expected = fake_python(machine.bin / "python3", (3, 12, 4))
    assert machine.run("find", "reference").stdout == f"{expected}\n"


def test_paths_with_spaces_are_kept_whole(machine: Machine) -> None:
    expected = fake_python(machine.home / "my pythons/bin/python3", (3, 12, 1))
    result = machine.run("find", "reference", PATH=f"{machine.home}/my pythons/bin:{machine.environment['PATH']}")
    assert result.stdout == f"{expected}\n"


def test_none_suitable_is_one_sentence_and_a_list_of_what_was_seen(machine: Machine) -> None:
    fake_shim(machine.bin / "python3.13")
    fake_python(machine.bin / "python3", (3, 9, 2))
    fake_python(machine.bin / "python", (3, 14, 0))
    result = machine.run("find", "reference")
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr.startswith("error: Python 3.12 or 3.13 is needed and was not found. Install it")
    assert "python3.13: pyenv: python3.13: command not found" in result.stderr
    assert f"{machine.bin}/python3: is Python 3.9" in result.stderr
    assert f"{machine.bin}/python: is Python 3.14" in result.stderr


def test_machine_without_python_is_told_so(machine: Machine) -> None:
    result = machine.run("find", "reference")
    assert result.returncode == 1
    assert "no Python at all" in result.stderr


def test_forced_python_is_the_only_candidate(machine: Machine) -> None:
    fake_python(machine.bin / "python3.12", (3, 12, 9))
    old = fake_python(machine.home / "old", (3, 8, 1))
    good = fake_python(machine.home / "good", (3, 12, 0))
    assert machine.run("find", "reference", PYTHON=str(good)).stdout == f"{good}\n"
    refused = machine.run("find", "reference", PYTHON=str(old))
    assert refused.returncode == 1
    assert f"{old}: is Python 3.8" in refused.stderr
    absent = machine.run("find", "reference", PYTHON=str(machine.home / "absent"))
    assert absent.returncode == 1
    assert "does not exist or cannot be run" in absent.stderr


@pytest.mark.parametrize(("profile", "version"), [("compat", (3, 10, 13)), ("compat-3.11", (3, 11, 7))])
def test_compat_profiles_take_their_own_python_only(
    machine: Machine, profile: str, version: tuple[int, int, int]
) -> None:
    fake_python(machine.bin / "python3.12", (3, 12, 9))
    places = {(3, minor, micro): machine.home / f".pyenv/versions/3.{minor}.{micro}/bin/python3"
              for _, minor, micro in ((3, 10, 13), (3, 11, 7))}  # fmt: skip
    for each, place in places.items():
        fake_python(place, each)
    assert machine.run("find", profile).stdout == f"{places[version]}\n"


def test_unknown_profile_and_missing_arguments_are_refused(machine: Machine) -> None:
    assert "unknown profile 'other'" in machine.run("find", "other").stderr
    assert machine.run("find", "other").returncode == 1
    assert "usage:" in machine.run("setup", "reference").stderr


class Project:
    """A copy of what the script reads, and a Python whose environments log what is asked of pip."""

    def __init__(self, root: Path, machine: Machine) -> None:
        self.root = root / "project"
        self.log = root / "pip.log"
        self.log.touch()
        self.folder = root / "environment"
        self.machine = machine
        for name in (
            "pyproject.toml",
            "CMakeLists.txt",
            "tools/constraints.txt",
            "tools/constraints-compat.txt",
            "tools/constraints-compat-3.11.txt",
            "hp_plugin/_version.py",
            "native/code.c",
        ):
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(name)
        self.script = self.root / "tools" / "bootstrap.sh"
        self.script.write_bytes((REPOSITORY / "tools" / "bootstrap.sh").read_bytes())
        inner = root / "inner-python"
        write_executable(
            inner,
            f"""case "$*" in
            *"pip install"*"--no-deps"*)
                for word; do :; done
                echo "$word" >>"{self.log}" ;;
            *"pip install"*)
                echo started >>"{self.log}"
                sleep "${{PIP_SECONDS:-0}}"
                [ -z "${{PIP_FAILS:-}}" ] || exit 1
                echo finished >>"{self.log}" ;;
            *native_status*) echo "native says so" ;;
            esac
            """,
        )
        for version in ("3.12", "3.11", "3.10"):
            self.write_python(machine.bin / f"python{version}", version.replace(".", ""), inner)
        (root / "tools" / "chmod").symlink_to("/bin/chmod")

    @staticmethod
    def write_python(place: Path, version: str, inner: Path) -> None:
        write_executable(
            place,
            f"""case "$*" in
            *ensurepip*) echo "{version} 51118320 {place}" ;;
            *fcntl*) shift 3; exec "{REAL_PYTHON}" -I -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX)' ;;
            "-m venv "*) mkdir -p "$3/bin"; cat "{inner}" >"$3/bin/python"; chmod +x "$3/bin/python" ;;
            *) echo 3.12.0 ;;
            esac
            """,
        )

    def setup(self, profile: str = "reference", **variables: str) -> subprocess.CompletedProcess[str]:
        return self.machine.run("setup", profile, str(self.folder), script=self.script, **variables)

    @property
    def record(self) -> Path:
        return self.folder / ".hp-plugin-environment"

    def log_lines(self) -> list[str]:
        return self.log.read_text().split()


REAL_PYTHON = os.path.realpath(sys.executable)


@pytest.fixture
def project(tmp_path: Path, machine: Machine) -> Project:
    return Project(tmp_path, machine)


def test_second_setup_does_nothing(project: Project) -> None:
    first = project.setup()
    assert first.returncode == 0, first.stderr
    assert "native says so" in first.stderr
    assert project.record.read_text().startswith(COMPLETE)
    second = project.setup()
    assert (second.returncode, second.stdout, second.stderr) == (0, "", "")
    assert project.log_lines() == ["started", "finished"]


@pytest.mark.parametrize(("profile", "megatron"), [("compat", "0.12.1"), ("compat-3.11", "0.16.1")])
def test_compat_profiles_install_megatron_core_without_what_it_declares(
    project: Project, profile: str, megatron: str
) -> None:
    done = project.setup(profile)
    assert done.returncode == 0, done.stderr
    assert project.log_lines() == ["started", "finished", f"megatron-core=={megatron}"]
    assert project.setup(profile).stderr == ""


def test_failed_installation_is_not_recorded_and_redone_from_nothing(project: Project) -> None:
    failed = project.setup(PIP_FAILS="1")
    assert failed.returncode == 1
    assert "the installation failed" in failed.stderr
    assert project.record.read_text() == "incomplete\n"
    left_over = project.folder / "half-installed"
    left_over.touch()
    assert project.setup().returncode == 0
    assert not left_over.exists()
    assert project.record.read_text().startswith(COMPLETE)


def test_killed_setup_is_redone(project: Project) -> None:
    process = subprocess.Popen(
        ["/bin/sh", str(project.script), "setup", "reference", str(project.folder)],
        env={**project.machine.environment, "PIP_SECONDS": "60"},
        start_new_session=True,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: project.log_lines() == ["started"])
    finally:
        os.killpg(process.pid, 9)
        process.wait(timeout=30)
    assert project.setup().returncode == 0
    assert project.log_lines() == ["started", "started", "finished"]


def test_two_setups_at_once_install_once(project: Project) -> None:
    command = ["/bin/sh", str(project.script), "setup", "reference", str(project.folder)]
    environment = {**project.machine.environment, "PIP_SECONDS": "1"}
    processes = [subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) for _ in range(3)]
    assert [process.wait(timeout=60) for process in processes] == [0, 0, 0]
    assert project.log_lines() == ["started", "finished"]


def test_changed_package_is_installed_again_in_place(project: Project) -> None:
    assert project.setup().returncode == 0
    kept = project.folder / "kept"
    kept.touch()
    (project.root / "native" / "code.c").write_text("changed")
    assert "the package changed" in project.setup().stderr
    assert kept.exists()
    assert project.log_lines() == ["started", "finished"] * 2


def test_changed_pins_make_a_new_environment(project: Project) -> None:
    assert project.setup().returncode == 0
    outdated = project.folder / "outdated"
    outdated.touch()
    (project.root / "tools" / "constraints.txt").write_text("changed")
    assert project.setup().returncode == 0
    assert not outdated.exists()


def test_environment_whose_python_is_gone_is_made_again(project: Project) -> None:
    assert project.setup().returncode == 0
    (project.folder / "bin" / "python").unlink()
    assert project.setup().returncode == 0
    assert (project.folder / "bin" / "python").exists()


def test_foreign_folder_is_left_alone(project: Project) -> None:
    precious = project.folder / "thesis.tex"
    precious.parent.mkdir()
    precious.touch()
    result = project.setup()
    assert result.returncode == 1
    assert "left alone" in result.stderr
    assert precious.exists()
    assert project.log_lines() == []


def wait_until(condition, seconds: float = 30.0) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.02)
