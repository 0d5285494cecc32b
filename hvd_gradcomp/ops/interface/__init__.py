"""Contracts of the ops, by subject. A *composite op* is made of others, once for all backends.

If it has a kernel in C it calls that first (see `native.py`); the ops below define the result.
A backend may override a composite op with a faster version if the result is bit-identical;
`project` and `lift`, which multiply matrices, may differ in rounding. `ops/torch/` and
`ops/tensorflow/` have the same modules.

    creation, elementwise, indexing, reduction, matrices   what their names say
    searching       walks over a bucket in tiles that stay in cache
    quantization    codes of few bits
    bitpack         how codes are packed
    header          checksums of frames
    host            decisions on the host, and checks that stop a step
    native          calls of the kernels in C
"""
