"""Reads what the exchanges of an optimizer, a tape or a list of variables have moved."""

from __future__ import annotations

from typing import Any

from hvd_gradcomp.stats import CompressionStats
from hvd_gradcomp.tensorflow.tape import engine_of_variables


def compression_stats(source: Any) -> CompressionStats:
    """What this rank's exchanges have moved so far, measured; see `CompressionStats`.

    Args:
        source: a distributed optimizer or tape of this package, or the list of variables that
            tapes (or `reduce_gradients`) were asked about.

    Raises:
        TypeError: nothing was exchanged for it.
    """
    engine = getattr(source, "_gradcomp", None)
    if engine is None and isinstance(source, (list, tuple)):
        engine = engine_of_variables(source)
    if engine is None:
        raise TypeError(
            f"no exchange is known for {type(source).__name__}: pass the optimizer or tape that "
            "hvd_gradcomp.tensorflow made, or the list of variables, after the first step"
        )
    return engine.stats()
