"""Releases of torch, for what a test cannot ask of an older one."""

from __future__ import annotations

import torch

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
"""Major and minor number of the installed release."""
