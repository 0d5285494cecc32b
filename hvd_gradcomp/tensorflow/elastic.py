"""Drop-in for `horovod.tensorflow.elastic`: states that keep what belongs to each rank alone.

Model, optimizer and the compressor's replicated fields come from rank 0; residuals and momenta stay
with their rank. Stock Horovod's Keras states use attributes that Keras 3 no longer has.

A traced function contains its rank and the number of ranks: create a `tf.function` that exchanges
inside the function that `run` wraps, so that it is traced again. `model.fit` retraces by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import horovod.tensorflow as horovod
import tensorflow as tf
from horovod.common.elastic import ObjectState, run_fn
from horovod.common.exceptions import HorovodInternalError
from horovod.tensorflow import elastic as _stock
from horovod.tensorflow.elastic import (
    broadcast_object,
    broadcast_object_fn,
    rank,
)

from hvd_gradcomp.runtime.elastic import LOGGER, Lost, Membership, RankState
from hvd_gradcomp.tensorflow.broadcast_state import broadcast_variables
from hvd_gradcomp.tensorflow.engine import TITLES, GraphReducer, distributed_in, gather_objects
from hvd_gradcomp.tensorflow.stall_inspector import init, shutdown
from hvd_gradcomp.tensorflow.tape import drop_engines, engines_over, reducer_for
from hvd_gradcomp.tensorflow.variables import plain_variable

__all__ = [
    "HorovodInternalError",
    "Lost",
    "ObjectState",
    "TensorFlowKerasState",
    "TensorFlowState",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "init",
    "rank",
    "run",
    "run_fn",
    "shutdown",
]


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate the training function of an elastic run, as in Horovod.

    Horovod's own detects a broken exchange by its operations' names, which are different here.
    """

    @wraps(func)
    def translated(*arguments: Any, **options: Any) -> Any:
        with _as_horovod_says():
            return func(*arguments, **options)

    return _stock.run(translated)


@contextmanager
def _as_horovod_says() -> Iterator[None]:
    """Raise a HorovodInternalError where TensorFlow reports a broken exchange."""
    try:
        yield
    except (tf.errors.UnknownError, tf.errors.AbortedError) as error:
        if "Horovod" in error.message:
            raise HorovodInternalError(error) from error
        raise


class Variables(ObjectState):
    """State of variables, of the reducers of their gradients, and of plain Python objects.

    Its subclasses also derive from one of Horovod's states, for `isinstance`. The methods of those
    are of no use under Keras 3, so calls go past them to `ObjectState`.

    Args:
        variables: in the same order on all ranks.
        optimizer: of Keras; built.
        kwargs: plain Python objects.
    """

    def __init__(self, variables: Sequence[Any], optimizer: Any = None, **kwargs: Any) -> None:
        own = [] if optimizer is None else optimizer.variables
        plain = {id(v): v for v in map(plain_variable, (*variables, *own))}
        self._variables = [v for v in plain.values() if isinstance(v, tf.Variable)]
        self._reducing = distributed_in(optimizer)
        for engine in self._engines():
            if engine.process_set is not horovod.global_process_set:
                raise ValueError(
                    "elastic training exchanges over all ranks: a process set does not outlive a "
                    "reset. Make DistributedOptimizer without process_set="
                )
        self._copy()
        ObjectState.__init__(self, bcast_object=_broadcast_object, get_rank=horovod.rank, **kwargs)

    def _engines(self) -> list[GraphReducer]:
        """Return the optimizer's reducer, and those of tapes over these variables."""
        owned = getattr(self._reducing, "_gradcomp", None)
        taped = [engine for engine, _, _ in engines_over(self._variables)]
        return taped if owned is None else [owned, *taped]

    def _tracked(self) -> list[tf.Variable]:
        of_engines = [v for engine in self._engines() for v in engine.everything]
        return list({id(v): v for v in (*self._variables, *of_engines)}.values())

    def _copy(self) -> None:
        self._copies = [(v, tf.identity(v)) for v in self._tracked()]

    def save(self) -> None:
        self._copy()
        ObjectState.save(self)

    def restore(self) -> None:
        known = {id(v) for v, _ in self._copies}
        drop_engines(e for e, _, _ in engines_over(self._variables) if id(e.steps) not in known)
        for variable, value in self._copies:
            variable.assign(value)
        for engine in self._engines():
            engine.commit()
        ObjectState.restore(self)

    def sync(self) -> None:
        taped = [
            (
                places,
                engine.compressor,
                [name for name, _, _ in engine.layers],
                (engine.left_out, engine.apart, engine.settled),
                settings,
            )
            for engine, places, settings in engines_over(self._variables)
        ]
        titles = [engine.name for engine in self._engines()]
        taped, titles, number = _broadcast_object((taped, titles, TITLES.draw()))
        for places, compressor, layers, (left_out, apart, settled), settings in taped:
            sources = [self._variables[place] for place in places]
            engine = reducer_for(
                sources, compressor, layers, process_set=horovod.global_process_set, **settings
            )
            assert engine is not None
            engine.leave_out(left_out, apart)
            engine.settled = settled
        for engine, title in zip(self._engines(), titles):
            engine.rename(title)
        TITLES.continue_from(number)
        broadcast_variables(self._tracked(), 0)
        ObjectState.sync(self)


class Elastic(Membership, Variables):
    """State of variables among ranks that come and go."""

    def __init__(self, *arguments: Any, **kwargs: Any) -> None:
        super().__init__(*arguments, **kwargs)
        self.begin()

    def sync(self) -> None:
        with _as_horovod_says():
            super().sync()

    def _gather(self, seat: RankState) -> list[RankState]:
        return gather_objects(seat, RankState, "gradcomp.elastic.roll", horovod.global_process_set)

    def _place(self) -> tuple[int, int]:
        return horovod.rank(), horovod.local_rank()

    def _squares(self) -> float:
        return sum(_squares(engine) for engine in self._engines())

    def _committed(self) -> Any:
        return self._copies, self._saved_state

    def _recommit(self, copies: Any) -> None:
        self._copies, self._saved_state = copies

    def _forget(self) -> None:
        for engine in self._engines():
            engine.forget()

    def _resize(self) -> None:
        for engine in self._engines():
            anew = engine.resize()
            if horovod.rank() == 0:
                for one in anew:
                    LOGGER.warning(
                        "%s learns anew: other ranks exchange now, %d of them", one, horovod.size()
                    )
        if hasattr(self._reducing, "own"):
            self._reducing.own()


class TensorFlowState(Elastic, _stock.TensorFlowState):
    """State of an elastic run over a list of variables, to commit, restore and send to new ranks.

    It includes the compressor state of each `DistributedGradientTape` over these variables (or over
    some of them). At `sync` survivors keep what belongs to them (residuals, momenta) and a new rank
    starts with none. The residual of a rank that died is lost: logged with its norm, and in
    `lost`. Memory: two commits, each a copy of everything; see `Membership`.

    Args:
        variables: of the model and of its optimizer, in the same order on all ranks; all that
            TensorFlow knows of if None.
        session: refused; it belongs to TensorFlow 1.
        kwargs: plain Python objects; they become attributes.

    Raises:
        ValueError: a session is given.
    """

    def __init__(
        self, variables: Sequence[Any] | None = None, session: Any = None, **kwargs: Any
    ) -> None:
        if session is not None:
            raise ValueError("session= belongs to TensorFlow 1; hvd_gradcomp needs TensorFlow 2")
        self.variables = variables or tf.compat.v1.global_variables()
        super().__init__(self.variables, **kwargs)


class TensorFlowKerasState(Elastic, _stock.TensorFlowKerasState):
    """State of an elastic run of a Keras 3 model and its optimizer, for `fit` and custom loops.

    Args:
        model: built.
        optimizer: the model's own if None.
        backend: accepted for compatibility, unused.
        kwargs: plain Python objects; they become attributes.

    Raises:
        ValueError: the model is not built, there is no optimizer, or it exchanges over a process
            set, which does not outlive a reset.
    """

    def __init__(
        self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any
    ) -> None:
        del backend
        if not model.built:
            raise ValueError("the model is not built: call model.build(input_shape) first")
        self.model, self.optimizer = model, optimizer or model.optimizer
        if self.optimizer is None:
            raise ValueError("there is no optimizer: compile the model, or pass optimizer=")
        if not self.optimizer.built:
            self.optimizer.build(model.trainable_variables)
        super().__init__(model.weights, self.optimizer, **kwargs)

    def _resize(self) -> None:
        super()._resize()
        self.model.train_function = None  # traced for the previous ranks


def _broadcast_object(item: Any) -> Any:
    return horovod.broadcast_object(item, name="gradcomp.elastic")


def _squares(engine: GraphReducer) -> float:
    total = 0.0
    for bucket, compressor in enumerate(engine.compressors):
        residual = compressor.residual(engine.state_of(bucket))
        if residual is not None:
            total += float(tf.reduce_sum(tf.square(tf.cast(residual, tf.float64))))
    return total
