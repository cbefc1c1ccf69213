"""Makes libraries that stand in for Ascend's driver, so that `import torch_npu` works on a machine without CANN.

    python tools/torch_npu_stubs.py FOLDER_OF_TORCH_NPU TARGET

FOLDER_OF_TORCH_NPU holds the package `torch_npu`; TARGET gets one library under the name of every library that is
missing. Every function in them returns an error code, so nothing can run on them: they serve to read the signatures of
torch_npu's operations and to run them on meta tensors, which compute shapes only. With them,

    LD_LIBRARY_PATH=TARGET TORCH_DEVICE_BACKEND_AUTOLOAD=0 python -c "import torch, torch_npu"

Needs `nm` and `readelf` of binutils, and a C compiler. It is run with the Python whose torch will import torch_npu.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

STUB_RESULT = 100000
"""What every function returns: ACL_ERROR_INVALID_PARAM, the first of Ascend's error codes."""
_NOT_STUBBED = ("Py", "_Py", "_ITM", "__gmon", "__cxa", "_Znw", "_Zdl")
_DATA = ("_ZTV", "_ZTI", "_ZTS")  # tables of virtual functions and type information are no functions
_SYSTEM_LIBRARIES = ("libc.so.6", "libgcc_s.so.1", "libm.so.6", "libstdc++.so.6", "ld-linux-x86-64.so.2")


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


def _symbols(library: Path, which: str) -> set[str]:
    lines = _output("nm", "-D", which, str(library)).splitlines()
    return {line.split()[-1].split("@")[0] for line in lines if line.strip()}


def _system_library(name: str) -> Path:
    compiler = shutil.which("cc") or "gcc"
    return Path(_output(compiler, f"-print-file-name={name}").strip())


def make_stubs(npu: Path, torch_folder: Path, target: Path) -> list[str]:
    """Makes the libraries in `target` and returns their names.

    Args:
        npu: Folder of the package torch_npu.
        torch_folder: Folder of the package torch.
        target: Where they go; made if need be.
    """
    own = sorted([*npu.glob("lib/*.so"), *npu.glob("_C*.so")])
    if not own:
        raise SystemExit(f"error: {npu} holds no libraries of torch_npu")
    torch_libraries = sorted(torch_folder.glob("lib/*.so*"))
    system = [path for path in map(_system_library, _SYSTEM_LIBRARIES) if path.is_file()]
    undefined = set().union(*(_symbols(library, "--undefined-only") for library in own))
    defined = set().union(*(_symbols(library, "--defined-only") for library in [*own, *torch_libraries, *system]))
    missing = sorted(name for name in undefined - defined if not name.startswith(_NOT_STUBBED))
    needed = {
        name for library in own for name in re.findall(r"NEEDED.*\[(.+)\]", _output("readelf", "-d", str(library)))
    }
    present = {library.name for library in [*own, *torch_libraries]}
    absent = sorted(
        name for name in needed - present if not _system_library(name).is_file() and not name.startswith("ld-linux")
    )
    target.mkdir(parents=True, exist_ok=True)
    source = target / "stubs.s"
    lines = [".text"]
    for name in missing:
        if name.startswith(_DATA):
            lines += [
                ".data",
                f".globl {name}",
                f".type {name},@object",
                f".size {name},64",
                f"{name}: .zero 64",
                ".text",
            ]
        else:
            lines += [f".globl {name}", f".type {name},@function", f"{name}:", f"  mov ${STUB_RESULT}, %eax", "  ret"]
    source.write_text("\n".join([*lines, '.section .note.GNU-stack,"",@progbits', ""]))
    library = target / "libstubs.so"
    subprocess.run([shutil.which("cc") or "gcc", "-shared", "-o", str(library), str(source)], check=True, timeout=120)
    for name in absent:
        shutil.copy(library, target / name)
    return absent


def main() -> None:
    """Command line."""
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    torch = importlib.util.find_spec("torch")  # not imported: it would load torch_npu, which needs what is made here
    if torch is None or torch.origin is None:
        raise SystemExit("error: this Python has no torch; run it with the one that will import torch_npu")
    made = make_stubs(Path(sys.argv[1]) / "torch_npu", Path(torch.origin).parent, Path(sys.argv[2]))
    print(" ".join(made))


if __name__ == "__main__":
    main()
