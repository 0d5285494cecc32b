"""Tensor ops in TensorFlow, eager and in a graph.

In a graph, sizes that depend on the step (the capacity of a payload, the number of sent elements)
are int64 scalars: one trace serves all capacity levels. `static=True` keeps to shapes that are
known while tracing, which XLA needs.

XLA contracts `a + b * c` into a fused multiply-add, which rounds once where all others round
twice: `static=True` protects the products of `square` and `times` from that.

Composite ops run in C, as custom ops (see `c/tensorflow.cc`), if the library is built for this
TensorFlow. The custom ops have CPU kernels only. With a visible GPU, where TensorFlow would copy
tensors to the host for them, and with `static=True`, plain ops run instead.
"""

from __future__ import annotations

from hvd_gradcomp.ops.tensorflow.base import ASSERTION as ASSERTION
from hvd_gradcomp.ops.tensorflow.base import assertion as assertion
from hvd_gradcomp.ops.tensorflow.base import library as library
from hvd_gradcomp.ops.tensorflow.bitpack import BitPacking
from hvd_gradcomp.ops.tensorflow.buckets import Buckets
from hvd_gradcomp.ops.tensorflow.creation import Creation
from hvd_gradcomp.ops.tensorflow.elementwise import Elementwise
from hvd_gradcomp.ops.tensorflow.header import Headers
from hvd_gradcomp.ops.tensorflow.host import HostControl
from hvd_gradcomp.ops.tensorflow.indexing import Indexing
from hvd_gradcomp.ops.tensorflow.matrices import Matrices
from hvd_gradcomp.ops.tensorflow.quantization import Quantization
from hvd_gradcomp.ops.tensorflow.reduction import Reduction
from hvd_gradcomp.ops.tensorflow.searching import Searching


class TensorFlowOps(
    Creation,
    Headers,
    Quantization,
    BitPacking,
    Matrices,
    Reduction,
    Indexing,
    Elementwise,
    Searching,
    HostControl,
    Buckets,
):
    """TensorFlow ops, on any device.

    Args:
        static: only shapes that are known while tracing, for XLA.

    Attributes:
        verdicts: if a step may be skipped, whether all gradients were finite: a bool scalar for
            each check of the function that is being traced. None raises an error instead.
    """
