"""Drop-in for `horovod.tensorflow`: all of it, with gradient compression.

-import horovod.tensorflow as hvd
+import hvd_gradcomp.tensorflow as hvd
...
-tape = hvd.DistributedGradientTape(tape)
+tape = hvd.DistributedGradientTape(tape, compression=hvd.VarianceCompressor(alpha=2))
"""

from importlib import import_module as _import_module

from hvd_gradcomp.core.installation import require_horovod as _require_horovod

_require_horovod("tensorflow")

from horovod.tensorflow import *  # noqa: F403
from horovod.tensorflow.util import _executing_eagerly  # an attribute of Horovod's

# Remove Horovod's modules of these names, which `import ... as` and `from ... import` would find,
# and its optimizer, which does not reduce under Keras 3.
for _name in ("elastic", "keras", "DistributedOptimizer"):
    globals().pop(_name, None)

from hvd_gradcomp import *  # noqa: F403
from hvd_gradcomp.checkpoint.schema import CheckpointError
from hvd_gradcomp.monitoring.stats import CompressionStats
from hvd_gradcomp.monitoring.verify import DivergedError
from hvd_gradcomp.runtime.config_check import MismatchError
from hvd_gradcomp.runtime.errors import OutOfStepError
from hvd_gradcomp.tensorflow import elastic
from hvd_gradcomp.tensorflow.broadcast_state import broadcast_variables
from hvd_gradcomp.tensorflow.checkpoint import load_checkpoint, save_checkpoint
from hvd_gradcomp.tensorflow.comm.stall_inspector import DeadlockError, init, shutdown
from hvd_gradcomp.tensorflow.datasets import even_batches
from hvd_gradcomp.tensorflow.local_steps import LocalSteps
from hvd_gradcomp.tensorflow.probing import Probe
from hvd_gradcomp.tensorflow.stats import compression_stats, describe, discard_step, retrain, verify
from hvd_gradcomp.tensorflow.stats_writer import StatsWriter
from hvd_gradcomp.tensorflow.tape import (
    DistributedGradientTape,
    PartialDistributedGradientTape,
    microbatch_gradients,
    reduce_gradients,
    tape_state,
)
from hvd_gradcomp.tensorflow.uneven_inputs import join

__all__ = [name for name in dir() if not name.startswith("_")]


def __getattr__(name: str) -> object:
    if name in ("DistributedOptimizer", "MomentumExchange"):  # what needs Keras 3
        return getattr(_import_module(f"{__name__}.keras"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
