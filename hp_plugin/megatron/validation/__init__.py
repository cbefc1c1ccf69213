"""`--hyperfsdp-mode validation`: steps of a job against the same steps of stock Megatron on one rank."""
