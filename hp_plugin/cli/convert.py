"""`hp-plugin convert`: what was given on the command line, and how the result is told."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape

from hp_plugin.convert import FORMATS, Report
from hp_plugin.convert import convert as convert_checkpoint
from hp_plugin.errors import ConfigurationError, UnsupportedError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)
_INSTEAD = {
    "zero": "use --to universal, which stock DeepSpeed loads in every stage with load_universal",
    "torch_dist": "Megatron keeps arguments, random state and stacked layers in it, which no other format has: load "
    "and save with Megatron, whose jobs with HyperFSDP write torch_dist themselves",
    "torch": "use --to safetensors",
}


def run(source: str, destination: str, *, to: str, dtype: str | None, max_shard_size: str, verify: bool) -> Report:
    """Converts.

    Args:
        source: Folder.
        destination: Folder.
        to: One of `hp_plugin.convert.FORMATS`.
        dtype: A name of a dtype; None keeps what is stored.
        max_shard_size: Such as "5GB", "500MB" or "2GiB".
        verify: Read back what was written.

    Raises:
        ConfigurationError: An option has no such value, or the source cannot be read.
        UnsupportedError: A format that cannot be written.
    """
    if to in _INSTEAD:
        raise UnsupportedError(f"--to {to} cannot be written; {_INSTEAD[to]}.")
    if to not in FORMATS:
        raise ConfigurationError(f"--to is {to!r}; choose one of {', '.join(FORMATS)}.")
    if dtype is not None and dtype not in _DTYPES:
        raise ConfigurationError(f"--dtype is {dtype!r}; choose one of {', '.join(_DTYPES)}.")
    return convert_checkpoint(
        Path(source),
        Path(destination),
        to=to,
        dtype=None if dtype is None else _DTYPES[dtype],
        max_bytes=bytes_of(max_shard_size),
        verify=verify,
    )


def bytes_of(text: str) -> int:
    """The number that "5GB" (10**9), "500MB", "2GiB" (2**30) or "1000" stands for.

    Raises:
        ConfigurationError: It stands for none above zero.
    """
    match = _SIZE.fullmatch(text.strip())
    base = 1024 if match and match[3] else 1000
    size = int(float(match[1]) * base ** " KMGT".index(match[2].upper() or " ")) if match else 0
    if size <= 0:
        raise ConfigurationError(f"--max-shard-size is {text!r}; give a size such as 5GB, 500MB or 2GiB.")
    return size


def render(report: Report, *, console: Console | None = None) -> None:
    """Prints the report for people."""
    out = console or Console(highlight=False, soft_wrap=True)
    out.print(f"read     {escape(report.source)}: {escape(report.source_format)}")
    tensors = f"{report.weights} parameters of {report.elements} elements, {report.buffers} buffers"
    out.print(f"written  {escape(report.destination)}: {tensors}, {report.states} tensors of optimizer state")
    for note in report.notes:
        out.print(f"note     {escape(note)}")
    if report.verified is not None:
        out.print(f"[bold green]verified {report.verified} tensors: names, elements and checksums are equal[/]")
