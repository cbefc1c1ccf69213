"""The memory benchmark's view of whole supernodes: what the kernel counts, at the peak, by allocator and shape."""

from __future__ import annotations

import mmap
import time

import pytest

from bench.errors import UnavailableError
from bench.fsdp_step.settings import OURS_ALIASED, OURS_C10D, Size, load
from bench.loopback import run_on_loopback
from bench.memory import command, pss, supernode
from bench.memory.pss import Sample, Sampler, peak_together, sample
from bench.memory.supernode import Entry, Life, Peak, Steps, entries, fill, live, peak_of
from bench.report import Report
from hp_plugin.core.kernels import native_status
from tests.support import init_gloo
from tests.support.ranks import run_ranks

MIB = 1 << 20
needs_pss = pytest.mark.skipif(pss.why_unavailable() is not None, reason="the kernel keeps no PSS")
needs_native = pytest.mark.skipif(native_status().library is None, reason="the native library is missing")


def at(moment: float, total: int, shared: int = 0) -> Sample:
    return Sample(moment, total, shared)


# ---- samples --------------------------------------------------------------------------------------------------------


@needs_pss
def test_sample_sees_pages_that_are_touched_and_not_those_that_are_not() -> None:
    before = sample()
    block = mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    untouched = sample()
    block.write(b"x" * (64 * MIB))
    touched = sample()
    block.close()
    assert untouched.total - before.total < 8 * MIB
    assert 56 * MIB < touched.total - untouched.total < 72 * MIB
    assert touched.shared - untouched.shared < MIB


@needs_pss
def test_sample_tells_shared_memory_apart() -> None:
    before = sample()
    with mmap.mmap(-1, 16 * MIB) as block:  # shared: a memory file without a name
        block.write(b"x" * (16 * MIB))
        after = sample()
    assert 15 * MIB < after.shared - before.shared < 17 * MIB


@needs_pss
def test_sampler_sees_what_lives_for_a_moment() -> None:
    with Sampler(0.005) as sampler:
        block = mmap.mmap(-1, 32 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        block.write(b"x" * (32 * MIB))
        time.sleep(0.2)
        block.close()
    totals = [one.total for one in sampler.samples]
    assert len(totals) > 3
    assert max(totals) > totals[0] + 24 * MIB
    assert max(totals) > totals[-1] + 24 * MIB
    moments = [one.moment for one in sampler.samples]
    assert moments == sorted(moments)


def test_peak_is_of_one_moment_and_not_of_each_process() -> None:
    one = [at(0.0, 10), at(2.0, 100), at(4.0, 10)]
    other = [at(1.0, 20), at(3.0, 30, 7), at(5.0, 200)]
    assert peak_together([one, other]) == (210, 0), "10 of the first at 5.0; never 100 and 200 at once"
    assert peak_together([one, other[:2]]) == (130, 7)
    assert peak_together([[at(0.0, 500), at(1.0, 5)], [at(2.0, 1)]]) == (6, 0), "500 was before the other one was seen"


def test_peak_of_several_supernodes_is_that_of_the_one_with_most() -> None:
    lives = [Life(at(0.0, 10 + rank), [at(1.0, 100 + 10 * rank, rank)], "shm") for rank in range(4)]
    assert peak_of(lives, (2, 2)) == Peak(total=250, shared=5, baseline=25, transport="shm")
    assert peak_of(lives, (1, 4)) == Peak(total=460, shared=6, baseline=46, transport="shm")


# ---- variants -------------------------------------------------------------------------------------------------------


def test_ours_differ_in_the_transport_alone_and_fsdp2_has_the_options_of_the_sweep() -> None:
    settings = load()
    by_name = {entry.name: entry for entry in entries(settings)}
    assert list(by_name) == ["ours_shm", OURS_ALIASED, OURS_C10D, "fsdp2_tuned", "fsdp2"]
    assert by_name["ours_shm"].options == {**by_name[OURS_C10D].options, "transport": "shm"}
    assert by_name["fsdp2_tuned"].options == settings.variants["fsdp2_tuned"].options
    assert by_name["fsdp2"].options == {}


SIZE = Size(layers=2, dim=256, heads=4, vocabulary=64, tokens=8)  # 1.6 M parameters, 6.4 MB


def _live(entry: Entry) -> Life:
    init_gloo()
    return live(entry=entry, shape=(1, 2), size=SIZE, steps=Steps(1, 1), layer_s=0.001)


@needs_pss
@needs_native
def test_weights_are_shared_with_shared_memory_and_private_without() -> None:
    weights = 4 * sum(supernode.unit_sizes(SIZE))
    found = {entry.name: peak_of(run_ranks(2, _live, entry=entry), (1, 2)) for entry in entries(load())[:3]}
    shared, aliased, private = found["ours_shm"], found[OURS_ALIASED], found[OURS_C10D]
    assert aliased.transport == "shm"
    assert weights < aliased.shared < 4 * weights
    assert (shared.transport, private.transport) == ("shm", "c10d")
    assert private.shared < MIB
    assert weights < shared.shared < 4 * weights, "the weights once, and the rings"
    assert 0 < shared.baseline < shared.total


def _malloc_setting() -> str | None:
    import os

    return os.environ.get("MALLOC_MMAP_THRESHOLD_")


def test_allocators_reach_the_ranks_and_nobody_else() -> None:
    assert supernode.ALLOCATORS[supernode.GLIBC] == {}
    variables = supernode.ALLOCATORS[supernode.RETURNING]
    assert run_on_loopback(_malloc_setting, nprocs=1, timeout_s=60.0, environment=variables) == ["131072"]
    assert _malloc_setting() is None


# ---- the report -----------------------------------------------------------------------------------------------------


def peaks(ours: int) -> dict[str, Peak]:
    return {
        "ours_shm": Peak(ours, shared=40, baseline=50, transport="shm"),
        OURS_ALIASED: Peak(80, shared=40, baseline=50, transport="shm"),
        OURS_C10D: Peak(160, shared=0, baseline=60, transport="c10d"),
        "fsdp2_tuned": Peak(200, shared=0, baseline=50),
        "fsdp2": Peak(400, shared=0, baseline=50),
    }


def test_keys_tell_what_is_compared_and_under_which_conditions() -> None:
    report = Report("memory")
    rounds = [peaks(100), peaks(120), peaks(110)]
    names = list(rounds[0])
    fill(report, (1, 4), supernode.GLIBC, names, rounds)
    assert report.ratios == {
        "supernode_pss_vs_fsdp2": pytest.approx(110 / 200),
        "supernode_pss_vs_fsdp2_default": pytest.approx(110 / 400),
        "supernode_pss_vs_c10d": pytest.approx(110 / 160),
        "supernode_pss_above_baseline_vs_fsdp2": pytest.approx(60 / 150),
        "supernode_pss_aliased_vs_fsdp2": pytest.approx(80 / 200),
        "supernode_pss_aliased_vs_fsdp2_default": pytest.approx(80 / 400),
        "supernode_pss_aliased_vs_c10d": pytest.approx(80 / 160),
        "supernode_pss_aliased_above_baseline_vs_fsdp2": pytest.approx(30 / 150),
    }
    assert report.quartiles["supernode_pss_vs_fsdp2"] == pytest.approx([105 / 200, 110 / 200, 115 / 200])
    fill(report, (1, 4), supernode.RETURNING, names, rounds)
    fill(report, (2, 2), supernode.GLIBC, names, rounds)
    assert {"supernode_pss_vs_fsdp2_returning", "supernode_pss_vs_fsdp2_2x2"} <= set(report.ratios)
    row = report.rows[0]
    assert (row["case"], row["variant"], row["transport"]) == ("supernode 1x4", "ours_shm", "shm")
    assert (row["pss_mb"], row["baseline_mb"], row["above_baseline_mb"]) == pytest.approx((110e-6, 50e-6, 60e-6))
    assert len(report.rows) == 15 and len(report.rounds) == 9
    report.to_json()


def test_every_condition_and_variant_runs_in_processes_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    def run(target: object, *, nprocs: int, environment: dict[str, str], entry: Entry, **options: object) -> list[Life]:
        assert target is live
        started.append((nprocs, bool(environment), entry.name))
        return [Life(at(0.0, 1), [at(1.0, 2)], "")] * nprocs

    monkeypatch.setattr(supernode, "run_on_loopback", run)
    report = command.benchmark(parts="supernode", shapes="1x4,2x3", rounds=2)
    names = [entry.name for entry in entries(load())]
    in_order = [*names, *reversed(names)]
    expected = [(count, returns, name) for count in (4, 6) for returns in (False, True) for name in in_order]
    assert started == expected
    assert "peak_vs_fsdp2" not in report.ratios
    assert report.environment["supernode_model"]["parameters"] > 100e6


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"parts": "tensors,pages"}, "--parts"),
        ({"parts": ""}, "--parts"),
        ({"shapes": "4"}, "--shapes"),
        ({"shapes": "4x1"}, "at least 2 ranks"),
        ({"shapes": "1x4,"}, "--shapes"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, str], said: str) -> None:
    with pytest.raises(UnavailableError, match=said):
        command.benchmark(**options)  # type: ignore[arg-type]


def test_a_kernel_without_pss_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pss, "_ROLLUP", pss.Path("/proc/self/there_is_no_such_file"))
    with pytest.raises(UnavailableError, match=r"PSS needs Linux 4\.14"):
        command.benchmark(parts="supernode")
