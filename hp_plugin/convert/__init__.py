"""Checkpoints from one format to another: without a process group, in the memory of about one parameter.

A reader describes what a folder holds as `Contents`, whose tensors are read when they are asked for; a writer goes
through them one by one. `convert` joins the two.
"""

from __future__ import annotations

from hp_plugin.convert.contents import Contents, Stored
from hp_plugin.convert.converting import FORMATS, Report, convert
from hp_plugin.convert.detect import format_of, open_checkpoint

__all__ = ["FORMATS", "Contents", "Report", "Stored", "convert", "format_of", "open_checkpoint"]
