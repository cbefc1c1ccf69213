"""`python -m bench collectives`: all-gather and reduce-scatter inside a supernode, by size and transport."""
