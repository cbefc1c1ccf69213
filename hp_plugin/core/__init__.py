"""Topology-aware data parallelism on torch alone.

Nothing in this package imports a host framework (Megatron-LM, DeepSpeed): ``hp_plugin.core`` works with torch only. Its
sub-packages import one another in one direction: devices, kernels, topology and layout, transport, fsdp and optim,
checkpoint. The contracts in ``pyproject.toml`` keep it so.
"""
