"""The command line `hp-plugin`."""
