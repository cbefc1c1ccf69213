"""Builds the extension of the fake device once for these sources and this torch, and finds it again afterwards."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import torch

HERE = Path(__file__).resolve().parent
SOURCES = ("device.cpp", "backend.cpp")
NAME = "fake_npu_extension"


def compiler() -> str | None:
    """The C++ compiler, or None where there is none."""
    return shutil.which(os.environ.get("CXX", "c++"))


def obstacle() -> str | None:
    """Why the extension cannot be built here; None where it can."""
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 13):
        return "the fake device is written against the C++ headers of torch 2.13"
    return None if compiler() else "there is no C++ compiler to build the fake device with"


def build() -> Path:
    """The shared library, built where it is missing. Several processes may call; one of them builds."""
    texts = [Path(HERE, name).read_bytes() for name in (*SOURCES, "log.h")]
    key = hashlib.sha256(b"".join([*texts, torch.__version__.encode(), sys.version.encode()])).hexdigest()[:16]
    folder = HERE.parents[1] / "build" / "tests" / "fake_npu" / key
    library = folder / f"{NAME}.so"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _build(folder, library)
    return library


def load() -> ModuleType:
    """The extension module. Registers the device with torch: once in a process."""
    spec = importlib.util.spec_from_file_location(NAME, build())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _build(folder: Path, library: Path) -> None:
    place = Path(torch.__file__).parent
    includes = [place / "include", place / "include" / "torch" / "csrc" / "api" / "include"]
    flags = [f"-I{path}" for path in (*includes, sysconfig.get_paths()["include"])]
    flags += ["-std=c++20", "-O0", "-g0", "-fPIC", "-w", f"-DTORCH_EXTENSION_NAME={NAME}", "-DUSE_C10D_GLOO"]
    cxx = compiler()
    assert cxx is not None
    objects = [folder / f"{source}.o" for source in SOURCES]
    with ThreadPoolExecutor() as pool:
        commands = [[cxx, *flags, "-c", str(HERE / s), "-o", str(o)] for s, o in zip(SOURCES, objects)]
        list(pool.map(_run, commands))
    libraries = ["-ltorch_python", "-ltorch", "-ltorch_cpu", "-lc10"]
    unfinished = folder / "unfinished.so"
    _run([cxx, "-shared", *map(str, objects), f"-L{place / 'lib'}", *libraries, "-o", str(unfinished)])
    unfinished.rename(library)


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if result.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{result.stderr[-4000:]}")
