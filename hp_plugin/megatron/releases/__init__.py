"""What differs between the supported releases of Megatron, and which names are replaced in each."""
