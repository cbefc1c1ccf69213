"""Checkpoints from one format to another."""
