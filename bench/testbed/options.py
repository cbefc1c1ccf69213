"""Command-line options that every benchmark on the testbed shares, so that they read and mean the same everywhere."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from bench.errors import UnavailableError

_UNITS = {"kbit": 1e-3, "mbit": 1.0, "gbit": 1e3}

LinkOption = Annotated[
    str, typer.Option("--link", help="Rate of the link of each supernode, each direction: 1gbit, 200mbit, none.")
]
DelayOption = Annotated[float, typer.Option("--delay", help="One-way delay of the link in ms.", min=0.0)]
SupernodesOption = Annotated[int, typer.Option("--supernodes", help="Number of supernodes.", min=1)]
RanksOption = Annotated[int, typer.Option("--ranks", help="Ranks in each supernode.", min=1)]


def parse_rate(text: str) -> float | None:
    """The rate in Mbit/s that `--link` states; None for "none", a link as fast as the machine makes it.

    Raises:
        UnavailableError: `text` is neither a rate nor "none".
    """
    word = text.strip().lower()
    if word == "none":
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", word)
    if not found or float(found.group(1)) == 0:
        raise UnavailableError(f"--link {text!r} is not a rate; write 1gbit, 200mbit or none")
    return float(found.group(1)) * _UNITS[found.group(2)]
