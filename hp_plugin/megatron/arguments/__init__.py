"""The command line: our options, and which of Megatron's own are accepted, changed or refused."""
