"""`python -m hp_plugin.cli`, for instance under torchrun."""

from __future__ import annotations

from hp_plugin.cli.main import app

if __name__ == "__main__":
    app()
