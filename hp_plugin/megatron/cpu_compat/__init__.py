"""CPU compatibility layer for Megatron-LM: answers ``torch.cuda`` names on CPU, for tests and tutorials.

Megatron's training loop names ``torch.cuda`` in some hundred places and has no CPU path. This layer replaces
those names of torch, and three of Megatron, in the running process, so that the unmodified loop trains on CPU
with gloo. It is emulation: it says nothing about speed or memory on an accelerator, and memory counters that
it answers read 0. It refuses to work where a real accelerator exists, it is reached only by
``--hyperfsdp-device cpu`` or ``HP_DEVICE=cpu``, it announces itself, every replacement is in :func:`table`, and
:func:`restore` takes them all back.

| module | answers |
|---|---|
| ``devices`` | device count, properties, memory counters, streams, events, tensor type names of ``torch.cuda`` |
| ``factories`` | ``device="cuda"`` in factories, ``Tensor.to``, ``.cuda()`` |
| ``rng`` | the "CUDA" generator, which is the CPU's default one |
| ``distributed`` | the nccl back end, which becomes gloo, and what gloo lacks |
| ``megatron_names`` | what Megatron itself needs, per release |
"""

from __future__ import annotations

from hp_plugin.megatron.cpu_compat.layer import install, is_installed, restore, table

__all__ = ["install", "is_installed", "restore", "table"]
