"""`hvd.join()`, for ranks that have run out of batches."""

from __future__ import annotations

import horovod.tensorflow as horovod
import tensorflow as tf

from hvd_gradcomp.engine import failures
from hvd_gradcomp.tensorflow.engine import explained, living


def join() -> tf.Tensor:
    """Like Horovod's own, which only knows how to add gradients up as they are.

    With any compressor but `NoneCompressor` and `FP16Compressor` it is refused at once, on the rank
    that calls it; the others see it end.

    Returns:
        The rank that joined last.

    Raises:
        RuntimeError: a compressor is in use whose payloads cannot be left out, or
            `hierarchical=True`.
    """
    failures.refuse_join(living)
    with explained("hvd.join()"):
        return horovod.join()
