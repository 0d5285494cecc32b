"""Drop-in for `horovod.tensorflow.keras` under Keras 3, where stock Horovod does not reduce.

-import horovod.tensorflow.keras as hvd
+import hvd_gradcomp.tensorflow.keras as hvd
...
-optimizer = hvd.DistributedOptimizer(optimizer)
+optimizer = hvd.DistributedOptimizer(optimizer, compression=hvd.VarianceCompressor(alpha=2))
"""

from horovod.tensorflow.keras import *  # noqa: F403

# Not `from ... import callbacks`: that would find Horovod's module of this name, imported above.
import hvd_gradcomp.tensorflow.keras.callbacks as callbacks
from hvd_gradcomp import *  # noqa: F403
from hvd_gradcomp.handshake import MismatchError
from hvd_gradcomp.stats import CompressionStats
from hvd_gradcomp.tensorflow.broadcast import broadcast_variables
from hvd_gradcomp.tensorflow.joining import join
from hvd_gradcomp.tensorflow.keras.moments import track_moments
from hvd_gradcomp.tensorflow.keras.optimizer import DistributedOptimizer, load_model
from hvd_gradcomp.tensorflow.probing import Probe
from hvd_gradcomp.tensorflow.stats import compression_stats, describe, retrain, verify
from hvd_gradcomp.verify import DivergedError

__all__ = [name for name in dir() if not name.startswith("_")]
