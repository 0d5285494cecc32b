"""State of LGC's one bucket."""

from __future__ import annotations

from typing import Any, NamedTuple

from hvd_gradcomp.codecs.sparse import Memory
from hvd_gradcomp.ops import Tensor

SAMPLED = 16  # elements whose values ranks exchange, to measure the code's loss


class LGCState(NamedTuple):
    """State of the model's one bucket."""

    memory: Memory  # rank-local
    owed: Any  # float32 [size] with exact feedback, else (); see `LGCCompressor`; rank-local
    encoder: Tensor  # float32 [parameters], rank-local: one rank trains it, then sends it to others
    decoder: Tensor  # float32 [heads, parameters], rank-local
    moments: Any  # training.Moments with Adam, else (); rank-local
    late: Tensor  # float32 [], sum of the loss over the last tenth of the training, rank-local
    seen: Tensor  # float32 [2], decaying energies of the error and of the target; the master's
    sampled: Any  # float32 [2, SAMPLED], this rank's values and replies; server only; rank-local
    loss: Tensor  # float32 [], the quotient of `seen`; while training the trainer's
    start: Tensor  # int64 [] step at which the training began, on the host
    ready: Tensor  # int64 [] 1 if the autoencoder has converged, on the host
    drifted: Tensor  # int64 [] 1 if it must be trained again, on the host
    sent: Tensor  # int64 [layers], elements that this rank has selected and sent so far
    hint: Tensor  # float32 [layers], magnitude to search from in the next step; rank-local
