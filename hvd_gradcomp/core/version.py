"""Of the package; what ranks compare."""

__version__ = "0.1.0"
