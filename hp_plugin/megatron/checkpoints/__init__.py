"""Megatron's `torch_dist` checkpoints, written and read by jobs whose tensors are shards."""
