"""What `hp-plugin check` finds out about the arguments of a Megatron job, as data. Megatron is not imported."""

from __future__ import annotations

import argparse
import contextlib
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from hp_plugin.errors import ConfigurationError, HyperParallelError
from hp_plugin.megatron.arguments import flags, mode_validation, muon_validation
from hp_plugin.megatron.arguments.command_file import Given, read_arguments
from hp_plugin.megatron.arguments.known_arguments import RELEASE
from hp_plugin.megatron.arguments.rules import ADJUSTED, CONFLICTS, SWITCHED_OFF, WITHOUT_EFFECT, Conflict
from hp_plugin.megatron.releases import versions

_SWITCHES = ("--use-hyperfsdp", "--use-hypermuon")
_LAUNCHER = ("--nproc", "--nnodes", "--node", "--master", "--rdzv", "--standalone", "--max-restarts", "--monitor")
"""Beginnings of torchrun's own flags."""


@dataclass(frozen=True)
class Finding:
    """One flag and what becomes of it.

    Attributes:
        flag: As it stands in the file, with its value.
        reason: Why, and for a refused flag what to do instead.
    """

    flag: str
    reason: str


@dataclass
class CheckReport:
    """Everything that `check` prints.

    Attributes:
        file: What was read.
        switches: Which of `--use-hyperfsdp` and `--use-hypermuon` the arguments were judged for.
        assumed: Whether these are assumed since the file has neither.
        megatron: One sentence on the installed Megatron and on the release whose flags were compared.
        refused: Flags with which the job does not start.
        switched_off: Flags that are accepted and switched off.
        replaced: Flags that are accepted and taken as something else.
        without_effect: Flags that are accepted and do nothing.
        works: Flags of Megatron that work as they are.
        unknown: Flags that are neither Megatron's nor ours: those of the script, of a launcher, of another release.
        unresolved: Flags whose value depends on something outside the file.
        validates: Whether the arguments ask for validation mode.
    """

    file: str
    switches: list[str]
    assumed: bool
    megatron: str
    refused: list[Finding] = field(default_factory=list)
    switched_off: list[Finding] = field(default_factory=list)
    replaced: list[Finding] = field(default_factory=list)
    without_effect: list[Finding] = field(default_factory=list)
    works: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    unresolved: list[str] = field(default_factory=list)
    validates: bool = False

    @property
    def usable(self) -> bool:
        """Whether a job with these arguments starts, as far as its arguments decide."""
        return not self.refused


def check(path: str) -> CheckReport:
    """Judges a file of arguments, or a script.

    A file without `--use-hyperfsdp` and `--use-hypermuon` is judged as if the first were added.

    Raises:
        ConfigurationError: The file cannot be read, or holds something else.
    """
    if path.endswith(".json"):
        raise ConfigurationError(
            f"{path} looks like a DeepSpeed configuration, which this release cannot check yet; give a file with "
            "Megatron's arguments."
        )
    given = read_arguments(path)
    present = [switch for switch in _SWITCHES if any(each.flag == switch for each in given)]
    report = CheckReport(path, present or [_SWITCHES[0]], not present, _megatron())
    _judge_ours(given, report)
    _judge_megatrons(given, report)
    return report


def _megatron() -> str:
    version = versions.megatron_version()
    compared = f"flags are compared with those of Megatron-LM {RELEASE}"
    if version is None:
        return f"Megatron-LM is not installed here; {compared}"
    if versions.series(version) not in versions.SUPPORTED:
        return f"megatron-core {version} is installed, which hp_plugin does not support; {compared}"
    return f"megatron-core {version} is installed; {compared}"


def _judge_ours(given: Sequence[Given], report: CheckReport) -> None:
    """Our own flags, read as a job reads them; the file of options that they may name is read too."""
    words = list(report.switches) if report.assumed else []
    mine = [each for each in given if _is_ours(each.flag)]
    for each in mine:
        words += [each.flag, *each.words]
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False, add_help=False)
    try:
        flags.check_spelling(words)
        with contextlib.redirect_stderr(io.StringIO()) as complaint:
            args = _parsed(flags.add_arguments(parser), words, complaint)
        report.validates = flags.resolve(args).mode == "validation"
    except HyperParallelError as error:
        report.refused.append(Finding(_first_of(mine), str(error)))


def _parsed(parser: argparse.ArgumentParser, words: list[str], complaint: io.StringIO) -> argparse.Namespace:
    try:
        args, _ = parser.parse_known_args(words)
    except (argparse.ArgumentError, SystemExit) as error:
        sentence = complaint.getvalue().strip().splitlines()[-1:] or [str(error)]
        raise ConfigurationError(f"{sentence[0]}.") from error
    return args


def _judge_megatrons(given: Sequence[Given], report: CheckReport) -> None:
    args = SimpleNamespace(**{each.argument.attribute: each.value for each in given if each.argument})
    seen: set[str] = set()
    for each in given:
        if _is_ours(each.flag) or each.text in seen:
            continue
        seen.add(each.text)
        if each.argument is None:
            if not each.flag.startswith(_LAUNCHER):
                report.unknown.append(each.flag)
            continue
        if any("$" in word for word in each.words):
            report.unresolved.append(each.text)
        if each.argument.kind == "value" and not each.words:
            report.refused.append(Finding(each.flag, "a value must follow it"))
            continue
        _place(each, args, report)


def _place(each: Given, args: SimpleNamespace, report: CheckReport) -> None:
    tables: list[tuple[list[Finding], Iterable[Conflict]]] = [(report.refused, _refusing(report))]
    if _SWITCHES[0] in report.switches:
        tables += [
            (report.switched_off, SWITCHED_OFF),
            (report.replaced, ADJUSTED),
            (report.without_effect, WITHOUT_EFFECT),
        ]
    attribute = each.argument.attribute if each.argument else ""
    for findings, table in tables:
        for rule in table:
            if rule.attribute == attribute and rule.refused(getattr(args, attribute)):
                findings.append(Finding(each.text, rule.advice))
                return
    report.works.append(each.text)


def _refusing(report: CheckReport) -> list[Conflict]:
    on_shards, with_muon = (switch in report.switches for switch in _SWITCHES)
    rules: list[Conflict] = []
    if with_muon:
        rules += muon_validation.CONFLICTS
        rules += muon_validation.ON_SHARDS if on_shards else muon_validation.ON_STOCK_DDP
    if on_shards:
        rules += CONFLICTS
        rules += mode_validation.CONFLICTS if report.validates else ()
    return rules


def _is_ours(flag: str) -> bool:
    return flag in _SWITCHES or flag.startswith((flags.PREFIX, flags.MUON_PREFIX))


def _first_of(given: Sequence[Given]) -> str:
    return given[0].flag if given else ""


def as_json(report: CheckReport) -> dict[str, Any]:
    """The report for `--json`."""
    import dataclasses

    return dataclasses.asdict(report) | {"usable": report.usable}
