"""Peak bytes of live tensors per rank, against the closed form and FSDP2."""
