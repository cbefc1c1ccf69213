"""The life of one rank after the zygote forked it."""

from __future__ import annotations

import faulthandler
import importlib
import os
import pickle
import signal
import socket
import sys
import traceback
from multiprocessing import util as multiprocessing_util
from typing import Any, NoReturn

from tests.support.processes import die_with_parent
from tests.support.protocol import Case


def run(
    case: Case, rank: int, *, parent: int, status: int, release: int, listener: socket.socket, close: list[int]
) -> NoReturn:
    """Run `case` as `rank` in this freshly forked process and leave it.

    Args:
        case: what to run.
        rank: this process's rank.
        parent: pid of the zygote; when it dies, so does this process.
        status: descriptor to write one byte to: "+" for a result, "-" for a failure.
        release: descriptor that reaches end of file when every rank has finished or was stopped. Leaving earlier would
            break the connections of peers, whose errors would then hide the first one.
        listener: listening socket that rank 0 turns into the case's store.
        close: descriptors of the zygote that this process must not hold.
    """
    code = 1
    try:
        os.setsid()
        die_with_parent(parent)
        for descriptor in close:
            os.close(descriptor)
        log = _redirect_output(case, rank)
        faulthandler.enable(log)
        faulthandler.register(signal.SIGUSR1, log, all_threads=True)
        _set_environment(case, rank, port=listener.getsockname()[1])
        store = _start_store(listener) if rank == 0 else None
        listener.close()
        code = _call(case, rank, status)
        os.read(release, 1)
        del store
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # os._exit skips the end of multiprocessing's children: a spawn Manager would outlive this process.
        multiprocessing_util._exit_function()  # type: ignore[attr-defined]
        os._exit(code)


def _redirect_output(case: Case, rank: int) -> Any:
    log = open(case.log_path(rank), "w", buffering=1)  # noqa: SIM115 (lives as long as the process)
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    return log


def _set_environment(case: Case, rank: int, *, port: int) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(case.nprocs),
        LOCAL_WORLD_SIZE=str(case.nprocs),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo",
        # The store below listens already; env:// then connects to it instead of binding the port itself.
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    os.environ.update(case.environment)


def _start_store(listener: socket.socket) -> object:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore(
        "127.0.0.1",
        listener.getsockname()[1],
        None,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=os.dup(listener.fileno()),
        use_libuv=False,  # torch 2.7's libuv store cannot adopt a socket
    )


def _call(case: Case, rank: int, status: int) -> int:
    """Call the target; returns the exit code after its result or error is on disk and the zygote knows."""
    module, _, name = case.target.partition(":")
    code, error = 0, ""
    try:
        target: Any = importlib.import_module(module)
        for part in name.split("."):
            target = getattr(target, part)
        result = target(**case.kwargs)
        case.result_path(rank).write_bytes(pickle.dumps(result))
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if code == 0:
            case.result_path(rank).write_bytes(pickle.dumps(None))
        else:
            error = f"sys.exit({end.code!r})\n{traceback.format_exc()}"
    except BaseException:
        code, error = 1, traceback.format_exc()
    if code:
        case.error_path(rank).write_text(error)
    os.write(status, b"-" if code else b"+")
    return code
