"""`--use-hypermuon`: matrices of a Megatron model, how they are laid out and who updates them."""
