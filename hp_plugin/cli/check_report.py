"""How a `CheckReport` looks in a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape

from hp_plugin.cli.check import CheckReport, Finding


def render(report: CheckReport, *, console: Console | None = None) -> None:
    """Prints the report for people: what needs attention with its reason, the rest as counts, the verdict last."""
    out = console or Console(highlight=False, soft_wrap=True)
    judged = " and ".join(report.switches)
    how = "as if it had" if report.assumed else "with its"
    out.print(f"[bold]{escape(report.file)}[/], {how} {judged}; {escape(report.megatron)}")
    _findings(out, "refused", report.refused)
    _findings(out, "accepted and switched off", report.switched_off)
    _findings(out, "accepted and taken as something else", report.replaced)
    _findings(out, "accepted, without effect", report.without_effect)
    _lines(out, "not flags of Megatron-LM (of the script, or of another release)", report.unknown)
    _lines(out, "with a value from outside the file, not judged", report.unresolved)
    out.print(f"\n{len(report.works)} flags work as they are")
    if report.usable:
        out.print("[bold green]a job with these arguments starts[/]")
    else:
        out.print(f"[bold red]{len(report.refused)} refused: the job does not start until they are changed[/]")


def _findings(out: Console, title: str, findings: list[Finding]) -> None:
    _lines(out, title, [f"{finding.flag}: {finding.reason}" for finding in findings])


def _lines(out: Console, title: str, lines: list[str]) -> None:
    if lines:
        out.print(f"\n[bold]{title}[/]")
        for line in lines:
            out.print(f"  {escape(line)}")
