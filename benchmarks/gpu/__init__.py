"""Benchmark of what only a GPU can show, in some minutes; see `python -m benchmarks.gpu --help`."""
