"""What the adapters for host frameworks have in common: starting a script, speaking to a person, words."""
