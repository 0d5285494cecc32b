"""Callbacks for Keras 3. Stock Horovod's use attributes that Keras 3 no longer has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import horovod.tensorflow as horovod
import keras
import tensorflow as tf

from hvd_gradcomp.algorithms.combined.schedule import EGCCorrection
from hvd_gradcomp.core import validate
from hvd_gradcomp.tensorflow.broadcast_state import broadcast_variables
from hvd_gradcomp.tensorflow.comm.horovod import gather_objects, takes_part
from hvd_gradcomp.tensorflow.interop.variables import plain_variable
from hvd_gradcomp.tensorflow.keras.local_steps import LocalSteps as LocalSteps
from hvd_gradcomp.tensorflow.keras.local_steps import callback_of
from hvd_gradcomp.tensorflow.keras.optimizer import refusal
from hvd_gradcomp.tensorflow.keras.probing import ProbeCallback as ProbeCallback
from hvd_gradcomp.tensorflow.keras.stats_writer import StatsWriter as StatsWriter
from hvd_gradcomp.tensorflow.reduce.reducer import LOGGER, living
from hvd_gradcomp.tensorflow.reduce.registry import optimizer_of, reducer_in
from hvd_gradcomp.tensorflow.stats import verify


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """Callback that broadcasts the root's weights and optimizer variables before the first batch.

    Needed once at the start of training, from scratch or from a checkpoint that only the root
    read. What a compressor has accumulated belongs to its rank and stays there.

    A model that is not built yet is built when the first batch comes, from its shape. If that
    fails, since its `train_step` does something else with a batch than `model(x)`, the model is
    broadcast after the first batch, as in Horovod.

    With `callbacks.LocalSteps` it does nothing: that one broadcasts by itself.

    It also sets `model.jit_compile = False`, since Keras 3 compiles by itself where there is a GPU
    and Horovod's collectives are no XLA operations.

    Args:
        root_rank: the rank whose variables count.
        device: where the broadcast is placed, as in Horovod.
        local_variables: variables of TensorFlow or Keras, one or several, that stay as they are.
        process_set: the ranks that take part.

    Raises:
        ValueError: a local variable is no variable; in `fit`, on all ranks, the optimizer of one
            of them does not exchange gradients.
        MismatchError: in `fit`, on all ranks, if they have different variables.
    """

    def __init__(
        self,
        root_rank: int = 0,
        device: str = "",
        local_variables: Any = None,
        process_set: Any = horovod.global_process_set,
    ) -> None:
        super().__init__()
        self.root_rank, self.device, self.process_set = root_rank, device, process_set
        self._local: list[Any] = []
        self._due = self._exchanges = False
        several = isinstance(local_variables, (list, tuple, set, frozenset))
        for variable in local_variables if several else (local_variables,):
            if variable is not None:
                self.register_local_var(variable)

    def register_local_var(self, var: Any) -> None:
        """Leave a variable as it is on each rank."""
        if not isinstance(plain_variable(var), tf.Variable):
            raise ValueError(
                f"local_variables= takes variables of TensorFlow or Keras, got {var!r}"
            )
        self._local.append(var)

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
        all_built = _require_reducing(self.model, self.process_set)
        if callback_of(self.model) is not None:  # which broadcasts by itself
            self._due, self._exchanges = False, True
            return
        self._due, self._exchanges = True, not refusal(self.model.optimizer)
        if all_built:
            self._broadcast()
            return
        train = self.model.train_function

        def once(iterator: Any) -> Any:
            self.model.train_function = train
            if self.model.built or _built_by(self.model, iterator):
                self._broadcast()
            return train(iterator)

        self.model.train_function = once

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        del batch, logs
        self._broadcast()
        if not self._exchanges and takes_part(self.process_set) and self.process_set.size() > 1:
            self._exchanges = True
            if not any(reducer.agreed for reducer in living):
                LOGGER.warning(
                    "the first batch of fit has exchanged nothing through hvd_gradcomp: with a "
                    "train_step of its own, %s needs hvd.DistributedGradientTape there, or a "
                    "hvd.DistributedOptimizer",
                    type(self.model).__name__,
                )

    def _broadcast(self) -> None:
        if not self._due:
            return
        self._due = False
        local = {id(plain_variable(v)) for v in self._local}
        variables = (*self.model.variables, *optimizer_of(self.model).variables)
        plain = [plain_variable(v) for v in variables]
        # A random seed of Keras is no tf.Variable, and each rank has its own.
        shared = [v for v in plain if isinstance(v, tf.Variable) and id(v) not in local]
        with tf.device(self.device or None):
            broadcast_variables(shared, self.root_rank, self.process_set)


class MetricAverageCallback(keras.callbacks.Callback):
    """Callback that averages an epoch's metrics over all ranks, so that all ranks log the same.

    A metric may be a number, or an array such as `F1Score(average=None)`; so is its mean.
    Put it before callbacks that read metrics (learning rate on a plateau, early stopping).

    Args:
        device: where the mean is placed, as in Horovod.
        process_set: the ranks that take part.

    Raises:
        ValueError: in `fit`, on all ranks, the optimizer of one of them does not exchange
            gradients.
    """

    def __init__(self, device: str = "", process_set: Any = horovod.global_process_set) -> None:
        super().__init__()
        self.device, self.process_set = device, process_set

    def on_train_begin(self, logs: Any = None) -> None:
        del logs
        if takes_part(self.process_set):
            _require_reducing(self.model, self.process_set)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        del epoch
        if not takes_part(self.process_set):
            return
        for name in sorted(logs or {}):
            value = logs[name]  # type: ignore[index]
            with tf.device(self.device or None):
                logs[name] = _mean(value, f"metric.{name}", self.process_set)  # type: ignore[index]


class LearningRateScheduleCallback(keras.callbacks.Callback):
    """Callback that sets the learning rate to `initial_lr * multiplier` between two epochs.

    Horovod's own uses attributes that Keras 3 no longer has.

    *Momentum correction.* Keras's SGD and RMSprop keep the learning rate of a step in their
    velocity, so the velocity is multiplied by `new / old` whenever the rate changes; Horovod's own
    achieves this by another momentum for one batch. A momentum that a compressor has taken over is
    kept without the rate, and needs no correction.

    Args:
        initial_lr: the learning rate at the start of training.
        multiplier: `f(epoch)`, or a number, which is raised to the power of the epochs since
            `start_epoch`.
        start_epoch: the first epoch that it applies to.
        end_epoch: the first epoch that it no longer applies to; None for never.
        staircase: change the rate at the start of an epoch; otherwise of each batch, with
            fractional epochs: `epoch + batch / steps_per_epoch`.
        momentum_correction: see above.
        steps_per_epoch: needed if `staircase` is false and Keras does not know it.

    Raises:
        ValueError: there is no initial_lr; in `fit`, steps_per_epoch is not known.
        TypeError: in `fit`, the optimizer's learning rate is a schedule and cannot be set.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: Callable[[float], float] | float,
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise ValueError(f"{type(self).__name__} needs initial_lr=")
        self.initial_lr, self.multiplier = initial_lr, multiplier
        self.start_epoch, self.end_epoch, self.staircase = start_epoch, end_epoch, staircase
        self.momentum_correction, self.steps_per_epoch = momentum_correction, steps_per_epoch
        self.current_epoch = 0

    def on_train_begin(self, logs: Any = None) -> None:
        del logs
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = self.params.get("steps")
            if not self.steps_per_epoch:
                raise ValueError(
                    f"{type(self).__name__}: Keras does not know how many batches an epoch has; "
                    "give steps_per_epoch="
                )
        # Keras refuses to set a schedule; better now than in the middle of training.
        self.model.optimizer.learning_rate = float(self.model.optimizer.learning_rate)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        del logs
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        del logs
        epoch = self.current_epoch
        if epoch < self.start_epoch or (self.end_epoch is not None and epoch >= self.end_epoch):
            return
        if not self.staircase:
            self._set(epoch + batch / self.steps_per_epoch)  # type: ignore[operator]
        elif batch == 0:
            self._set(epoch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        del epoch
        if logs is not None:
            logs["lr"] = float(self.model.optimizer.learning_rate)

    def _set(self, epoch: float) -> None:
        factor = self.multiplier
        factor = factor(epoch) if callable(factor) else factor ** (epoch - self.start_epoch)
        optimizer = self.model.optimizer
        old, new = float(optimizer.learning_rate), self.initial_lr * factor
        optimizer.learning_rate = new
        if not self.momentum_correction or old in (0.0, new):
            return
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        inner = getattr(inner, "inner_optimizer", inner)
        for name in ("momentums", "_momentums"):
            if getattr(inner, "momentum", 0):
                for velocity in getattr(inner, name, ()):
                    velocity.assign(velocity * (new / old))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Callback that raises the learning rate from `initial_lr / hvd.size()` to `initial_lr`.

    It does so batch by batch, as Goyal et al. (2017) at the start of training with large batches.

    Args:
        initial_lr: the learning rate after the warm-up.
        warmup_epochs: duration of the warm-up.
        momentum_correction, steps_per_epoch: as in `LearningRateScheduleCallback`.
        verbose: 1 to have rank 0 say when the warm-up is over.

    Raises:
        ValueError, TypeError: as there.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            epoch += 1 / self.steps_per_epoch  # type: ignore[operator] # round at an epoch's end
            size = horovod.size()
            return (epoch * (size - 1) / warmup_epochs + 1) / size

        super().__init__(
            initial_lr,
            multiplier,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        if self.verbose and epoch + 1 == self.end_epoch and horovod.rank() == 0:
            rate = float(self.model.optimizer.learning_rate)
            print(f"\nEpoch {epoch + 1}: the warm-up of the learning rate has ended at {rate:g}.")


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """Keras's `ModelCheckpoint` with `save_best_only=True`; for one rank, as `rank() == 0`.

    Args:
        monitor, verbose, save_weights_only, mode, save_freq: as in Keras.
        filepath: as in Keras; or set as an attribute before `fit`, as with Horovod's own.

    Raises:
        ValueError: in `fit`, there is no filepath.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: Any = "epoch",
        filepath: Any = None,
    ) -> None:
        nowhere = "best.weights.h5" if save_weights_only else "best.keras"  # Keras looks at it
        super().__init__(
            nowhere if filepath is None else filepath,
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
        )
        if filepath is None:
            self.filepath: Any = None

    def on_train_begin(self, logs: Any = None) -> None:
        if self.filepath is None:
            raise ValueError("BestModelCheckpoint has no filepath: give filepath=, or set it")
        super().on_train_begin(logs)


class VerifyCallback(keras.callbacks.Callback):
    """Callback that compares all ranks' weights and replicated state, bit by bit, during `fit`.

    Like `verify_every` of the optimizer, but `fit` raises the exception as it is. It does nothing
    with `callbacks.LocalSteps(deadline=)`: ranks make different numbers of batches there, and each
    exchange compares the global weights.

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
        if self._batches % self.every:
            return
        callback = callback_of(self.model)
        if callback is not None and callback.local is not None:
            if callback.local.deadline is None:
                verify(callback.local)
        elif reducer_in(self.model.optimizer) is not None:
            verify(self.model.optimizer)


class EGCLearningRate(keras.callbacks.Callback):
    """Callback that lowers the learning rate when the validation loss has stopped falling.

    Kuang et al. 2019, section IV.B. After `patience` consecutive epochs without a new minimum,
    `lr = max(lr / (1 + t * epoch), min_lr)`. For details, and for the differences between the
    paper's text and its Algorithm 2, see `hvd_gradcomp.algorithms.combined.schedule.EGCCorrection`.

    Works with every Keras optimizer, distributed or not. If there are several ranks, each of them
    has this callback and the mean of their values counts, so rates stay equal; a
    `MetricAverageCallback` before it changes nothing.

    One object serves one training, which may be several calls of `fit`. If `fit` begins with an
    `initial_epoch`, epochs count from there.

    Args:
        monitor: the entry of the epoch's logs that should fall. A non-finite value counts as no
            improvement.
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
        # Keras refuses to set a schedule; better now than when the rate first has to fall.
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


def _require_reducing(model: keras.Model, process_set: Any) -> bool:
    """Refuse a model whose ranks would train without an exchange.

    Returns:
        True if it is built on all ranks: collectives of eager TensorFlow pair by their order, so
        all ranks have to take the same path.

    Raises:
        ValueError: on all ranks.
    """
    if process_set.size() == 1:
        return model.built
    own_step = type(model).train_step is not keras.Model.train_step  # may exchange by itself
    exchanges = own_step or callback_of(model) is not None
    answer = ("" if exchanges else refusal(model.optimizer), model.built)
    gathered = gather_objects(answer, tuple[str, bool], "gradcomp.fit", process_set)
    ranks = process_set.ranks or range(len(gathered))
    refusals = [f"rank {rank}: {reason}" for rank, (reason, _) in zip(ranks, gathered) if reason]
    if refusals:
        raise ValueError(
            f"fit would train without an exchange of gradients: {'; '.join(refusals[:4])}. Compile "
            "the model with hvd.DistributedOptimizer(optimizer, compression=...) on all ranks; "
            "load it with hvd.load_model, after hvd.init(). Or pass hvd.callbacks.LocalSteps to fit"
        )
    return all(built for _, built in gathered)


def _built_by(model: keras.Model, iterator: Any) -> bool:
    """Build a model from the shapes of an iterator's batches; return True if that works."""

    def symbol(spec: Any) -> Any:
        return keras.KerasTensor(spec.shape, spec.dtype.name)

    try:
        x, _, _ = keras.utils.unpack_x_y_sample_weight(iterator.element_spec)
        how = {"training": True} if model._call_has_training_arg else {}
        model(keras.tree.map_structure(symbol, x), **how)
    except Exception as error:  # from user code: train_step may call it otherwise
        LOGGER.info("%s is not built before the first batch: %s", type(model).__name__, error)
        return False
    return True


def _mean(value: Any, name: str, process_set: Any) -> Any:
    """Return the mean over ranks of a number, as a float, or of an array."""
    array = value.numpy() if hasattr(value, "numpy") else value
    mean = horovod.allreduce(
        tf.constant(array, tf.float64), name=name, op=horovod.Average, process_set=process_set
    )
    return mean.numpy() if mean.shape.rank else float(mean)
