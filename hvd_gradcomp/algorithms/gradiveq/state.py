"""State of GradiVeQ."""

from __future__ import annotations

from typing import Any, NamedTuple

from hvd_gradcomp.ops import Tensor


class GradiVeQState(NamedTuple):
    """State of one bucket. All but `sampling` and `r` is equal on all ranks."""

    samples: (
        Tensor  # float32 [sample_steps * sum over groups of (rows * length + 1)], the energy last
    )
    basis: Tensor  # float32 [sum over groups of length * max_dimensions]
    offset: Tensor  # float32 [sum over groups of length], the mean's part outside the basis
    dimensions: Tensor  # int64 [groups], on the host
    start: Tensor  # int64 [] step at which the cycle began to sample, on the host
    drifted: Tensor  # int64 [] 1 if the loss of the last step asks for another cycle, on the host
    loss: Tensor  # float32 [] of the last compressed step, mean over ranks; NaN before one
    sent: Tensor  # int64 [layers]
    sampling: Any  # state of the compressor of the other steps
    r: Any  # float32 [size] with feedback, else ()
