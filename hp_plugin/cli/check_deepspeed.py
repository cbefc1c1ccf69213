"""What `hp-plugin check` finds out about a DeepSpeed configuration, as data. DeepSpeed is not imported."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from hp_plugin.deepspeed.migration import migrate
from hp_plugin.deepspeed.refusals import refused
from hp_plugin.deepspeed.schema import BLOCK, read_block
from hp_plugin.errors import ConfigurationError


@dataclass
class DeepSpeedReport:
    """Everything that `check` prints of a DeepSpeed configuration.

    Attributes:
        file: What was read.
        refused: Sentences on settings with which the job does not start.
        filled_in: Settings that are "auto", for HF Trainer or Accelerate to fill in.
        replaceable: What `--fix` would rewrite, or has.
        fixed: Whether it has.
        block: The block as it is understood; None where there is none.
    """

    file: str
    refused: list[str] = field(default_factory=list)
    filled_in: list[str] = field(default_factory=list)
    replaceable: list[str] = field(default_factory=list)
    fixed: bool = False
    block: dict[str, Any] | None = None

    @property
    def usable(self) -> bool:
        """Whether a job with this configuration starts, with HyperFSDP, as far as the configuration decides."""
        return not self.refused and self.block is not None


def check(path: str, *, fix: bool = False) -> DeepSpeedReport:
    """Judges a configuration.

    Args:
        path: A JSON file.
        fix: Rewrite the file where what it says has a clear counterpart; the old one stays as `PATH.orig`.

    Raises:
        ConfigurationError: The file cannot be read, or its block is wrong.
    """
    config = _read(path)
    migrated = migrate(config)
    report = DeepSpeedReport(path, replaceable=list(migrated.changes))
    if fix and migrated.changes:
        Path(f"{path}.orig").write_text(Path(path).read_text(encoding="utf-8"), encoding="utf-8")
        partial = Path(f"{path}.partial")
        partial.write_text(json.dumps(migrated.config, indent=2) + "\n", encoding="utf-8")
        os.replace(partial, path)
        config, report.fixed = migrated.config, True
    block = read_block(config)
    report.block = None if block is None else block.model_dump()
    for setting, sentence in refused(config):
        if f'"{setting}" is still "auto"' in sentence:
            report.filled_in.append(setting)
        else:
            report.refused.append(sentence)
    return report


def render(report: DeepSpeedReport, *, console: Console | None = None) -> None:
    """Prints the report for people."""
    out = console or Console(highlight=False, soft_wrap=True)
    title = "replaced" if report.fixed else "has a counterpart; --fix replaces it"
    for heading, lines in (("refused", report.refused), (title, report.replaceable)):
        if lines:
            out.print(f"[bold]{heading}[/]")
            for line in lines:
                out.print(f"  {escape(line)}")
    if report.filled_in:
        out.print(f"for HF Trainer or Accelerate to fill in: {escape(', '.join(report.filled_in))}")
    if report.block is None:
        out.print(f'[bold red]there is no enabled block "{BLOCK}": the job would run with plain ZeRO[/]')
    elif report.usable:
        out.print("[bold green]a job with this configuration starts[/]")
    else:
        out.print(f"[bold red]{len(report.refused)} refused: the job does not start until they are changed[/]")


def _read(path: str) -> dict[str, Any]:
    try:
        config = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigurationError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigurationError(f"{path} holds a {type(config).__name__}; a DeepSpeed configuration is an object.")
    return config
