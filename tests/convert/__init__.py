"""Tests of `hp_plugin.convert`."""
