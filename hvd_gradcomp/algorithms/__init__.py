"""The algorithms: one paper, one file."""
