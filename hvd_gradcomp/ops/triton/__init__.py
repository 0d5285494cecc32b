"""Fused kernels in Triton, for CUDA: one file per family, and shared code in `common`.

They keep the contracts of `ops.fused` and of the composite ops that they override, bit by
bit. Plain ops are the reference: tests compare each kernel with them in Triton's interpreter, on a
CPU, and compile it for GPUs, which needs none.

Nothing here is imported before there is a tensor on a GPU (`ops.torch`): a process that has loaded
TensorFlow aborts when it loads Triton.
"""
