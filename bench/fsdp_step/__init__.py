"""`python -m bench fsdp-step`: a training step over a slow link, ours and the peers' real classes side by side."""
