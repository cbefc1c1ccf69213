"""Finds and loads the native library (``native/hp_native.h``) with ctypes.

The library is optional: hp_plugin works on torch alone without it. What is not optional is to say so, hence
:class:`NativeStatus` with one sentence that ``hp-plugin doctor`` prints. Importing this module loads nothing; the first
call of :func:`native_status` or :func:`load_native` does, once per process.

The environment variable ``HP_NATIVE_LIBRARY`` overrides the search: the path of a library (which must then load), or
``none`` to work without one.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import os
from dataclasses import dataclass
from pathlib import Path

from hp_plugin.errors import ConfigurationError

# The number in native/hp_native.h that this module was written against.
EXPECTED_ABI_VERSION = 2
LIBRARY_NAME = "libhp_native.so"
OVERRIDE_VARIABLE = "HP_NATIVE_LIBRARY"

_POINTER, _INT, _SIZE, _FLOAT, _MICROSECONDS = (
    ctypes.c_void_p,
    ctypes.c_int32,
    ctypes.c_size_t,
    ctypes.c_float,
    ctypes.c_int64,
)
_SCALE = (None, (_POINTER, _POINTER, _FLOAT, _SIZE, _INT))  # dst, src, alpha, count, threads
_SUM = (None, (_POINTER, _POINTER, _INT, _FLOAT, _SIZE, _INT))  # dst, sources, terms, scale, count, threads
# Every function that the header declares, but for the two that identify a library: result, arguments.
_SIGNATURES: dict[str, tuple[object, tuple[object, ...]]] = {
    "hp_accumulate_scaled_f32": _SCALE,
    "hp_accumulate_scaled_bf16": _SCALE,
    "hp_scale_copy_f32": _SCALE,
    "hp_scale_copy_bf16": _SCALE,
    "hp_scale_copy_f32_bf16": _SCALE,
    "hp_sum_f32": _SUM,
    "hp_sum_bf16": _SUM,
    "hp_sum_bf16_f32": _SUM,
    "hp_counter_publish": (None, (_POINTER, ctypes.c_uint32)),
    "hp_counters_wait": (_INT, (_POINTER, _INT, _SIZE, ctypes.c_uint32, _MICROSECONDS, _INT)),
    "hp_barrier": (_INT, (_POINTER, _INT, _SIZE, _INT, ctypes.c_uint32, _MICROSECONDS, _INT)),
    "hp_life_begin": (_INT, (_INT, ctypes.c_int64)),
    "hp_life_is_held": (_INT, (_INT, ctypes.c_int64)),
}


@dataclass(frozen=True)
class NativeLibrary:
    """A loaded library whose ABI number is the expected one.

    Attributes:
        path: the file that was loaded.
        abi_version: its ABI number.
        build_info: compiler, architecture and dispatch, as the library reports them.
        functions: the ctypes library; its functions have their argument types set.
    """

    path: Path
    abi_version: int
    build_info: str
    functions: ctypes.CDLL


@dataclass(frozen=True)
class NativeStatus:
    """What the search for the library came to.

    Attributes:
        library: the library, or None when torch is used instead.
        reason: one sentence: where it was found, or why it is not used and what to do about it.
    """

    library: NativeLibrary | None
    reason: str


class _UnusableLibraryError(Exception):
    """A library file exists and cannot be used; the message is a sentence."""


def load_native() -> NativeLibrary | None:
    """Returns the native library, or None where torch is used instead (see :func:`native_status` for the reason).

    Raises:
        ConfigurationError: ``HP_NATIVE_LIBRARY`` names a file that cannot be used.
    """
    return native_status().library


@functools.lru_cache(maxsize=1)
def native_status() -> NativeStatus:
    """Searches and loads the library once per process and says what came of it.

    Raises:
        ConfigurationError: ``HP_NATIVE_LIBRARY`` names a file that cannot be used.
    """
    return find_native(os.environ.get(OVERRIDE_VARIABLE, ""), installed_candidates())


def find_native(override: str, candidates: tuple[Path, ...]) -> NativeStatus:
    """Loads the library that ``override`` names, else the first of ``candidates`` that exists.

    Args:
        override: value of ``HP_NATIVE_LIBRARY``: empty, ``none`` or a path.
        candidates: paths to try in order when ``override`` is empty.

    Raises:
        ConfigurationError: ``override`` is a path that does not exist or that cannot be used.
    """
    if override.lower() == "none":
        return NativeStatus(
            None, f"The native library is switched off by {OVERRIDE_VARIABLE}={override}; torch is used."
        )
    if override:
        try:
            library = _open_library(Path(override))
        except _UnusableLibraryError as error:
            raise ConfigurationError(
                f"{OVERRIDE_VARIABLE}={override}: {error} Unset the variable to search the installed package, or set "
                "it to 'none' to use torch."
            ) from error
        return NativeStatus(library, f"The native library was loaded from {library.path} ({OVERRIDE_VARIABLE}).")

    for path in candidates:
        if not path.is_file():
            continue
        # A stale or foreign file is not skipped in silence: its sentence is the result of the search.
        try:
            library = _open_library(path)
        except _UnusableLibraryError as error:
            return NativeStatus(None, f"{error} torch is used instead.")
        return NativeStatus(library, f"The native library was loaded from {library.path}.")
    return NativeStatus(
        None,
        f"The native library is not installed (no {LIBRARY_NAME} beside the package), so torch is used. It is built "
        "when hp_plugin is installed on a machine with a C++ compiler: install g++ or clang++, then install hp_plugin "
        "again.",
    )


def installed_candidates() -> tuple[Path, ...]:
    """Returns the places where an installation puts the library, in order of preference.

    A wheel puts it beside this file. An editable install leaves the Python files in the source tree and puts the
    library into site-packages, where the distribution's own record knows it.
    """
    beside = Path(__file__).resolve().parent / LIBRARY_NAME
    try:
        distribution = importlib.metadata.distribution("hp-plugin")
    except importlib.metadata.PackageNotFoundError:
        return (beside,)
    recorded = Path(str(distribution.locate_file(f"hp_plugin/core/kernels/{LIBRARY_NAME}"))).resolve()
    return (beside,) if recorded == beside else (beside, recorded)


def _open_library(path: Path) -> NativeLibrary:
    """Loads one file, checks its ABI number before anything else of it is called, and declares its functions."""
    if not path.is_file():
        raise _UnusableLibraryError(f"There is no file {path}.")
    try:
        # An absolute path: dlopen searches the system's folders for a bare name.
        functions = ctypes.CDLL(str(path.resolve()))
    except OSError as error:
        raise _UnusableLibraryError(
            f"The native library {path} cannot be loaded ({error}); it was probably built for another system. Install "
            "hp_plugin again on this machine."
        ) from error
    try:
        functions.hp_abi_version.argtypes = ()
        functions.hp_abi_version.restype = ctypes.c_int32
        abi_version = int(functions.hp_abi_version())
        if abi_version != EXPECTED_ABI_VERSION:
            raise _UnusableLibraryError(
                f"The native library {path} has ABI version {abi_version}, and this hp_plugin needs "
                f"{EXPECTED_ABI_VERSION}: it was left by another version. Install hp_plugin again."
            )
        functions.hp_build_info.argtypes = ()
        functions.hp_build_info.restype = ctypes.c_char_p
        build_info = functions.hp_build_info().decode()
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(functions, name)
            function.restype, function.argtypes = result, arguments
    except AttributeError as error:
        raise _UnusableLibraryError(
            f"The file {path} is not hp_plugin's native library ({error}). Remove it and install hp_plugin again."
        ) from error
    return NativeLibrary(path=path, abi_version=abi_version, build_info=build_info, functions=functions)
