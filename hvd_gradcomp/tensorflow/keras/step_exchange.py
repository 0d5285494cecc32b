"""Exchange of a step's gradients by a Keras optimizer, with all that lies beside the reducer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import horovod.tensorflow as horovod
import tensorflow as tf

from hvd_gradcomp.core.layers import tables_of
from hvd_gradcomp.method.compressor import Compressor
from hvd_gradcomp.tensorflow.interop.layers import named_layers
from hvd_gradcomp.tensorflow.interop.variables import keep_local
from hvd_gradcomp.tensorflow.keras.accumulation import GradientAccumulation, MomentSource
from hvd_gradcomp.tensorflow.reduce import checksums
from hvd_gradcomp.tensorflow.reduce.buckets import MakeVariable
from hvd_gradcomp.tensorflow.reduce.gradients import poisoned, times
from hvd_gradcomp.tensorflow.reduce.options import ExchangeOptions
from hvd_gradcomp.tensorflow.reduce.reducer import LOGGER, GraphReducer
from hvd_gradcomp.tensorflow.reduce.rivals import RivalExchanges


class StepExchange:
    """Exchange of the gradients of what an optimizer trains, in each step or after some passes.

    Args:
        variables: all that is trained.
        local: places of those whose gradients stay on this rank.
        places_of: returns the places of some of the variables.
        compressor: of the gradients.
        options: of the exchange.
        title: prefix of the collectives' names.
        settings: what must be equal on all ranks besides.
        make_variable: creates the variables, which the optimizer saves.
        host: what exchanges, as the user knows it.

    Attributes:
        reducer: of the gradients that do not stay on this rank.
        owner: a variable, the rank that the state belongs to.
        sums: of passes; None if a step has one.
    """

    def __init__(
        self,
        variables: Sequence[Any],
        local: frozenset[int],
        places_of: Callable[[Sequence[Any]], list[int]],
        compressor: Compressor,
        options: ExchangeOptions,
        title: str,
        settings: str,
        make_variable: MakeVariable,
        host: str,
    ) -> None:
        self._variables, self._places_of, self._options = list(variables), places_of, options
        self._exchanged = [i for i in range(len(variables)) if i not in local]
        self._local = local
        self._moments = MomentSource(compressor, options)
        named, passes = named_layers(variables), options.backward_passes_per_step
        layers = [named[i] for i in self._exchanged]
        self.owner = keep_local(
            make_variable("gradcomp_rank", tf.constant(horovod.rank(), tf.int64))
        )
        self.reducer = GraphReducer(
            layers,
            compressor,
            options,
            name=title,
            settings=settings,
            make_variable=make_variable,
            tables=[] if passes > 1 else tables_of(layers),
            trained=self.exchanged_variables,
            host=host,
        )
        self._rivals = RivalExchanges(self.exchanged_variables, of_tapes=True)
        self.sums: GradientAccumulation | None = None
        if passes > 1:
            number = make_variable("gradcomp_pass", tf.constant(0, tf.int64))
            wide = ["float64" if v.dtype == "float64" else "float32" for v in variables]
            added, squared = (
                [
                    keep_local(make_variable(f"gradcomp_{name}", tf.zeros(v.shape, dtype)))
                    for v, dtype in zip(variables, dtypes)
                ]
                for name, dtypes in (("added", wide), ("squared", ["float32"] * len(wide)))
            )
            self.reducer.sums = [*added, *squared]
            self.sums = GradientAccumulation(options, number, added, squared)

    @property
    def exchanged_variables(self) -> list[Any]:
        """Return the variables whose gradients are exchanged, in the order of the layers."""
        return [self._variables[i] for i in self._exchanged]

    def claim_state(self) -> None:
        """Mark the state as this process's, whose rank may have changed."""
        self.owner.assign(horovod.rank())

    def drop_of_others(self) -> None:
        """Begin anew if the state was loaded, and belongs to another rank."""
        saver = int(self.owner)
        if saver == horovod.rank():
            return
        if horovod.rank() == int(saver == 0):
            LOGGER.warning(
                "the optimizer's state was saved by rank %d: its residual belongs to that rank, "
                "and other ranks begin with an empty one. hvd.save_checkpoint saves all of them",
                saver,
            )
        self.claim_state()
        self.reducer.reset_local()

    def reduce(
        self, grads: Sequence[Any], variables: Sequence[Any], moments: list[Any] | None, scale: Any
    ) -> list[Any]:
        """Return what the exchange makes of gradients.

        Args:
            grads: one for each of the variables, or None.
            variables: some of those that are trained.
            moments: of samples, one for each gradient; None if they are not tracked.
            scale: of the loss; None without one.
        """
        full, of_samples = self._placed(grads, variables, moments)
        reduced = self._reduce(full, of_samples, scale)
        return [reduced[i] for i in self._places_of(variables)]

    def accumulate(
        self,
        grads: Sequence[Any],
        variables: Sequence[Any],
        moments: list[Any] | None,
        scale: Any,
        update: Callable[[list[Any], list[Any]], None],
    ) -> None:
        """Add a pass; after the last one of a step exchange the sums, and update variables.

        Args:
            grads, variables, moments, scale: as in `reduce`.
            update: takes what the exchange made of the sums, and the variables.
        """
        sums = self.sums
        assert sums is not None
        full, of_samples = self._placed(grads, variables, moments)
        sums.add(full, of_samples)

        def exchange() -> None:
            sampled = of_samples is not None
            of_step = sums.moments(sampled) if self._moments.is_passes else None
            totals = sums.totals(full, self._variables)
            due = [place for place, total in enumerate(totals) if total is not None]
            reduced = self._reduce(totals, of_step, scale)
            places = list(dict.fromkeys((*self._places_of(variables), *due)))
            update([reduced[i] for i in places], [self._variables[i] for i in places])
            sums.clear(due)
            self.verify()

        tf.cond(sums.pass_of_step == 0, exchange, lambda: None)

    def _reduce(self, full: list[Any], moments: list[Any] | None, scale: Any) -> list[Any]:
        """Exchange the gradients that do not stay on this rank, among those of all variables.

        Raises:
            ValueError: a tape has exchanged them in this step.
        """
        if rival := self._rivals.find():
            raise ValueError(
                f"{rival.host} has exchanged the gradients of these variables in this step, and "
                f"{self.reducer.host} would do so again: use a plain tape with it, or the plain "
                "optimizer"
            )
        shared = [full[i] for i in self._exchanged]
        if self._local:
            shared = poisoned(shared, [full[i] for i in self._local])
            moments = moments and [moments[i] for i in self._exchanged]
        reduced = dict(zip(self._exchanged, self.reducer.reduce(shared, moments, scale)))
        ranks = self.reducer.process_set.size() if self._options.scale_local_gradients else 1
        return [
            reduced[i] if i in reduced else times(gradient, tf.constant(1.0 / ranks))
            for i, gradient in enumerate(full)
        ]

    def verify(self) -> None:
        """Compare the ranks' variables, after as many exchanges as the options say."""
        reducer, every = self.reducer, self._options.verify_every
        if every:
            variables = self.exchanged_variables
            due = tf.equal(reducer.steps % every, 0)
            tf.cond(due, lambda: checksums.check(reducer, variables), lambda: None)

    def _placed(
        self, grads: Sequence[Any], variables: Sequence[Any], moments: list[Any] | None
    ) -> tuple[list[Any], list[Any] | None]:
        """Return gradients, and moments if those of samples count, in all variables' places."""
        if self._moments.decide(moments) != "sample":
            moments = None
        full: list[Any] = [None] * len(self._variables)
        full_moments = list(full)
        order = self._places_of(variables)
        for place, gradient in zip(order, grads):
            full[place] = gradient
        for place, moment in zip(order, moments or []):
            full_moments[place] = moment
        return full, full_moments if moments else None
