"""Gradient compression for Horovod.

    import hvd_gradcomp.torch as hvd          # or hvd_gradcomp.tensorflow
    optimizer = hvd.DistributedOptimizer(optimizer, compression=hvd.VarianceCompressor(alpha=2))

This module imports no framework: the compressors are descriptions, the frontends run them.
"""

from hvd_gradcomp.algorithms.acp_sgd import ACPSGDCompressor
from hvd_gradcomp.algorithms.balanced import balanced
from hvd_gradcomp.algorithms.chunked_topk import ChunkedTopKCompressor
from hvd_gradcomp.algorithms.demo import DeMoCompressor
from hvd_gradcomp.algorithms.dense import FP16Compressor, NoneCompressor
from hvd_gradcomp.algorithms.dgc import DGCCompressor
from hvd_gradcomp.algorithms.egc import EGCCompressor
from hvd_gradcomp.algorithms.gradient_dropping import GradientDroppingCompressor
from hvd_gradcomp.algorithms.gradiveq import GradiVeQCompressor
from hvd_gradcomp.algorithms.hybrid import HybridCompressor
from hvd_gradcomp.algorithms.lgc import LGCCompressor
from hvd_gradcomp.algorithms.local_steps import OuterSGD, diloco, sparse_loco
from hvd_gradcomp.algorithms.narrow import BF16Compressor, FP8Compressor, Int8Compressor
from hvd_gradcomp.algorithms.natural import NaturalCompressor
from hvd_gradcomp.algorithms.oktopk import OkTopKCompressor
from hvd_gradcomp.algorithms.onebit import OneBitCompressor
from hvd_gradcomp.algorithms.powersgd import PowerSGDCompressor
from hvd_gradcomp.algorithms.qsgd import QSGDCompressor
from hvd_gradcomp.algorithms.random_k import RandomKCompressor
from hvd_gradcomp.algorithms.robust import robust
from hvd_gradcomp.algorithms.scalecom import ScaleComCompressor
from hvd_gradcomp.algorithms.sign_sgd import EFSignSGDCompressor
from hvd_gradcomp.algorithms.signum import SignumCompressor
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
    "ACPSGDCompressor",
    "BF16Compressor",
    "ChunkedTopKCompressor",
    "Compressor",
    "DGCCompressor",
    "DeMoCompressor",
    "EFSignSGDCompressor",
    "EGCCompressor",
    "FP8Compressor",
    "FP16Compressor",
    "GradiVeQCompressor",
    "GradientDroppingCompressor",
    "HybridCompressor",
    "Int8Compressor",
    "JSONLines",
    "LGCCompressor",
    "NaturalCompressor",
    "NonFiniteGradientError",
    "NoneCompressor",
    "OkTopKCompressor",
    "OneBitCompressor",
    "OuterSGD",
    "PayloadError",
    "PowerSGDCompressor",
    "QSGDCompressor",
    "RandomKCompressor",
    "ScaleComCompressor",
    "SignumCompressor",
    "SparseGDCompressor",
    "StromCompressor",
    "TensorBoard",
    "TernGradCompressor",
    "VarianceCompressor",
    "__version__",
    "after",
    "balanced",
    "diloco",
    "partition",
    "robust",
    "role",
    "smaller",
    "sparse_loco",
]
