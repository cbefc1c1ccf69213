"""HyperFSDP for DeepSpeed: the block `"hyperfsdp"` in the JSON, without an edit of DeepSpeed.

Either start the job through the launcher, `torchrun ... -m hp_plugin.deepspeed train.py ARGS...`, or import this
package before `deepspeed.initialize`, best before DeepSpeed. Jobs whose configuration does not have the block are not
affected. The import itself does not import DeepSpeed; it arranges for what follows when DeepSpeed is.
"""

from __future__ import annotations

from hp_plugin.deepspeed.installation import install, rebinding_table, uninstall
from hp_plugin.deepspeed.versions import is_installed

__all__ = ["install", "rebinding_table", "uninstall"]

if is_installed():
    install()
