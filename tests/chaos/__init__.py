"""Attacks on what is promised, seeded and counted: `make chaos`, see `__main__`."""
