"""Horovod's own tests and examples, with stock Horovod and with this package: `make compat`.

It belongs to the tests, since it passes or fails; pytest does not collect it, since it takes an
hour and needs a checkout of Horovod, nothing of which is copied into this repository.
"""
