"""Callbacks for Keras 3. Stock Horovod's reach for what Keras 3 no longer has."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as horovod
import keras
import tensorflow as tf

from hvd_gradcomp.tensorflow.broadcast import broadcast_variables
from hvd_gradcomp.tensorflow.engine import LOGGER, plain_variable, takes_part


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """Brings all ranks to the root's weights and optimizer variables before the first batch.

    Needed once at the start of training, from scratch or from a checkpoint that only the root
    read. What a compressor has accumulated belongs to its rank and stays there.

    It also sets `model.jit_compile = False`, since Keras 3 compiles by itself where there is a GPU
    and Horovod's collectives are no XLA operations.

    Args:
        root_rank: whose variables count.
        device: accepted for compatibility, unused.
        process_set: the ranks that take part.
    """

    def __init__(
        self,
        root_rank: int = 0,
        device: str = "",
        process_set: Any = horovod.global_process_set,
    ) -> None:
        super().__init__()
        del device
        self.root_rank, self.process_set = root_rank, process_set

    def set_model(self, model: keras.Model) -> None:
        super().set_model(model)
        if model.jit_compile:
            LOGGER.warning("jit_compile=False: Horovod's collectives are no XLA operations")
            model.jit_compile = False
            model.train_function = None

    def on_train_begin(self, logs: Any = None) -> None:
        del logs
        if not takes_part(self.process_set):
            return
        optimizer = self.model.optimizer
        if not optimizer.built:
            optimizer.build(self.model.trainable_variables)
        variables = [plain_variable(v) for v in (*self.model.variables, *optimizer.variables)]
        # A random seed of Keras is no tf.Variable, and each rank has its own.
        shared = [v for v in variables if isinstance(v, tf.Variable)]
        broadcast_variables(shared, self.root_rank, self.process_set)


class MetricAverageCallback(keras.callbacks.Callback):
    """Averages the metrics of an epoch over all ranks, so that all ranks log the same.

    Put it before callbacks that read metrics (learning rate on a plateau, early stopping).

    Args:
        process_set: the ranks that take part.
    """

    def __init__(self, process_set: Any = horovod.global_process_set) -> None:
        super().__init__()
        self.process_set = process_set

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        del epoch
        if not takes_part(self.process_set):
            return
        for name in sorted(logs or {}):
            value = tf.constant(float(logs[name]), tf.float64)  # type: ignore[index]
            mean = horovod.allreduce(
                value, name=f"metric.{name}", op=horovod.Average, process_set=self.process_set
            )
            logs[name] = float(mean)  # type: ignore[index]
