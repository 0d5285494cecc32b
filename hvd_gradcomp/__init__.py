"""Gradient compression for Horovod.

    import hvd_gradcomp.torch as hvd          # or hvd_gradcomp.tensorflow
    optimizer = hvd.DistributedOptimizer(optimizer, compression=hvd.VarianceCompressor(alpha=2))

This module imports no framework: the compressors are descriptions, the frontends run them.
"""

from hvd_gradcomp.algorithms.dense import FP16Compressor, NoneCompressor
from hvd_gradcomp.algorithms.dgc import DGCCompressor
from hvd_gradcomp.algorithms.egc import EGCCompressor
from hvd_gradcomp.algorithms.gradient_dropping import GradientDroppingCompressor
from hvd_gradcomp.algorithms.gradiveq import GradiVeQCompressor
from hvd_gradcomp.algorithms.hybrid import HybridCompressor
from hvd_gradcomp.algorithms.lgc import LGCCompressor
from hvd_gradcomp.algorithms.onebit import OneBitCompressor
from hvd_gradcomp.algorithms.qsgd import QSGDCompressor
from hvd_gradcomp.algorithms.scalecom import ScaleComCompressor
from hvd_gradcomp.algorithms.sparse_gd import SparseGDCompressor
from hvd_gradcomp.algorithms.strom import StromCompressor
from hvd_gradcomp.algorithms.terngrad import TernGradCompressor
from hvd_gradcomp.algorithms.variance import VarianceCompressor
from hvd_gradcomp.algorithms.wrappers import after
from hvd_gradcomp.core.compressor import Compressor
from hvd_gradcomp.core.version import __version__
from hvd_gradcomp.monitoring.reports import JSONLines, TensorBoard
from hvd_gradcomp.ops import NonFiniteGradientError, PayloadError
from hvd_gradcomp.planning.assignment import partition, role, smaller

__all__ = [
    "Compressor",
    "DGCCompressor",
    "EGCCompressor",
    "FP16Compressor",
    "GradiVeQCompressor",
    "GradientDroppingCompressor",
    "HybridCompressor",
    "JSONLines",
    "LGCCompressor",
    "NonFiniteGradientError",
    "NoneCompressor",
    "OneBitCompressor",
    "PayloadError",
    "QSGDCompressor",
    "ScaleComCompressor",
    "SparseGDCompressor",
    "StromCompressor",
    "TensorBoard",
    "TernGradCompressor",
    "VarianceCompressor",
    "__version__",
    "after",
    "partition",
    "role",
    "smaller",
]
