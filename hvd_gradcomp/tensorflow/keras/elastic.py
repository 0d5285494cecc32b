"""Drop-in for `horovod.tensorflow.keras.elastic` under Keras 3."""

from __future__ import annotations

from typing import Any

from horovod.tensorflow.keras import elastic as _stock
from horovod.tensorflow.keras.elastic import (
    CommitStateCallback,
    UpdateBatchStateCallback,
    UpdateEpochStateCallback,
)
from keras.optimizers import Optimizer

from hvd_gradcomp.tensorflow.elastic import Lost, TensorFlowKerasState, run

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "Lost",
    "TensorFlowKerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]


class KerasState(TensorFlowKerasState, _stock.KerasState):
    """State of an elastic run of `model.fit`; see `TensorFlowKerasState`.

    Args:
        model: built.
        optimizer: the model's own if None.
        kwargs: plain Python objects; they become attributes.
    """

    def __init__(self, model: Any, optimizer: Optimizer | None = None, **kwargs: Any) -> None:
        super().__init__(model, optimizer, **kwargs)
