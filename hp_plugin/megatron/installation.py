"""``install()``: puts the argument hooks into Megatron; the rest follows once a job asks for it."""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Callable
from typing import Any

from hp_plugin.core.devices import default_device_type
from hp_plugin.errors import ConfigurationError, HyperParallelError, UnsupportedError
from hp_plugin.megatron import cpu_compat, reporting
from hp_plugin.megatron.arguments import flags, mode_validation, muon_validation, validation
from hp_plugin.megatron.connections import connections_line
from hp_plugin.megatron.releases import rebind, versions
from hp_plugin.megatron.releases.targets import TABLES

_installed: rebind.Rebinder | None = None
# The one piece of process-wide state of the adapter: what install() replaced, so that it can be reported,
# installed once, and undone.


def install() -> None:
    """Make ``--use-hyperfsdp`` known to Megatron-LM in this process. Call it before Megatron is imported.

    Only the argument parser is hooked. Without ``--use-hyperfsdp`` on the command line nothing else changes.
    Where ``--hyperfsdp-device cpu`` (or ``HP_DEVICE=cpu``) asks for it, the CPU compatibility layer goes in
    first. A second call does nothing. Every rank must call it.

    Raises:
        UnsupportedError: Megatron is missing, of a release that is not supported, or changed in a name that
            is replaced; or an accelerator is present where emulation was asked for.
        ConfigurationError: ``--hyperfsdp-device`` or ``--hyperfsdp-config`` cannot be used.
    """
    global _installed
    if _installed is not None:
        return
    version = versions.check_megatron()
    if flags.requested_device(sys.argv[1:]) == "cpu":
        cpu_compat.install()
    rebinder = rebind.Rebinder(version, TABLES[versions.series(version)])
    rebinder.activate("arguments")
    _installed = rebinder


def installed() -> rebind.Rebinder | None:
    """What takes names over in this process: made by :func:`install`, or by patched sources; None before."""
    return _installed


def use(rebinder: rebind.Rebinder) -> None:
    """Let ``rebinder`` take names over; for :mod:`hp_plugin.megatron.source_patch`."""
    global _installed
    _installed = rebinder


def uninstall() -> None:
    """Put every replaced name back, of Megatron and of the CPU compatibility layer. For tests."""
    global _installed
    if _installed is not None:
        for stage in ("observe", "active", "optimizer", "arguments"):
            _installed.deactivate(stage)
        _installed = None
    cpu_compat.restore()


def rebinding_table(*, inspect_targets: bool = False) -> list[dict[str, str]]:
    """Every name inside Megatron that would be or is replaced, for the installed release; see ``rebind.describe``.

    Raises:
        UnsupportedError: No supported Megatron is installed.
    """
    return rebind.describe(versions.series(versions.check_megatron()), _installed, inspect_targets=inspect_targets)


def rebound_names() -> list[str]:
    """The full names that are replaced at this moment; empty before ``install()``."""
    if _installed is None:
        return []
    return [entry["target"] for entry in rebinding_table() if entry["state"] == "rebound"]


def hook_parse_args(original: Callable[..., argparse.Namespace]) -> Callable[..., argparse.Namespace]:
    """Megatron's ``parse_args`` with our flags, and with what follows from them."""

    @functools.wraps(original)
    def parse_args(
        extra_args_provider: Callable[[argparse.ArgumentParser], Any] | None = None,
        ignore_unknown_args: bool = False,
        **more: Any,
    ) -> argparse.Namespace:
        def provider(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
            if extra_args_provider is not None:
                parser = extra_args_provider(parser)
            return flags.add_arguments(parser)

        try:
            flags.check_spelling(sys.argv[1:])
            args = original(provider, ignore_unknown_args, **more)
            _apply(args)
        except HyperParallelError as error:
            reporting.stop(str(error))
        return args

    return parse_args


def _apply(args: argparse.Namespace) -> None:
    """Resolve and check our flags, then make the rest of the adapter match them."""
    if not hasattr(args, "use_hyperfsdp"):
        _check_yaml_arguments()  # --yaml-cfg has replaced the namespace that our parser filled
        active = with_muon = False
    else:
        options = flags.resolve(args)
        active, with_muon = args.use_hyperfsdp and options.migrate is None, args.use_hypermuon
        if options.device == "cpu" and not cpu_compat.is_installed():
            raise ConfigurationError(
                "--hyperfsdp-device cpu was found after Megatron was set up. Start the job with "
                "python -m hp_plugin.megatron SCRIPT, or call hp_plugin.megatron.install() with the flag on the "
                "command line."
            )
    if _installed is None:
        return
    if not active:
        _installed.deactivate("active")  # first: both stages replace train_step
    _observe(args, options if getattr(args, "use_hyperfsdp", False) and not active else None)
    if not (active or with_muon):
        _installed.deactivate("optimizer")
        return
    if with_muon:
        muon_validation.check_megatron_arguments(args)
    if not active:
        _installed.activate("optimizer")
        return
    validation.check_megatron_arguments(args)
    if options.mode == "validation":
        mode_validation.check_megatron_arguments(args)
    validation.check_topology(args, options)
    for line in validation.adjust_megatron_arguments(args):
        reporting.say(line)
    device = "cpu" if cpu_compat.is_installed() else default_device_type()
    line_on_connections = connections_line(args, os.environ, device=device)
    if line_on_connections is not None:
        reporting.say(line_on_connections)
    _installed.activate("optimizer")
    _installed.activate("active")


def _observe(args: argparse.Namespace, options: flags.HyperFSDPOptions | None) -> None:
    """Watch the stock back end, or stop watching where `options` is None."""
    assert _installed is not None
    if options is None:
        _installed.deactivate("observe")
        return
    for line in validation.check_observed_arguments(args, options):
        reporting.say(line)
    _installed.activate("observe")


def _check_yaml_arguments() -> None:
    ours = ("--use-hyperfsdp", "--use-hypermuon")
    if any(word in ours or word.startswith((flags.PREFIX, flags.MUON_PREFIX)) for word in sys.argv[1:]):
        raise UnsupportedError(
            "--use-hyperfsdp cannot be combined with --yaml-cfg: Megatron then drops the arguments "
            "of the command line; give Megatron's arguments on the command line."
        )
