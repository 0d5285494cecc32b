"""Drop-in for `horovod.tensorflow.keras` under Keras 3, where stock Horovod does not reduce.

-import horovod.tensorflow.keras as hvd
+import hvd_gradcomp.tensorflow.keras as hvd
...
-optimizer = hvd.DistributedOptimizer(optimizer)
+optimizer = hvd.DistributedOptimizer(optimizer, compression=hvd.VarianceCompressor(alpha=2))
"""

import keras as _keras

if int(_keras.__version__.partition(".")[0]) < 3:
    raise ImportError(
        f"hvd_gradcomp.tensorflow.keras needs Keras 3, this is Keras {_keras.__version__}: install "
        "tensorflow>=2.16 with keras>=3. With Keras 2 reduce in a loop of your own: "
        "hvd_gradcomp.tensorflow.DistributedGradientTape takes any tf.Variable"
    )

from hvd_gradcomp.core.installation import require_keras_backend as _require_keras_backend

_require_keras_backend(_keras.backend.backend())

from horovod.tensorflow.keras import *  # noqa: F403

# Remove Horovod's modules of these names, which `import ... as` and `from ... import` would find.
for _name in ("callbacks", "elastic"):
    globals().pop(_name, None)

from hvd_gradcomp import *  # noqa: F403
from hvd_gradcomp.checkpoint.schema import CheckpointError
from hvd_gradcomp.monitoring.stats import CompressionStats
from hvd_gradcomp.monitoring.verify import DivergedError
from hvd_gradcomp.runtime.config_check import MismatchError
from hvd_gradcomp.runtime.errors import OutOfStepError
from hvd_gradcomp.tensorflow.broadcast_state import broadcast_variables
from hvd_gradcomp.tensorflow.checkpoint import load_checkpoint, save_checkpoint
from hvd_gradcomp.tensorflow.comm.stall_inspector import DeadlockError, init, shutdown
from hvd_gradcomp.tensorflow.datasets import even_batches
from hvd_gradcomp.tensorflow.keras import callbacks, elastic
from hvd_gradcomp.tensorflow.keras.fit_patch import translate as _translate
from hvd_gradcomp.tensorflow.keras.moments import track_moments
from hvd_gradcomp.tensorflow.keras.momentum_exchange import MomentumExchange
from hvd_gradcomp.tensorflow.keras.optimizer import (
    DistributedOptimizer,
    PartialDistributedOptimizer,
    load_model,
)
from hvd_gradcomp.tensorflow.probing import Probe
from hvd_gradcomp.tensorflow.stats import compression_stats, describe, discard_step, retrain, verify
from hvd_gradcomp.tensorflow.stats_writer import StatsWriter
from hvd_gradcomp.tensorflow.uneven_inputs import join

_translate()
__all__ = [name for name in dir() if not name.startswith("_")]
