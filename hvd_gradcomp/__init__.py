"""Gradient compression for Horovod.

    import hvd_gradcomp.torch as hvd          # or hvd_gradcomp.tensorflow
    optimizer = hvd.DistributedOptimizer(optimizer, compression=hvd.VarianceCompressor(alpha=2))

This module imports no framework: the compressors are descriptions, the frontends run them.
"""

from hvd_gradcomp.aggregator import Compressor
from hvd_gradcomp.algorithms.dense import FP16Compressor, NoneCompressor
from hvd_gradcomp.algorithms.hybrid import HybridCompressor
from hvd_gradcomp.algorithms.strom import StromCompressor
from hvd_gradcomp.algorithms.variance import VarianceCompressor
from hvd_gradcomp.ops import PayloadError

__version__ = "0.1.0"

__all__ = [
    "Compressor",
    "FP16Compressor",
    "HybridCompressor",
    "NoneCompressor",
    "PayloadError",
    "StromCompressor",
    "VarianceCompressor",
    "__version__",
]
