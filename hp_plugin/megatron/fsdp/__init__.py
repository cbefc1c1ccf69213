"""Sharded training in Megatron's loop: the data-parallel class, gradients, the optimizer on shards."""
