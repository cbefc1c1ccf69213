"""A CPU-backed device named `npu`: what runs there names neither cuda nor cpu by accident. Tests only."""
