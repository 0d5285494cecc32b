"""Measurements: run with `make bench`, or `python -m benchmarks.curve --help`."""
