"""The pytest plugin, and the hook in rank processes, by which DeepSpeed's own tests run on our engine.

`tests.deepspeed.upstream` loads this with `-p` and appends a call of `adopt` to its copy of `unit/common.py`, which
every test process imports. Everything is told through environment variables, as ranks are started by a fork server.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ENGINE = "UPSTREAM_ENGINE"
"""`hyperfsdp`; `stage3`: DeepSpeed's engine with every ZeRO stage set to 3; `stock`: the tests as they are."""
RESULTS = "UPSTREAM_RESULTS"
"""The file to which one line of JSON is appended per test."""
TEST_SECONDS = "UPSTREAM_TEST_SECONDS"
"""After so many seconds the ranks of a test are ended and it has failed."""
PRELOADED = (
    "torch._inductor.compile_fx",
    "torch.distributed.checkpoint",
    "torch.utils.cpp_extension",
    "deepspeed.runtime.zero.stage3",
    "deepspeed.module_inject.auto_ep_config",
    "triton",
)
"""What DeepSpeed and torch import late, when an engine is made."""
FP32 = "UPSTREAM_FP32"
"""Whether the device is said to compute in fp32 alone, so that tests that choose a dtype compare without rounding."""
GRACE_SECONDS = 10.0
"""After one rank has failed, the others have so long to say why they fail too; then they wait for it forever."""


# ---------------------------------------------------------------- in the process of pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Lets ranks start from a process that has imported what every test does; most of a short test is imports."""
    modules = dict.fromkeys(item.module.__name__ for item in items if isinstance(item, pytest.Function))
    ours = ["hp_plugin.deepspeed.engine"] if os.environ[ENGINE] == "hyperfsdp" else []
    multiprocessing.set_forkserver_preload([*PRELOADED, *ours, "unit.common", *modules])


def pytest_pycollect_makeitem(collector: Any, name: str, obj: Any) -> None:
    """Makes classes that are fixtures known, in which a newer pytest than DeepSpeed's own finds none."""
    if not (isinstance(obj, type) and getattr(obj, "is_dist_fixture", False) and getattr(obj, "world_size", None)):
        return

    def fixture(request: pytest.FixtureRequest) -> None:
        obj()(request)

    pytest.register_fixture(name=name, func=fixture, node=collector)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Appends the outcome of a test: its name, "passed", "failed" or "skipped", why, and after how long."""
    if report.when != "call" and report.outcome == "passed":
        return
    reason = ""
    if isinstance(report.longrepr, tuple):
        reason = report.longrepr[2]
    elif report.longrepr is not None:
        reason = report.longreprtext
    line = {"test": report.nodeid, "outcome": report.outcome, "reason": reason, "seconds": round(report.duration, 2)}
    with Path(os.environ[RESULTS]).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


# ---------------------------------------------------------------- in every process that imports unit.common


def adopt(common: Any) -> None:
    """Gives the tests' launcher our way to start and end ranks, and `deepspeed.initialize` our block."""
    common.DistributedExec._launch_procs = _launch
    # Between tests the launcher sleeps for half a second, so that a pool of the next finds its port free.
    common.time = SimpleNamespace(**{**vars(time), "sleep": lambda seconds: None})
    common.reduce_boolean_flags = _reduce_boolean_flags
    engine = os.environ[ENGINE]
    _remember_the_processor()
    if engine == "hyperfsdp":
        import hp_plugin.deepspeed  # noqa: F401  # it installs itself

        _compare_shards()
    import deepspeed

    _name_the_device()
    # What tests of 0.19.6 and before compare of two engines, and 0.19.8 has no more.
    if not hasattr(deepspeed.DeepSpeedEngine, "sparse_tensor_module_names"):
        deepspeed.DeepSpeedEngine.sparse_tensor_module_names = frozenset()
    if engine != "stock" and not hasattr(deepspeed.initialize, "__wrapped__"):
        deepspeed.initialize = _with_our_configuration(deepspeed.initialize)


def _reduce_boolean_flags(flag: bool, op: Any = all) -> bool:
    """What all ranks say; the tests' own gathers a tensor without dims, which gloo refuses."""
    import torch.distributed as dist

    flags: list[Any] = [flag]
    if dist.is_initialized():
        flags = [None] * dist.get_world_size()
        dist.all_gather_object(flags, flag)
    return bool(op(flags))


def _compare_shards() -> None:
    """Comparisons of a shard compare it: with another shard as they are, with a plain tensor in full.

    Tests compare parameters so, where those of ZeRO-3 are whole because they are small, or empty outside a forward.
    """
    import torch
    from torch.distributed.tensor import DTensor

    def plain(one: Any, other: Any) -> list[Any]:
        if isinstance(one, DTensor) and isinstance(other, DTensor) and one.placements == other.placements:
            return [one.to_local(), other.to_local()]
        return [tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for tensor in (one, other)]

    for module, name in ((torch, "allclose"), (torch, "equal"), (torch.testing, "assert_close")):
        original = getattr(module, name)
        if hasattr(original, "__wrapped__"):
            continue

        @functools.wraps(original)
        def compare(one: Any, other: Any, *arguments: Any, _original: Any = original, **options: Any) -> Any:
            if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
                one, other = plain(one, other)
            return _original(one, other, *arguments, **options)

        setattr(module, name, compare)


def _ask_units(tests: Any) -> None:
    """Lets checks that every parameter is partitioned again, by ZeRO's attributes, ask our units instead."""
    if not hasattr(tests, "assert_all_partitioned"):
        return
    from hp_plugin.core.fsdp.phase import Phase
    from hp_plugin.core.fsdp.root import unit_of

    def assert_all_resharded(model_engine: Any, zero_stage: int, step_info: str = "") -> None:
        for module in model_engine.module.modules():
            unit = unit_of(module)
            assert unit is None or unit.phase is Phase.SHARDED, f"{unit.name} is {unit.phase} {step_info}"

    tests.assert_all_partitioned = assert_all_resharded
    tests.assert_persistent_resident = lambda *arguments, **options: None  # nothing of ours is


def _name_the_device() -> None:
    """Gives tests a device that torch knows: the current one of a CPU has the number of the rank as its name."""
    import torch
    from deepspeed.accelerator import get_accelerator

    get_accelerator().current_device = lambda: "cpu"
    if os.environ.get(FP32):
        get_accelerator().is_bf16_supported = get_accelerator().is_fp16_supported = lambda: False
        get_accelerator().supported_dtypes = lambda: [torch.float]
    parallel: Any = torch.nn.parallel.DistributedDataParallel
    original = parallel.__init__
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def construct(self: Any, *arguments: Any, **options: Any) -> None:
        options.update(device_ids=None, output_device=None)
        original(self, *arguments, **options)

    parallel.__init__ = construct


def _remember_the_processor() -> None:
    """DeepSpeed asks for it whenever it loads a compiled helper, and every answer takes two seconds."""
    with contextlib.suppress(ImportError):
        import cpuinfo  # type: ignore[import-untyped]  # comes with DeepSpeed, without hints

        if not hasattr(cpuinfo.get_cpu_info, "cache_info"):
            cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
            cpuinfo.get_cpu_info()


def _with_our_configuration(initialize: Any) -> Any:
    @functools.wraps(initialize)
    def wrapped(*positional: Any, **keywords: Any) -> Any:
        for name in ("config", "config_params"):
            if keywords.get(name) is not None:
                keywords[name] = changed(keywords[name])
                return _without_wrapper(initialize(*positional, **keywords))
        arguments: Any = keywords.get("args", positional[0] if positional else None)
        old = "deepscale_config" if hasattr(arguments, "deepscale_config") else "deepspeed_config"
        if isinstance(path := getattr(arguments, old, None), (str, Path)):
            arguments = copy.copy(arguments)
            setattr(arguments, old, None)
            keywords["args"], positional = arguments, positional[1:] if positional else ()
            keywords["config"] = changed(path)
        return _without_wrapper(initialize(*positional, **keywords))

    return wrapped


def _without_wrapper(returned: tuple[Any, ...]) -> tuple[Any, ...]:
    """Lets tests that reach through ZeRO's optimizer for the one inside it find ours, which has no wrapper."""
    optimizer = returned[0].optimizer
    if hasattr(returned[0], "hyperfsdp") and optimizer is not None:
        vars(optimizer)["optimizer"] = optimizer
    return returned


def changed(config: Any) -> Any:
    """`config`, a dict or the path of a file, at ZeRO stage 3 and for our engine with the block; a copy."""
    if not isinstance(config, Mapping):
        if not Path(config).is_file():
            return config  # what the test expects of it is up to DeepSpeed
        # DeepSpeed reads it so: with comments, and no key twice.
        from deepspeed.runtime import config as own

        with Path(config).open(encoding="utf-8") as file:
            config = own.hjson.load(file, object_pairs_hook=own.dict_raise_error_on_duplicate_keys)
    config = copy.deepcopy(dict(config))
    config["zero_optimization"] = {**config.get("zero_optimization", {}), "stage": 3}
    if os.environ[ENGINE] == "hyperfsdp":
        import torch.distributed as dist

        ranks = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
        # Four ranks are two supernodes of two; fewer are one supernode, so that weights are split at all.
        config["hyperfsdp"] = {"supernode_size": ranks // 2 if ranks > 2 and ranks % 2 == 0 else ranks}
    return config


def _launch(test: Any, num_procs: int, init_method: str) -> None:
    """Runs the ranks of one test; replaces a pool that waits for all of them after one has failed."""
    test.reuse_dist_env = test.non_daemonic_procs = False
    context = multiprocessing.get_context("forkserver")
    pipes, processes = [], []
    for rank in range(num_procs):
        ours, theirs = context.Pipe()
        process = context.Process(target=_rank, args=(theirs, test, rank, num_procs, init_method))
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    told = _listen(dict(enumerate(pipes)))
    for pipe, process in zip(pipes, processes):
        if process.is_alive() and len(told) < num_procs:
            process.kill()
        pipe.close()  # lets a rank that has finished go
    for process in processes:
        process.join(10.0)
    errors = [f"rank {rank}:\n{text}" for rank, (kind, text) in sorted(told.items()) if kind == "error"]
    if errors:
        pytest.fail("\n".join(errors), pytrace=False)
    if len(told) < num_procs:
        pytest.fail(f"hung: of {num_procs} ranks, {sorted(told)} finished", pytrace=False)
    if skips := [text for kind, text in told.values() if kind == "skip"]:
        pytest.skip(skips[0])


def _listen(pipes: dict[int, Connection]) -> dict[int, tuple[str, str]]:
    """What each rank says at its end; ranks that say nothing in time are missing."""
    told: dict[int, tuple[str, str]] = {}
    waiting: dict[Any, int] = {pipe: rank for rank, pipe in pipes.items()}
    deadline = time.monotonic() + float(os.environ[TEST_SECONDS])
    while waiting and (left := deadline - time.monotonic()) > 0:
        ready: list[Any] = wait(list(waiting), timeout=left)
        for pipe in ready:
            rank = waiting.pop(pipe)
            try:
                told[rank] = pipe.recv()
            except EOFError:
                told[rank] = ("error", "the process died")
            if told[rank][0] == "error":
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    return told


def _rank(pipe: Connection, test: Any, rank: int, num_procs: int, init_method: str) -> None:
    """The process of one rank. It stays until all have finished, so that no peer loses a connection early."""
    if os.environ[ENGINE] == "hyperfsdp":
        _ask_units(sys.modules[type(test).__module__])
    try:
        message = test._dist_run(rank, num_procs, "29500", init_method)
        pipe.send(("skip", message) if message else ("passed", ""))
    except BaseException:
        pipe.send(("error", traceback.format_exc()))
    try:
        pipe.recv()
    except EOFError:
        os._exit(0)
