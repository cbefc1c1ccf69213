"""Benchmarks of hp_plugin against its peers: `python -m bench NAME [--json] [--quick]`.

Not a part of the installed package. Every benchmark runs ours and the peers interleaved in one run and compares them
round by round; `docs/benchmarks.md` says how to read the results.
"""
