"""Comparison of the ranks of local steps: what they train, and what they are about to exchange."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from horovod import __version__ as horovod_version

from hvd_gradcomp.core.layers import Layer
from hvd_gradcomp.runtime import config_check
from hvd_gradcomp.runtime.exchange_state import (
    ExchangeState,
    States,
    digests_of,
    diverged,
    out_of_step,
)
from hvd_gradcomp.tensorflow import checksums, comm
from hvd_gradcomp.tensorflow.averaging import GradientAverage
from hvd_gradcomp.tensorflow.fragments import Fragment, RoundCounters
from hvd_gradcomp.tensorflow.reducer import GraphReducer


class ExchangeCheck:
    """Comparison of this rank with the others, eagerly.

    Args:
        title: prefix of the collectives' names, equal on all ranks.
        process_set: the ranks.
        settings: what must be equal on all ranks, besides layers, compressor and buckets.
        layers: of the variables that are exchanged.
        counters: of the rounds.
        averages: of gradients, which all ranks have to make, or none.

    Attributes:
        title: as given.
    """

    def __init__(
        self,
        title: str,
        process_set: Any,
        settings: str,
        layers: Sequence[Layer],
        counters: RoundCounters,
        averages: GradientAverage,
    ) -> None:
        self._process_set, self._settings, self._layers = process_set, settings, layers
        self._counters, self._averages = counters, averages
        self.restart(title)

    def restart(self, title: str) -> None:
        """Go on under another title, maybe among other ranks, which are yet to be compared."""
        self.title, self._agreed = title, False

    @property
    def is_first(self) -> bool:
        """Return True on the rank that speaks for all."""
        return bool(self._process_set.rank() == 0)

    def agree(self, reducers: Sequence[GraphReducer]) -> None:
        """Compare what is trained, and how, once; then averages in hosts may begin.

        Args:
            reducers: one for each fragment.

        Raises:
            MismatchError: on all ranks, if it is not the same.
        """
        if self._agreed:
            return
        own = config_check.describe(
            self._layers,
            reducers[0].compressor,
            [layout for reducer in reducers for layout in reducer.planner.layouts],
            self._settings,
            framework=f"tensorflow {tf.__version__}",
            horovod=horovod_version,
        )
        found = self._gather(own, config_check.Description)
        advice = "Give LocalSteps the same variables and arguments on all ranks"
        config_check.agree(found, self._process_set.ranks, advice)
        self._averages.connect(self.title, reducers[0].participants)
        self._agreed = True

    def compare(self, number: int, fragment: Fragment, asked: bool) -> States:
        """Compare what the ranks are about to exchange; return the state of each.

        Args:
            number: of the fragment.
            fragment: what is to be exchanged.
            asked: ranks may have made different numbers of steps.

        Raises:
            OutOfStepError: on all ranks, if it is something else.
            DivergedError: on all ranks, if their global variables differ.
            RuntimeError: on all ranks, if one has averaged no gradients in its host, and had to.
        """
        digests = checksums.digests_of(fragment.reducer.ops, fragment.copies)
        missed, moved = self._averages.has_missed(number), int(self._counters.moved[number])
        own = ExchangeState(
            number,
            int(asked),
            int(fragment.reducer.steps),
            int(self._counters.clock),
            moved,
            zlib.crc32(digests.numpy().tobytes()),
            fault=int(missed and moved > 0),
        )
        every = self._gather(own, ExchangeState)
        states = dict(zip(self._process_set.ranks or range(len(every)), every))
        if error := out_of_step(states):
            raise error
        remedy = (
            "Make LocalSteps once all ranks have equal variables, by hvd.broadcast_variables or a "
            "seed"
        )
        if different := diverged(digests_of(states), "variables", remedy):
            raise different
        if alone := [rank for rank, state in states.items() if state.fault]:
            raise RuntimeError(
                "hierarchical=True averages gradients over the ranks of a host in every step, and "
                f"rank {', '.join(map(str, alone))} has averaged none since the last exchange: "
                "call gradients = local.reduce_gradients(gradients) before the optimizer"
            )
        return states

    def _gather(self, item: Any, kind: Any) -> list[Any]:
        with tf.init_scope(), comm.explained("the exchange of local steps"):
            return comm.gather_objects(item, kind, self.title, self._process_set)
