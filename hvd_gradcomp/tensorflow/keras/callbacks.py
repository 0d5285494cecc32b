"""Callbacks for Keras 3. Stock Horovod's reach for what Keras 3 no longer has."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as horovod
import keras
import tensorflow as tf

from hvd_gradcomp import validate
from hvd_gradcomp.schedule import EGCCorrection
from hvd_gradcomp.tensorflow.broadcast import broadcast_variables
from hvd_gradcomp.tensorflow.engine import (
    LOGGER,
    distributed_in,
    optimizer_of,
    plain_variable,
    takes_part,
)
from hvd_gradcomp.tensorflow.keras.probing import ProbeCallback as ProbeCallback
from hvd_gradcomp.tensorflow.keras.reports import StatsWriter as StatsWriter
from hvd_gradcomp.tensorflow.stats import verify


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
        optimizer = optimizer_of(self.model)
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
            value = float(logs[name])  # type: ignore[index]
            logs[name] = _mean(value, f"metric.{name}", self.process_set)  # type: ignore[index]


class VerifyCallback(keras.callbacks.Callback):
    """Compares all ranks' weights and replicated state, bit by bit, while `fit` runs.

    What `verify_every` of the optimizer does, as an exception that `fit` raises as it is.

    Args:
        every: batches between two comparisons, at least 1; with `steps_per_execution`, calls of
            the training function.

    Raises:
        ValueError: `every` is out of range.
        DivergedError: in `fit`, on all ranks, naming the first tensor that differs, and where.
    """

    def __init__(self, every: int) -> None:
        super().__init__()
        validate.count("every", every, low=1)
        self.every = every
        self._batches = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        del batch, logs
        self._batches += 1
        taking_part = getattr(distributed_in(self.model.optimizer), "_gradcomp", None) is not None
        if self._batches % self.every == 0 and taking_part:
            verify(self.model.optimizer)


class EGCLearningRate(keras.callbacks.Callback):
    """Lowers the learning rate when the validation loss has stopped falling (003, section IV.B).

    After `patience` consecutive epochs without a value below the lowest so far,
    `lr = max(lr / (1 + t * epoch), min_lr)`. The details, and where the paper's text and its
    Algorithm 2 differ, are those of `hvd_gradcomp.schedule.EGCCorrection`.

    Works with every Keras optimizer, distributed or not. Where there are several ranks, each of
    them has this callback and what counts is the mean of their values, so rates stay equal; a
    `MetricAverageCallback` before it changes nothing.

    One object serves one training, which may be several calls of `fit`. Where `fit` begins with an
    `initial_epoch`, epochs count from there.

    Args:
        monitor: the entry of the epoch's logs that should fall. One that is not finite counts as
            no improvement.
        patience: epochs, at least 1.
        t: rate of attenuation; positive.
        min_lr: lower limit of the learning rate, not negative.
        process_set: the ranks that take part.

    Raises:
        ValueError: a parameter is out of range; in `fit`, an epoch's logs lack `monitor`.
        TypeError: in `fit`, the optimizer's learning rate is a schedule and cannot be set.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        patience: int = 3,
        t: float = 0.1,
        min_lr: float = 0.0,
        process_set: Any = horovod.global_process_set,
    ) -> None:
        super().__init__()
        self.monitor, self.process_set = monitor, process_set
        self._rule = EGCCorrection(patience, t, min_lr)

    def on_train_begin(self, logs: Any = None) -> None:
        del logs
        # Keras refuses where the rate is a schedule; better now than when it first has to fall.
        optimizer = self.model.optimizer
        optimizer.learning_rate = float(optimizer.learning_rate)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if self.monitor not in (logs or {}):
            raise ValueError(
                f"EGCLearningRate: no {self.monitor!r} at the end of epoch {epoch + 1}, only "
                f"{sorted(logs or {})}. Give fit validation_data= and validation_freq=1, or name "
                "another entry with monitor="
            )
        value = float(logs[self.monitor])  # type: ignore[index]
        exchanged = horovod.is_initialized() and takes_part(self.process_set)
        if exchanged and self.process_set.size() > 1:
            value = _mean(value, "gradcomp.EGCLearningRate", self.process_set)
        self._rule.epoch = max(self._rule.epoch, epoch)
        optimizer = self.model.optimizer
        old = float(optimizer.learning_rate)
        (new,) = self._rule.step(value, [old])
        if new != old:
            optimizer.learning_rate = new


def _mean(value: float, name: str, process_set: Any) -> float:
    mean = horovod.allreduce(
        tf.constant(value, tf.float64), name=name, op=horovod.Average, process_set=process_set
    )
    return float(mean)
