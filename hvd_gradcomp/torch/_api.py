"""Public names of `hvd_gradcomp.torch`: Horovod's, some of them replaced by ours."""

from hvd_gradcomp.core.installation import require_horovod as _require_horovod

_require_horovod("torch")

import horovod.torch as _horovod
from horovod.torch import *  # noqa: F403

# Remove Horovod's modules of these names: `import ... as` and `from ... import` would find them.
for _name in ("elastic", "optimizer"):
    globals().pop(_name, None)

from hvd_gradcomp import *  # noqa: F403
from hvd_gradcomp.checkpoint.schema import CheckpointError
from hvd_gradcomp.monitoring.stats import CompressionStats
from hvd_gradcomp.monitoring.verify import DivergedError
from hvd_gradcomp.runtime.config_check import MismatchError
from hvd_gradcomp.runtime.errors import OutOfStepError
from hvd_gradcomp.runtime.stall_inspector import DeadlockError
from hvd_gradcomp.torch import elastic
from hvd_gradcomp.torch.comm.broadcast_objects import broadcast_parameters
from hvd_gradcomp.torch.drop_in import optimizer
from hvd_gradcomp.torch.drop_in.broadcast_state import broadcast_optimizer_state
from hvd_gradcomp.torch.drop_in.checkpoint import load_checkpoint, save_checkpoint
from hvd_gradcomp.torch.drop_in.lr_scheduler import EGCScheduler
from hvd_gradcomp.torch.drop_in.optimizer import DistributedOptimizer
from hvd_gradcomp.torch.drop_in.uneven_inputs import join
from hvd_gradcomp.torch.drop_in.wrapped_horovod import LocalSteps, MomentumExchange
from hvd_gradcomp.torch.moments.tracker import MomentTracker, track_moments
from hvd_gradcomp.torch.monitoring.inspection import compression_stats, describe, retrain, verify
from hvd_gradcomp.torch.monitoring.probing import Probe
from hvd_gradcomp.torch.monitoring.stats_writer import StatsWriter
from hvd_gradcomp.torch.reduce.step_sync import GradientChangedError

# Already replaced in Horovod's modules, see `comm.recorded`.
barrier, synchronize, shutdown = _horovod.barrier, _horovod.synchronize, _horovod.shutdown

__all__ = [name for name in dir() if not name.startswith("_")]
