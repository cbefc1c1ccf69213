"""The exceptions that hp_plugin raises on purpose.

Every message is one or more sentences: what was found, what was expected, and what to change. A caller that wants to
tell "hp_plugin refused this" from any other failure catches :class:`HyperParallelError`.
"""

from __future__ import annotations


class HyperParallelError(Exception):
    """Base of every exception that hp_plugin raises deliberately."""


class UnsupportedError(HyperParallelError, NotImplementedError):
    """A known option or combination that hp_plugin does not support; the message names what to use instead."""


class ConfigurationError(HyperParallelError, ValueError):
    """A value, or a combination of values, that cannot be right whatever hp_plugin supports."""
