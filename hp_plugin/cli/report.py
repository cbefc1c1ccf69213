"""How a `Report` looks in a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hp_plugin.cli.doctor import Report, python_path


def render(report: Report, *, console: Console | None = None) -> None:
    """Prints the report for people: sections, two tables, and the problems last."""
    out = console or Console(highlight=False, soft_wrap=True)
    out.print(f"[bold]hp_plugin {report.version}[/] on {escape(python_path())}\n")
    for name, version in report.packages.items():
        out.print(f"  {name:<14} {version or 'not installed'}")
    _section(out, "devices", report.devices)
    _section(out, "backends", [", ".join(report.backends)])
    _section(out, "native library", [report.native_library])
    _table(out, "kernels", report.kernels, ("operation", "device_type", "implementation", "applies_to", "reason"))
    columns = ("device_type", "dtype", "matrices", "kernel", "symmetric_products")
    _table(out, "orthogonalization (kernel: auto)", report.newton_schulz, columns)
    if report.warnings:
        _section(out, "warnings", report.warnings)
    _section(out, "topology", report.topology.splitlines())
    _section(out, "Megatron-LM", [report.megatron])
    if report.rebinding:
        # Lines and not a table: a full dotted name must stay in one piece to be searched for.
        out.print("\n[bold]names in Megatron that --use-hyperfsdp replaces[/]")
        for entry in report.rebinding:
            out.print(f"  {entry['target']}: {entry['state']} ({entry['stage']}; {escape(entry['purpose'])})")
    if report.compatibility_layer:
        lines = [f"{entry['name']} ({entry['area']})" for entry in report.compatibility_layer]
        _section(out, "names that the CPU compatibility layer replaces", lines)
    _section(out, "DeepSpeed", [report.deepspeed])
    if report.deepspeed_names:
        out.print("\n[bold]names in DeepSpeed that hp_plugin.deepspeed extends or replaces[/]")
        for entry in report.deepspeed_names:
            out.print(f"  {entry['target']}: {entry['state']} ({entry['kind']}; {escape(entry['purpose'])})")
    if report.problems:
        out.print("\n[bold red]not usable:[/]")
        for problem in report.problems:
            out.print(f"  {escape(problem)}")
    else:
        out.print("\n[bold green]usable[/]")


def _section(out: Console, title: str, lines: list[str]) -> None:
    out.print(f"\n[bold]{title}[/]")
    for line in lines:
        out.print(f"  {escape(line)}")


def _table(out: Console, title: str, rows: list[dict[str, str]], columns: tuple[str, ...]) -> None:
    if not rows:
        return
    table = Table(title=f"\n[bold]{title}[/]", title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column.replace("_", " "), overflow="fold")
    for row in rows:
        table.add_row(*(escape(row[column]) for column in columns))
    out.print(table)
