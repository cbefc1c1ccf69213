"""The testbed: what its link delivers, how its runs end, and that nothing of it stays behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from bench import cli
from bench.errors import UnavailableError
from bench.testbed import RanksFailedError, Testbed, commands, delay, parse_rate, why_unavailable
from bench.testbed.leftovers import remove_leftovers
from bench.testbed.names import is_ownerless, namespaces, new_prefix
from tests.bench.programs import MESSAGE_BYTES, MESSAGES, PINGS

REPOSITORY = Path(__file__).resolve().parents[2]
TOOL = """
import sys
from bench.testbed import Testbed

with Testbed() as testbed:
    print(testbed._prefix, flush=True)
    testbed.run([sys.executable, "-m", "tests.bench.programs", "hang"])
"""


@pytest.fixture(scope="module")
def namespaces_allowed() -> None:
    if reason := why_unavailable():
        pytest.skip(reason)


@pytest.fixture(scope="module")
def delay_allowed() -> None:
    if reason := why_unavailable(delay=True):
        pytest.skip(reason)


def program(name: str) -> list[str]:
    return [sys.executable, "-m", "tests.bench.programs", name]


def of_prefix(prefix: str) -> list[str]:
    """What exists of a testbed: namespaces and temporary directories."""
    directories = [entry.name for entry in Path(tempfile.gettempdir()).iterdir()]
    return [name for name in [*namespaces(), *directories] if name.startswith(prefix)]


def wait_until_gone(pids: list[int], *, limit_s: float = 10.0) -> list[int]:
    """Those of `pids` that still live after the limit."""

    def lives(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
        except OSError:
            return False

    limit = time.monotonic() + limit_s
    while (living := list(filter(lives, pids))) and time.monotonic() < limit:
        time.sleep(0.02)
    return living


# ---------------------------------------------------------------------------------------------------------- the link


def seconds_per_message(testbed: Testbed) -> list[float]:
    """Seconds from the start of each message to its last byte on the other side."""
    sender, receiver = testbed.run(program("stream"), timeout=60.0)
    seconds = [last - first for first, last in zip(sender.value, receiver.value)]
    assert len(seconds) == MESSAGES
    return seconds


@pytest.mark.usefixtures("namespaces_allowed")
@pytest.mark.parametrize("rate_mbit", [200.0, 1000.0])
def test_link_is_never_faster_than_its_rate_and_reaches_it(rate_mbit: float) -> None:
    with Testbed(ranks_per_supernode=1, rate_mbit=rate_mbit) as testbed:
        seconds = seconds_per_message(testbed)
    nominal = MESSAGE_BYTES * 8 / (rate_mbit * 1e6)
    full_bucket = max(80_000 * 8 / (rate_mbit * 1e6), 2.1e-3)  # passes at once after a pause
    assert min(seconds) >= nominal - full_bucket, (seconds, nominal)
    # On a loaded machine messages are late; the best of them shows what the link can do.
    assert min(seconds) <= nominal * (1.3 if rate_mbit < 500 else 2.0), (seconds, nominal)


@pytest.mark.usefixtures("namespaces_allowed")
def test_link_without_a_rate_is_not_limited() -> None:
    with Testbed(ranks_per_supernode=1, rate_mbit=None) as testbed:
        seconds = seconds_per_message(testbed)
    assert min(seconds) < MESSAGE_BYTES * 8 / 1000e6


@pytest.mark.usefixtures("delay_allowed")
def test_delayed_link_delays_each_way_and_keeps_its_rate() -> None:
    with Testbed(ranks_per_supernode=1, rate_mbit=200.0, delay_ms=5.0) as testbed:
        prefix = testbed._prefix
        round_trips = testbed.run(program("ping"), timeout=60.0)[1].value
        seconds = seconds_per_message(testbed)
        moved = testbed.link_bytes()
    assert len(round_trips) == PINGS
    assert min(round_trips) >= 10e-3
    assert min(round_trips) < 20e-3, "one of the pings is hardly later than twice the delay"
    nominal = MESSAGE_BYTES * 8 / 200e6
    assert min(seconds) >= nominal + 5e-3
    assert min(seconds) <= nominal * 1.5
    payload = MESSAGES * MESSAGE_BYTES
    assert payload <= moved[0].sent <= payload * 1.1
    assert 0 <= moved[0].sent - moved[1].received < 10_000, "what is still on its way, at most"
    assert not of_prefix(prefix)


@pytest.mark.usefixtures("delay_allowed")
def test_delayed_link_joins_more_than_two_supernodes() -> None:
    with Testbed(supernodes=3, ranks_per_supernode=1, delay_ms=1.0) as testbed:
        results = testbed.run(program("meet"), timeout=60.0)
    assert results[0].value["met"] == {"supernode1": "10.77.0.2", "supernode2": "10.77.0.3"}


@pytest.mark.usefixtures("namespaces_allowed")
@pytest.mark.parametrize("supernodes", [2, 3])
def test_link_counters_agree_with_the_closed_form_of_an_all_reduce(supernodes: int) -> None:
    with Testbed(supernodes=supernodes, ranks_per_supernode=1) as testbed:
        before = testbed.link_bytes()
        results = testbed.run(program("all_reduce"), timeout=120.0, show=False)
        whole = [now - then for now, then in zip(testbed.link_bytes(), before)]
    for result, moved in zip(results, whole):
        expected = 2 * (supernodes - 1) / supernodes * result.value["payload"]
        assert result.value["sent"] == pytest.approx(expected, rel=0.05)
        assert result.value["received"] == pytest.approx(expected, rel=0.05)
        # Seen from outside there is the warm-up as well: a fifth all-reduce.
        assert moved.sent == pytest.approx(1.25 * expected, rel=0.05)
        assert moved.received == pytest.approx(1.25 * expected, rel=0.05)


# ---------------------------------------------------------------------------------------------------------- the runs


@pytest.mark.usefixtures("namespaces_allowed")
@pytest.mark.parametrize(("supernodes", "ranks"), [(2, 2), (4, 1), (1, 4)])
def test_ranks_of_every_layout_meet_and_know_their_place(
    supernodes: int, ranks: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with Testbed(supernodes=supernodes, ranks_per_supernode=ranks) as testbed:
        results = testbed.run(program("meet"), env={"EXTRA": "given"}, timeout=60.0)
        linked = any(moved.sent > 0 for moved in testbed.link_bytes())
    assert linked == (supernodes > 1)
    for rank, result in enumerate(results):
        assert result.exit_code == 0
        assert result.value["supernode"] == rank // ranks
        assert result.value["host"] == f"supernode{rank // ranks}"
        assert result.value["env"] == {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank % ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "WORLD_SIZE": str(supernodes * ranks),
            "GROUP_RANK": str(rank // ranks),
            "OMP_NUM_THREADS": "1",
            "EXTRA": "given",
        }
    hosts = {f"supernode{rank // ranks}" for rank in range(1, supernodes * ranks)}
    assert set(results[0].value["met"]) == hosts
    shown = capsys.readouterr().out
    assert "rank 0 has met everybody" in shown
    assert "rank 1" not in shown
    assert results[1].stdout == "rank 1 has met everybody\n"


@pytest.mark.usefixtures("namespaces_allowed")
def test_two_testbeds_do_not_disturb_one_another() -> None:
    with Testbed(ranks_per_supernode=1) as outer:
        with Testbed(ranks_per_supernode=1) as inner:
            inner.run(program("ping"), timeout=60.0)
            assert inner.link_bytes()[0].sent > 0
            assert outer.link_bytes()[0].sent < 2000, "no more than what the kernel itself says on a new link"
        outer.run(program("ping"), timeout=60.0)
        assert not of_prefix(inner._prefix)


@pytest.mark.usefixtures("namespaces_allowed")
def test_first_failure_ends_all_ranks_and_is_shown() -> None:
    started = time.monotonic()
    with Testbed(supernodes=1) as testbed, pytest.raises(RanksFailedError, match=r"failed on ranks \[1\]") as failure:
        testbed.run(program("fail"), timeout=120.0)
    assert time.monotonic() - started < 30.0
    assert failure.value.failed == [1]
    assert not failure.value.timed_out
    assert [result.exit_code for result in failure.value.results] == [-signal.SIGKILL, 1]
    assert "about to fail" in str(failure.value)
    assert "ValueError: rank 1 was told to fail" in str(failure.value)
    assert failure.value.exit_code == 1


@pytest.mark.usefixtures("namespaces_allowed")
def test_time_limit_ends_all_ranks() -> None:
    with (
        Testbed(supernodes=1) as testbed,
        pytest.raises(RanksFailedError, match="did not finish within 2 s") as failure,
    ):
        testbed.run(program("hang"), timeout=2.0)
    assert failure.value.timed_out
    pids = [int(result.stdout) for result in failure.value.results if result.stdout]
    assert not wait_until_gone(pids)


# ------------------------------------------------------------------------------------------------------- its removal


@pytest.mark.usefixtures("namespaces_allowed")
def test_exception_in_the_block_removes_the_testbed() -> None:
    testbed = Testbed(supernodes=3)
    found: list[str] = []
    with pytest.raises(KeyError), testbed:
        raise KeyError(found.extend(of_prefix(testbed._prefix)))
    assert len(found) == 5, "three supernodes, a switch and a directory"
    assert not of_prefix(testbed._prefix)
    with pytest.raises(RuntimeError, match="not open"):
        testbed.run(program("meet"))


@pytest.mark.usefixtures("namespaces_allowed")
def test_failure_while_it_is_made_removes_what_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    before = of_prefix("hptb-")
    monkeypatch.setattr("bench.testbed.network._SMALLEST_BURST", -1)
    monkeypatch.setattr("bench.testbed.network._BURST_S", -1.0)
    with pytest.raises(UnavailableError, match=r"`tc qdisc replace .*` said: .*burst"), Testbed():
        pass
    assert of_prefix("hptb-") == before


def start_tool() -> tuple[subprocess.Popen[str], str, list[int]]:
    """A process with an open testbed and running ranks; its prefix, and the pids of all its ranks."""
    tool = subprocess.Popen([sys.executable, "-c", TOOL], stdout=subprocess.PIPE, text=True, cwd=REPOSITORY)
    assert tool.stdout is not None
    prefix = tool.stdout.readline().strip()
    assert tool.stdout.readline(), "rank 0 says its pid once it runs"
    pids = [int(word) for index in range(2) for word in commands.ip("netns", "pids", f"{prefix}-s{index}").split()]
    assert pids
    return tool, prefix, pids


@pytest.mark.usefixtures("namespaces_allowed")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP], ids=lambda number: number.name)
def test_signal_removes_the_testbed_and_its_ranks(number: signal.Signals) -> None:
    tool, prefix, pids = start_tool()
    try:
        limit = time.monotonic() + 20.0
        while tool.poll() is None and time.monotonic() < limit:  # impatience must not leave half of it behind
            tool.send_signal(number)
            time.sleep(0.01)
    finally:
        tool.kill()
        tool.communicate()
    assert tool.returncode in (128 + number, -number)
    assert not wait_until_gone(pids)
    assert not of_prefix(prefix)


@pytest.mark.usefixtures("namespaces_allowed")
def test_killed_tool_takes_its_ranks_along_and_the_rest_is_removed_later() -> None:
    tool, prefix, pids = start_tool()
    with Testbed(supernodes=1) as living:
        tool.kill()
        tool.communicate()
        assert not wait_until_gone(pids)
        assert of_prefix(prefix), "nobody was left to remove it"
        removed = remove_leftovers()
        assert {f"{prefix}-s0", f"{prefix}-s1"} <= set(removed)
        assert not of_prefix(prefix)
        assert of_prefix(living._prefix), "the owner of this one lives"


def test_only_names_of_dead_processes_are_ownerless() -> None:
    own = new_prefix()
    assert new_prefix() != own
    assert not is_ownerless(f"{own}-s0")
    _, pid, started, _ = own.split("-")
    assert is_ownerless(f"hptb-{pid}-{int(started) + 1}-0-s0"), "a later process with the same pid"
    assert is_ownerless(f"hptb-{2**22 + 1}-1-0-s0")
    assert not is_ownerless("hptb-of-somebody-else")
    assert not is_ownerless("hpsn0")


# ---------------------------------------------------------------------------------------------------------- refusals


def test_user_without_root_gets_a_sentence_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(SystemExit) as left:
        cli.main(["link", "--quick"])
    assert left.value.code == 2
    said = capsys.readouterr()
    assert not said.out
    assert "the testbed needs root to make network namespaces" in said.err
    assert "Run it as root" in said.err
    assert "Traceback" not in said.err


def test_missing_programs_are_named_to_users_and_installed_for_root(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(commands, "_PATH", str(tmp_path))
    with pytest.raises(UnavailableError, match="ip and tc not found: install the package iproute2"):
        commands.require_programs()
    apt_get = tmp_path / "apt-get"
    apt_get.write_text("#!/bin/sh\necho no such package >&2\nexit 100\n")
    apt_get.chmod(0o755)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(UnavailableError, match="apt-get ended with: no such package"):
        commands.require_programs()
    install = (
        "for name in ip tc; do printf '#!/bin/sh' >$0.$name; chmod +x $0.$name; mv $0.$name ${0%apt-get}$name; done"
    )
    apt_get.write_text(f'#!/bin/sh\n[ "$1" = install ] || exit 0\n{install}\n')
    commands.require_programs()
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    commands.require_programs()


def test_link_with_delay_names_what_it_lacks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    link = delay.DelayedLink(tmp_path, rate_mbit=100.0, delay_ms=1.0)
    monkeypatch.setattr(delay, "_TUN", tmp_path / "tun")
    with pytest.raises(UnavailableError, match="load the module tun"):
        link.start(["one", "two"])
    (tmp_path / "tun").touch()
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UnavailableError, match=r"needs a C\+\+ compiler"):
        link.start(["one", "two"])


def test_layouts_and_rates_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="expected 1 to 64 of at least 1 rank each"):
        Testbed(supernodes=0)
    with pytest.raises(ValueError, match="the rate must be above 0"):
        Testbed(rate_mbit=0)
    with pytest.raises(ValueError, match="the delay not below"):
        Testbed(delay_ms=-1.0)


def test_rates_are_written_as_tc_writes_them() -> None:
    assert parse_rate("1gbit") == 1000.0
    assert parse_rate("2.5Gbit") == 2500.0
    assert parse_rate("200mbit") == 200.0
    assert parse_rate("none") is None
    for text in ("1000", "fast", "0gbit", "-1gbit"):
        with pytest.raises(UnavailableError, match="write 1gbit, 200mbit or none"):
            parse_rate(text)


def test_large_packets_are_for_fast_links() -> None:
    assert delay.packet_limits(10.0)[0] == 1500
    assert 20_000 < delay.packet_limits(1000.0)[0] < 40_000
    assert delay.packet_limits(None)[0] == 65_000


@pytest.mark.usefixtures("namespaces_allowed")
def test_link_benchmark_prints_one_json_object() -> None:
    command = [sys.executable, "-m", "bench", "link", "--json", "--quick", "--ranks", "1"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120.0, check=False)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["rows"]
    assert (row["tier"], row["group_size"], row["groups_at_once"]) == ("between", 2, 1)
    assert 0 < row["total_mbit_per_s"] == row["mbit_per_s"] < 1050
    assert row["latency_ms"] > 0
    testbed = json.loads(done.stdout)["environment"]["testbed"]
    assert testbed == {
        "supernodes": 2,
        "ranks_per_supernode": 1,
        "rate_mbit": 1000.0,
        "delay_ms": 0.0,
        "link": "veth",
    }
