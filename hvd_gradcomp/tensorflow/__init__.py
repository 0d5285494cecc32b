"""Drop-in for `horovod.tensorflow`: all of it, with gradient compression.

-import horovod.tensorflow as hvd
+import hvd_gradcomp.tensorflow as hvd
...
-tape = hvd.DistributedGradientTape(tape)
+tape = hvd.DistributedGradientTape(tape, compression=hvd.VarianceCompressor(alpha=2))
"""

from horovod.tensorflow import *  # noqa: F403

from hvd_gradcomp import *  # noqa: F403
from hvd_gradcomp.handshake import MismatchError
from hvd_gradcomp.stats import CompressionStats
from hvd_gradcomp.tensorflow.broadcast import broadcast_variables
from hvd_gradcomp.tensorflow.joining import join
from hvd_gradcomp.tensorflow.keras.optimizer import DistributedOptimizer
from hvd_gradcomp.tensorflow.probing import Probe
from hvd_gradcomp.tensorflow.stats import compression_stats, describe, retrain, verify
from hvd_gradcomp.tensorflow.tape import (
    DistributedGradientTape,
    microbatch_gradients,
    reduce_gradients,
)
from hvd_gradcomp.verify import DivergedError

__all__ = [name for name in dir() if not name.startswith("_")]
