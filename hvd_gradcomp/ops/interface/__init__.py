"""Contracts of the ops, by subject. A *composite op* is made of others, once for all backends.

A backend may override a composite op with a faster version if the result is bit-identical;
`project` and `lift`, which multiply matrices, may differ in rounding. `ops/torch/` and
`ops/tensorflow/` have the same modules.
"""
