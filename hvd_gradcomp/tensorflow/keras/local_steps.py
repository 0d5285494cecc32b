"""`LocalSteps` under Keras 3's `fit`; see `hvd_gradcomp.tensorflow.local_steps`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import horovod.tensorflow as horovod
import keras
import tensorflow as tf

from hvd_gradcomp.algorithms.combined.local_steps import AVERAGING, EIGHTH, LocalSchedule, OuterSGD
from hvd_gradcomp.algorithms.combined.round_length import Every
from hvd_gradcomp.runtime.config_check import MismatchError
from hvd_gradcomp.tensorflow import local_steps
from hvd_gradcomp.tensorflow.broadcast_state import broadcast_variables
from hvd_gradcomp.tensorflow.comm.horovod import gather_objects, takes_part
from hvd_gradcomp.tensorflow.interop.moving_averages import averages_of
from hvd_gradcomp.tensorflow.interop.variables import plain_variable
from hvd_gradcomp.tensorflow.reduce.reducer import LOGGER
from hvd_gradcomp.tensorflow.reduce.registry import exchanges_in, optimizer_of


class LocalSteps(keras.callbacks.Callback):
    """Callback version of `hvd.LocalSteps`: ranks train alone, and exchange every so many batches.

    ::

        model.compile(keras.optimizers.AdamW(1e-3), loss)
        model.fit(x, y, callbacks=[hvd.callbacks.LocalSteps()])

    The model is compiled with a plain optimizer, which keeps its own state on each rank, and is
    built. All ranks begin with the first rank's weights and optimizer; no
    `BroadcastGlobalVariablesCallback` is needed. Put it before callbacks that save or evaluate the
    model: after the exchange at the end of an epoch, which comes before the validation, all ranks
    have the global weights. Between exchanges a rank has its own, and callbacks of batches see
    these. `fit` ends with an exchange, on all ranks.

    Weights keep their constraints, and moving averages of the optimizer (`use_ema=True`) are those
    of the global weights, as in `hvd.LocalSteps`; an exchange comes before `fit` sets the weights
    to them in its end.

    It belongs to the optimizer that the model has in the first `fit`, or in `build`. After another
    `compile` pass a new one.

    With `steps_per_execution` of `compile` the exchanges come at the end of an execution, which
    counts as that many steps.

    To resume, build the callback before the load, here and when saving::

        local = hvd.callbacks.LocalSteps()
        hvd.load_checkpoint(folder, model=model, local=local.build(model))

    Default: `every=5` and `compression=ChunkedTopKCompressor(k=512, values="int4", decay=1)`, with
    the mean of changes as the outer step. It sends one element in 8, in 4 bits, and reached a loss
    soonest in docs/worth.md. With an outer momentum, or a delay, give `compression=None`, which
    sends all elements, or `Int8Compressor()`.

    Args:
        every: batches between two exchanges; a number, a `QuadraticRule`, or a function of the
            batches so far, as in `hvd.LocalSteps`; with `steps_per_execution` a number.
        outer, compression, fragments, delay, blend: as in `hvd.LocalSteps`.
        warmup_steps: first batches, in which gradients are averaged in every step, dense. It sets
            `model.jit_compile = False`, since Horovod's collectives are no XLA operations.
        average_buffers: average weights that are not trained, such as running means, after each
            exchange; otherwise they stay each rank's.
        at_epoch_end: exchange at the end of each epoch as well; the schedule begins again then.
        process_set: the ranks that take part; others train alone.
        hierarchical: ranks of a host average their gradients in every step, dense, and hosts
            exchange; with several ranks on a host it sets `model.jit_compile = False`.
        nonfinite, deadline: as in `hvd.LocalSteps`. With a deadline an exchange at the end of an
            epoch waits for the ranks that are still in theirs. So that quick ranks need not, let
            the data repeat, and set `model.stop_training` in a callback once `local.rounds` is as
            high as you want: all ranks see it in the same round.

    Attributes:
        local: the `hvd.LocalSteps`, for `hvd.verify`, `hvd.compression_stats` and
            `hvd.save_checkpoint`; None before the first `fit` or `build`.

    Raises:
        ValueError: a setting is out of range; in `fit`, on all ranks, the model of one of them is
            not built, has a distributed optimizer or another one than in the first `fit`, there are
            several of these callbacks, or `steps_per_execution` does not fit; and as in
            `hvd.LocalSteps`.
        TypeError, RuntimeError, MismatchError, OutOfStepError, DivergedError,
            NonFiniteGradientError: in `fit`, as in `hvd.LocalSteps`.
    """

    def __init__(
        self,
        every: Every = 5,
        outer: OuterSGD = AVERAGING,
        compression: Any = EIGHTH,
        *,
        warmup_steps: int = 0,
        fragments: int = 1,
        delay: int = 0,
        blend: float | None = None,
        average_buffers: bool = False,
        at_epoch_end: bool = True,
        process_set: Any = horovod.global_process_set,
        hierarchical: bool = False,
        nonfinite: str | None = None,
        deadline: float | None = None,
    ) -> None:
        super().__init__()
        self.schedule = LocalSchedule(every, warmup_steps, fragments, delay, blend, deadline)
        self.at_epoch_end, self.process_set = at_epoch_end, process_set
        self.local: local_steps.LocalSteps | None = None
        self._optimizer: keras.optimizers.Optimizer | None = None  # that `local` was made for
        self._average_buffers = average_buffers
        self._options = {
            "outer": outer,
            "compression": compression,
            "hierarchical": hierarchical,
            "nonfinite": nonfinite,
        }
        self._due = False  # this epoch ends with an exchange, which is yet to come
        self._replaced: list[str] = []  # names of the optimizer's methods

    def set_model(self, model: keras.Model) -> None:
        super().set_model(model)
        _callbacks[id(model)] = self
        reduces = self.schedule.warmup_steps or self._options["hierarchical"]
        if reduces and model.jit_compile:
            LOGGER.warning("jit_compile=False: Horovod's collectives are no XLA operations")
            model.jit_compile = False
            model.train_function = None

    def build(self, model: keras.Model) -> local_steps.LocalSteps:
        """Return the local steps of a model that is built and compiled, created the first time.

        Raises:
            ValueError: the model has another optimizer than the first time; and as in
                `hvd.LocalSteps`.
            TypeError: as in `hvd.LocalSteps`.
        """
        if refusal := self._refuse_other_optimizer(model):
            raise ValueError(f"callbacks.LocalSteps cannot train: {refusal}")
        if self.local is None:
            buffers = model.non_trainable_variables if self._average_buffers else None
            self._optimizer = optimizer_of(model)
            self.local = local_steps.LocalSteps(
                model.trainable_variables,
                **vars(self.schedule),
                **self._options,
                buffers=buffers,
                optimizer=self._optimizer,
                process_set=self.process_set,
            )
        return self.local

    def on_train_begin(self, logs: Any = None) -> None:
        del logs
        if not takes_part(self.process_set):
            return
        begins = self._begins_alike()
        local = self.build(self.model)
        local.claim()
        if begins:
            variables = *self.model.variables, *optimizer_of(self.model).variables
            plain = map(plain_variable, variables)
            # A random seed of Keras is no tf.Variable, and each rank has its own.
            shared = [v for v in plain if isinstance(v, tf.Variable)]
            first = self.process_set.ranks[0] if self.process_set.ranks else 0
            broadcast_variables(shared, first, self.process_set)
            local.restart()
        else:
            local.restart_if_set()
        if local.averages_gradients:
            self._average_gradients(local)
        if averages_of(self.model.optimizer):
            self._exchange_before_final_values(local)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        del epoch, logs
        self._due = self.at_epoch_end

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        del batch, logs
        if self.local is not None:
            self.local.step(self.model.steps_per_execution)

    def on_test_begin(self, logs: Any = None) -> None:
        del logs
        self._end_epoch()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        del epoch, logs
        self._end_epoch()

    def on_train_end(self, logs: Any = None) -> None:
        del logs
        if self.local is not None:
            self.local.exchange()
        self.release()

    def release(self) -> None:
        """Let `fit` of the model and its optimizer be without this callback."""
        _callbacks.pop(id(self.model), None)
        for name in self._replaced:
            delattr(self.model.optimizer, name)
        if "apply" in self._replaced:
            self.model.train_function = None
        self._replaced.clear()

    def _end_epoch(self) -> None:
        """Exchange once at the end of an epoch, before or without its validation."""
        due, self._due = self._due, False
        if due and self.local is not None:
            self.local.exchange()

    def _begins_alike(self) -> bool:
        """Return True if no rank has made a step, so that weights are broadcast.

        Raises:
            ValueError: on all ranks, if the model of one of them cannot be trained with this.
            MismatchError: on all ranks, if they do not all exchange at the end of an epoch.
        """
        made = 0 if self.local is None else self.local.steps_made
        state = self._refusal(), made, self.at_epoch_end
        gathered = gather_objects(state, tuple[str, int, bool], "gradcomp.fit", self.process_set)
        ranks = self.process_set.ranks or range(len(gathered))
        refusals = [f"rank {rank}: {each[0]}" for rank, each in zip(ranks, gathered) if each[0]]
        if refusals:
            raise ValueError(f"callbacks.LocalSteps cannot train: {'; '.join(refusals[:4])}")
        if len({at_end for _, _, at_end in gathered}) > 1:
            listed = dict(zip(ranks, (at_end for _, _, at_end in gathered)))
            raise MismatchError(
                f"at_epoch_end differs, by rank: {listed}. Give callbacks.LocalSteps the same "
                "arguments on all ranks"
            )
        return not any(steps for _, steps, _ in gathered)

    def _refusal(self) -> str:
        """Return why the model cannot be trained with this; "" if it can."""
        schedule, together = self.schedule, self.model.steps_per_execution
        if exchanging := exchanges_in(self.model.optimizer):
            return (
                f"its optimizer is distributed: {exchanging} exchanges gradients in every step. "
                "Compile the model with the plain optimizer"
            )
        last = callback_of(self.model)
        if last is not None and last is not self:
            return (
                f"fit has several callbacks.LocalSteps, {schedule} and {last.schedule}, and each "
                "would exchange the weights. Pass one of them"
            )
        if not self.model.built:
            return (
                "the model is not built, and has no weights yet. Give it a keras.Input, or call "
                "model.build(input_shape) before fit"
            )
        if refusal := self._refuse_other_optimizer(self.model):
            return refusal
        if not isinstance(schedule.every, int):
            return (
                ""
                if together == 1
                else (
                    f"with steps_per_execution={together} every= has to be a number, and is "
                    f"{schedule.every}"
                )
            )
        parts = schedule.every / schedule.fragments, schedule.delay, schedule.warmup_steps
        if any(part % together for part in parts):
            return (
                f"every / fragments, delay and warmup_steps have to be multiples of "
                f"steps_per_execution={together}, and are {', '.join(f'{x:g}' for x in parts)}"
            )
        return ""

    def _refuse_other_optimizer(self, model: keras.Model) -> str:
        """Return why it cannot go on with a model whose optimizer it does not know, or ""."""
        if self.local is None or model.optimizer is self._optimizer:
            return ""
        return (
            "the callback has the weights, the moving averages and the state of another optimizer: "
            "the model was compiled anew since, or is another one. Pass a new callbacks.LocalSteps"
        )

    def _average_gradients(self, local: local_steps.LocalSteps) -> None:
        """Let the optimizer apply what `local` makes of gradients; `fit` traces it anew."""
        optimizer = self.model.optimizer
        stock = partial(type(optimizer).apply, optimizer)

        def apply(grads: Sequence[Any], trainable_variables: Any = None) -> None:
            stock(local.reduce_gradients(grads), trainable_variables)

        optimizer.apply = apply
        self._replaced.append("apply")
        self.model.make_train_function(force=True)

    def _exchange_before_final_values(self, local: local_steps.LocalSteps) -> None:
        """Let `fit` end with the moving averages after the last exchange, not with this rank's."""
        optimizer = self.model.optimizer
        stock = partial(type(optimizer).finalize_variable_values, optimizer)

        def finalize_variable_values(var_list: Sequence[Any]) -> None:
            local.exchange()
            stock(var_list)

        optimizer.finalize_variable_values = finalize_variable_values
        self._replaced.append("finalize_variable_values")


_callbacks: WeakValueDictionary[int, LocalSteps] = WeakValueDictionary()  # of models in `fit`


def callback_of(model: keras.Model) -> LocalSteps | None:
    """Return the callback by which a model trains with local steps, or None."""
    callback = _callbacks.get(id(model))
    return callback if callback is not None and callback.model is model else None


def end_fit(model: keras.Model) -> None:
    """Let a model be without its callback, also after a `fit` that an error has ended."""
    if (callback := callback_of(model)) is not None:
        callback.release()
