"""Passes in Triton, for CUDA: a file a family, and what they share in `common`.

They keep the contracts of `ops.torch.passes` and of the composites that they shadow, and their
bits. The reference is the verbs; tests hold each kernel against it in Triton's interpreter, on a
CPU, and compile it for GPUs without one.

Nothing here is imported before there is a tensor on a GPU (`ops.torch`): a process that has loaded
TensorFlow aborts when it loads Triton.
"""
