"""What `hp-plugin doctor` finds out, as data. No accelerator is initialised beyond being counted."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import os
import platform
import socket
import sys
import warnings
from dataclasses import dataclass, field

from hp_plugin._version import __version__
from hp_plugin.errors import HyperParallelError

_PACKAGES = ("torch", "torch_npu", "megatron-core", "mindspeed", "deepspeed", "triton", "numpy")
_MINIMUM_TORCH = (2, 7)


@dataclass
class Report:
    """Everything that `doctor` prints.

    Attributes:
        version: Of hp_plugin.
        rank: Global rank of this process, 0 outside a job.
        packages: Installed version of each package that matters; None where it is not installed.
        devices: One line per kind of device.
        backends: Communication backends that this torch can use.
        native_library: Where it was loaded from, or why torch is used instead.
        kernels: Implementation chosen per operation and device type, with the reason.
        newton_schulz: Kernel of Muon's orthogonalization per device type, dtype and shape.
        topology: What the job looks like, or what would decide it.
        megatron: One sentence on the adapter for Megatron-LM.
        rebinding: Every name in Megatron that the adapter replaces, and its state.
        compatibility_layer: Every name that the CPU compatibility layer replaces, where HP_DEVICE=cpu asks for it.
        deepspeed: One sentence on the adapter for DeepSpeed.
        deepspeed_names: Every name in DeepSpeed that the adapter extends or replaces, and its state.
        warnings: Sentences on what is installed and probably not what was meant.
        problems: Sentences on what is installed and not usable. Empty: all is well.
    """

    version: str
    rank: int
    packages: dict[str, str | None]
    devices: list[str]
    backends: list[str]
    native_library: str
    kernels: list[dict[str, str]]
    topology: str
    newton_schulz: list[dict[str, str]] = field(default_factory=list)
    megatron: str = ""
    rebinding: list[dict[str, str]] = field(default_factory=list)
    compatibility_layer: list[dict[str, str]] = field(default_factory=list)
    deepspeed: str = ""
    deepspeed_names: list[dict[str, str]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def usable(self) -> bool:
        """Whether everything that is installed can be used."""
        return not self.problems


def examine() -> Report:
    """Looks at this machine. Under a launcher that sets WORLD_SIZE every rank must call: the topology is gathered."""
    import torch

    from hp_plugin.core.devices.report import describe_backends, describe_devices

    problems: list[str] = []
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < _MINIMUM_TORCH:
        problems.append(f"torch {torch.__version__} is installed; hp_plugin needs torch >= 2.7")
    report = Report(
        version=__version__,
        rank=int(os.environ.get("RANK", "0")),
        packages=_packages(),
        devices=describe_devices(),
        backends=describe_backends(),
        native_library=_native_library(problems),
        kernels=_kernels(problems),
        topology=_topology(problems),
        problems=problems,
    )
    _device_kernels(report)
    _megatron(report)
    _deepspeed(report)
    return report


def _packages() -> dict[str, str | None]:
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def _native_library(problems: list[str]) -> str:
    from hp_plugin.core.kernels import native_status

    try:
        return native_status().reason
    except HyperParallelError as error:
        problems.append(str(error))
        return str(error)


def _kernels(problems: list[str]) -> list[dict[str, str]]:
    from hp_plugin.core.kernels import chosen_kernels

    try:
        return [dataclasses.asdict(choice) for choice in chosen_kernels()]
    except HyperParallelError as error:
        if str(error) not in problems:  # a broken native library is reported already
            problems.append(str(error))
        return []


def _device_kernels(report: Report) -> None:
    from hp_plugin.core.kernels import foreign_apex
    from hp_plugin.core.muon.kernel_choices import newton_schulz_choices

    with contextlib.suppress(HyperParallelError):  # HP_KERNELS is wrong, which is among the problems
        report.newton_schulz = newton_schulz_choices()
    apex = foreign_apex()
    if apex is not None:
        report.warnings.append(apex)


def _topology(problems: list[str]) -> str:
    import torch.distributed as dist

    from hp_plugin.core.topology import Topology

    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return (
            f"not inside a job; in one, ranks with the same host name share a supernode (this host is "
            f"{socket.gethostname()}) unless the job states a supernode size"
        )
    started = not dist.is_initialized()
    if started:
        dist.init_process_group("gloo")
    try:
        return Topology.detect().describe()
    except HyperParallelError as error:
        problems.append(str(error))
        return str(error)
    finally:
        if started:
            dist.destroy_process_group()


def _megatron(report: Report) -> None:
    from hp_plugin.megatron import cpu_compat, rebinding_table
    from hp_plugin.megatron.arguments import flags
    from hp_plugin.megatron.releases import versions

    version = versions.megatron_version()
    if version is None:
        report.megatron = f"not installed (megatron-core {versions.supported_text()} is supported)"
        return
    try:
        # What Megatron and the layer say while they are imported must not mix with a report in JSON.
        with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            versions.check_megatron()
            if flags.requested_device([]) == "cpu":
                cpu_compat.install()
            report.compatibility_layer = cpu_compat.table()
            report.rebinding = rebinding_table(inspect_targets=True)
    except HyperParallelError as error:
        report.megatron = str(error)
        report.problems.append(str(error))
        return
    except ImportError as error:
        report.megatron = f"megatron-core {version} is installed, but does not import: {error}"
        report.problems.append(report.megatron)
        return
    unfit = [f"{e['target']} {e['state']}" for e in report.rebinding if e["state"] not in ("original", "rebound")]
    report.problems.extend(unfit)
    report.megatron = f"megatron-core {version}, supported" if not unfit else f"megatron-core {version}, changed"


def _deepspeed(report: Report) -> None:
    version = report.packages["deepspeed"]
    try:
        # What DeepSpeed says while it is imported must not mix with a report in JSON.
        with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from hp_plugin.deepspeed import rebinding_table, versions

            if version is None:
                report.deepspeed = f"not installed (DeepSpeed {versions.supported_text()} is supported)"
                return
            report.deepspeed_names = rebinding_table()
    except HyperParallelError as error:
        report.deepspeed = str(error)
        report.problems.append(str(error))
        return
    except ImportError as error:
        report.deepspeed = f"DeepSpeed {version} is installed, but does not import: {error}"
        report.problems.append(report.deepspeed)
        return
    unfit = [f"{e['target']} {e['state']}" for e in report.deepspeed_names if e["state"] != "fits"]
    report.problems.extend(unfit)
    report.deepspeed = f"DeepSpeed {version}, {'changed' if unfit else 'supported'}"


def python_path() -> str:
    """The interpreter that runs, for the heading of the report."""
    return sys.executable
