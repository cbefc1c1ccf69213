"""`--hyperfsdp-migrate observe`: what HyperFSDP would do to a job that runs on the stock back end."""
