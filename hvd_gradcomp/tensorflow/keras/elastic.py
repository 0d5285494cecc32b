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
from hvd_gradcomp.tensorflow.local_steps import LocalSteps

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
        kwargs: plain Python objects, and a `LocalSteps` as there; they become attributes.

    Raises:
        ValueError: as there; or the `LocalSteps` has a deadline.
    """

    def __init__(self, model: Any, optimizer: Optimizer | None = None, **kwargs: Any) -> None:
        for name, item in kwargs.items():
            if isinstance(item, LocalSteps) and item.deadline is not None:
                raise ValueError(
                    f"{name}= has a deadline=, by which ranks make different numbers of batches, "
                    "and a run of fit that commits between batches counts them: make LocalSteps "
                    "without it, or commit after rounds in a loop with TensorFlowState"
                )
        super().__init__(model, optimizer, **kwargs)
