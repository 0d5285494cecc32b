"""Gradient compression and local steps for data-parallel training.

    from hvd_gradcomp.torch import ddp        # or fsdp, trainers: without Horovod
    ddp.compress(model, QSGDCompressor(bits=4))

    import hvd_gradcomp.torch as hvd          # or hvd_gradcomp.tensorflow: over Horovod
    optimizer = hvd.DistributedOptimizer(optimizer, compression=hvd.VarianceCompressor(alpha=2))

This module imports no framework: the compressors are descriptions, the frontends run them.
"""

from hvd_gradcomp.algorithms.combined.balanced import balanced
from hvd_gradcomp.algorithms.combined.local_steps import OuterSGD, diloco, sparse_loco
from hvd_gradcomp.algorithms.combined.robust import robust
from hvd_gradcomp.algorithms.combined.round_length import QuadraticRule
from hvd_gradcomp.algorithms.combined.wrappers import after
from hvd_gradcomp.algorithms.dense import FP16Compressor, NoneCompressor
from hvd_gradcomp.algorithms.gradiveq import GradiVeQCompressor
from hvd_gradcomp.algorithms.lgc import LGCCompressor
from hvd_gradcomp.algorithms.low_rank.acp_sgd import ACPSGDCompressor
from hvd_gradcomp.algorithms.low_rank.powersgd import PowerSGDCompressor
from hvd_gradcomp.algorithms.quantized.narrow import BF16Compressor, FP8Compressor, Int8Compressor
from hvd_gradcomp.algorithms.quantized.natural import NaturalCompressor
from hvd_gradcomp.algorithms.quantized.onebit import OneBitCompressor
from hvd_gradcomp.algorithms.quantized.qsgd import QSGDCompressor
from hvd_gradcomp.algorithms.quantized.sign_sgd import EFSignSGDCompressor
from hvd_gradcomp.algorithms.quantized.signum import SignumCompressor
from hvd_gradcomp.algorithms.quantized.terngrad import TernGradCompressor
from hvd_gradcomp.algorithms.sparse.chunked_topk import ChunkedTopKCompressor
from hvd_gradcomp.algorithms.sparse.demo import DeMoCompressor
from hvd_gradcomp.algorithms.sparse.dgc import DGCCompressor
from hvd_gradcomp.algorithms.sparse.egc import EGCCompressor
from hvd_gradcomp.algorithms.sparse.gradient_dropping import GradientDroppingCompressor
from hvd_gradcomp.algorithms.sparse.oktopk import OkTopKCompressor
from hvd_gradcomp.algorithms.sparse.random_k import RandomKCompressor
from hvd_gradcomp.algorithms.sparse.scalecom import ScaleComCompressor
from hvd_gradcomp.algorithms.sparse.sparse_gd import SparseGDCompressor
from hvd_gradcomp.algorithms.threshold.hybrid import HybridCompressor
from hvd_gradcomp.algorithms.threshold.strom import StromCompressor
from hvd_gradcomp.algorithms.threshold.variance import VarianceCompressor
from hvd_gradcomp.core.version import __version__
from hvd_gradcomp.method.compressor import Compressor
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
    "QuadraticRule",
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
