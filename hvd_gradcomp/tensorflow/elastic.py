"""Drop-in for `horovod.tensorflow.elastic`: states that keep what belongs to each rank alone.

Model, optimizer and the compressor's replicated fields come from rank 0; residuals and momenta stay
with their rank. With local steps all ranks go on from the global variables. Stock Horovod's Keras
states use attributes that Keras 3 no longer has.

A traced function contains its rank and the number of ranks: create a `tf.function` that exchanges
inside the function that `run` wraps, so that it is traced again. `model.fit` retraces by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, Any

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

from hvd_gradcomp.method.handover import residual_of
from hvd_gradcomp.runtime.elastic import LOGGER, Lost, Membership, RankState
from hvd_gradcomp.tensorflow.broadcast_state import broadcast_variables
from hvd_gradcomp.tensorflow.comm.horovod import gather_objects
from hvd_gradcomp.tensorflow.comm.stall_inspector import init, shutdown
from hvd_gradcomp.tensorflow.interop.variables import plain_variable
from hvd_gradcomp.tensorflow.local_steps import LocalSteps
from hvd_gradcomp.tensorflow.reduce.reducer import TITLES, GraphReducer
from hvd_gradcomp.tensorflow.reduce.registry import (
    distributed_in,
    drop_reducers,
    reducer_for,
    reducer_in,
    reducers_over,
)

if TYPE_CHECKING:
    from keras.optimizers import Optimizer

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
        with _horovod_errors():
            return func(*arguments, **options)

    return _stock.run(translated)


@contextmanager
def _horovod_errors() -> Iterator[None]:
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
        kwargs: plain Python objects, and `LocalSteps`, whose model's variables are included.
    """

    def __init__(
        self, variables: Sequence[Any], optimizer: Optimizer | None = None, **kwargs: Any
    ) -> None:
        self._locals = {k: item for k, item in kwargs.items() if isinstance(item, LocalSteps)}
        for name, local in self._locals.items():
            setattr(self, name, local)
        kwargs = {name: item for name, item in kwargs.items() if name not in self._locals}
        of_optimizer = [] if optimizer is None else optimizer.variables
        apart = [v for local in self._locals.values() for v in local.trained]
        plain = {id(v): v for v in map(plain_variable, (*variables, *of_optimizer, *apart))}
        self._variables = [v for v in plain.values() if isinstance(v, tf.Variable)]
        self._distributed = distributed_in(optimizer)
        for reducer in self._reducers():
            if reducer.process_set is not horovod.global_process_set:
                raise ValueError(
                    "elastic training exchanges over all ranks: a process set does not outlive a "
                    "reset. Make DistributedOptimizer or LocalSteps without process_set="
                )
        self._copy()
        ObjectState.__init__(self, bcast_object=_broadcast_object, get_rank=horovod.rank, **kwargs)

    def _reducers(self) -> list[GraphReducer]:
        """Return the reducers of the optimizer, of local steps, and of tapes."""
        owned = reducer_in(self._distributed)
        of_locals = [r for local in self._locals.values() for r in (*local.reducers, *local.others)]
        taped = [reducer for reducer, _ in reducers_over(self._variables)]
        return [*of_locals, *taped] if owned is None else [owned, *of_locals, *taped]

    def _tracked(self) -> list[tf.Variable]:
        of_reducers = [v for reducer in self._reducers() for v in reducer.variables]
        of_locals = [v for local in self._locals.values() for v in local.variables]
        return list({id(v): v for v in (*self._variables, *of_locals, *of_reducers)}.values())

    def _copy(self) -> None:
        self._copies = [(v, tf.identity(v)) for v in self._tracked()]

    def save(self) -> None:
        self._copy()
        ObjectState.save(self)

    def restore(self) -> None:
        for local in self._locals.values():
            local.settle()  # after an error of Horovod's all that is on its way ends
        known = {id(v) for v, _ in self._copies}
        taped = [reducer for reducer, _ in reducers_over(self._variables)]
        drop_reducers(reducer for reducer in taped if id(reducer.steps) not in known)
        for variable, value in self._copies:
            variable.assign(value)
        for reducer in self._reducers():
            reducer.counters.commit()
        ObjectState.restore(self)

    def sync(self) -> None:
        ranks = horovod.global_process_set
        taped = [
            (
                places,
                reducer.compressor,
                replace(reducer.options, process_set=None),
                [name for name, _, _ in reducer.layers],
                reducer.rows.choices,
            )
            for reducer, places in reducers_over(self._variables)
        ]
        names = [reducer.name for reducer in self._reducers()]
        titles = [local.title for local in self._locals.values()]
        taped, names, titles, number = _broadcast_object((taped, names, titles, TITLES.draw()))
        for places, compressor, options, layers, choices in taped:
            sources = [self._variables[place] for place in places]
            reducer = reducer_for(sources, compressor, replace(options, process_set=ranks), layers)
            assert reducer is not None
            reducer.rows.adopt(choices)
        for reducer, name in zip(self._reducers(), names):
            reducer.rename(name)
        TITLES.continue_from(number)
        broadcast_variables(self._tracked(), 0)
        for local, title in zip(self._locals.values(), titles):
            local.begin_anew(title)
        ObjectState.sync(self)


class Elastic(Membership, Variables):
    """State of variables among ranks that come and go."""

    def __init__(self, *arguments: Any, **kwargs: Any) -> None:
        super().__init__(*arguments, **kwargs)
        self.begin()

    def sync(self) -> None:
        with _horovod_errors():
            super().sync()

    def _gather(self, seat: RankState) -> list[RankState]:
        return gather_objects(seat, RankState, "gradcomp.elastic.roll", horovod.global_process_set)

    def _place(self) -> tuple[int, int]:
        return horovod.rank(), horovod.local_rank()

    def _squares(self) -> float:
        return sum(
            float(tf.reduce_sum(tf.square(tf.cast(residual, tf.float64))))
            for reducer in self._reducers()
            for bucket in reducer.buckets
            if (residual := residual_of(bucket.compressor, bucket.state)) is not None
        )

    def _committed(self) -> Any:
        return self._copies, self._saved_state

    def _recommit(self, copies: Any) -> None:
        self._copies, self._saved_state = copies

    def _forget(self) -> None:
        for reducer in self._reducers():
            reducer.reset_local()

    def _resize(self) -> None:
        for reducer in self._reducers():
            for compressor in reducer.resize():
                if horovod.rank() == 0:
                    LOGGER.warning(
                        "%s learns anew: other ranks exchange now, %d of them",
                        compressor,
                        horovod.size(),
                    )
        if hasattr(self._distributed, "own"):
            self._distributed.claim_state()


class TensorFlowState(Elastic, _stock.TensorFlowState):
    """State of an elastic run over a list of variables, to commit, restore and send to new ranks.

    It includes the compressor state of each `DistributedGradientTape` over these variables (or over
    some of them). At `sync` survivors keep what belongs to them (residuals, momenta) and a new rank
    starts with none. The residual of a rank that died is lost: logged with its norm, and in
    `lost`. With a `LocalSteps` all ranks then go on from its global variables, and lose the steps
    since the last exchange, which is logged. Memory: two commits, each a copy of everything; see
    `Membership`.

    Args:
        variables: of the model and of its optimizer, in the same order on all ranks; all that
            TensorFlow knows of if None.
        session: refused; it belongs to TensorFlow 1.
        kwargs: plain Python objects, and a `LocalSteps` over the variables; they become attributes.

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
        kwargs: plain Python objects, and a `LocalSteps`: `callback.build(model)` of the callback's.
            They become attributes.

    Raises:
        ValueError: the model is not built, there is no optimizer, or it exchanges over a process
            set, which does not outlive a reset.
    """

    def __init__(
        self, model: Any, optimizer: Optimizer | None = None, backend: Any = None, **kwargs: Any
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
