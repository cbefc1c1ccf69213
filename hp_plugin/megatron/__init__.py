"""HyperFSDP for Megatron-LM: the flag ``--use-hyperfsdp`` without an edit of Megatron.

Either start the job through the launcher, ``torchrun ... -m hp_plugin.megatron pretrain_gpt.py ARGS...``, or call
:func:`install` in the script before it imports Megatron. Importing this package changes nothing.
"""

from __future__ import annotations

from hp_plugin.megatron.installation import install, rebinding_table, rebound_names, uninstall

__all__ = ["install", "rebinding_table", "rebound_names", "uninstall"]
