"""Ends of sentences about unknown words. The launcher is tested with each adapter."""

from __future__ import annotations

from hp_plugin.host.words import did_you_mean


def test_the_nearest_word_is_named_and_all_where_none_is_near() -> None:
    assert did_you_mean("supernode_sise", ["shard_size", "supernode_size"]) == "; did you mean supernode_size?"
    assert did_you_mean("zzz", ["shard_size", "supernode_size"]) == "; known are shard_size, supernode_size."
