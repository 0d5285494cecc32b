"""Version of the package, which ranks compare."""

__version__ = "0.2.0"
