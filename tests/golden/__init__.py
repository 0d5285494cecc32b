"""Golden bytes, a file a method; see `tests.golden.bytes_of`."""
