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
from hvd_gradcomp.tensorflow.variables import plain_variable

_BEGINS = -1  # in the place of a fragment's number, before the first step


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
        agreed: the ranks have compared what they train, and how.
        has_diverged: the ranks' global variables differed when they were compared.
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
        self.has_diverged = False
        self.restart(title)

    def restart(self, title: str) -> None:
        """Go on under another title, maybe among other ranks, which are yet to be compared."""
        self.title, self.agreed = title, False
        self.compare_anew()

    def compare_anew(self) -> None:
        """Compare the variables before the next step, since they were set."""
        self._compared = False

    @property
    def is_first(self) -> bool:
        """Return True on the rank that speaks for all."""
        return bool(self._process_set.rank() == 0)

    def begin(self, fragments: Sequence[Fragment], warms_up: bool) -> None:
        """Compare what is trained, how, and from where, before the first step of this rank.

        Then averages in hosts may begin.

        Args:
            fragments: of the model.
            warms_up: the model's variables count; otherwise the global ones, from which this rank
                may have moved.

        Raises:
            MismatchError: on all ranks, if they do not train the same.
            DivergedError: on all ranks, if their variables differ.
        """
        reducers = [fragment.reducer for fragment in fragments]
        if not self.agreed:
            self._agree(reducers)
        if self._compared:
            return
        kept = [f.sources if warms_up else f.shared for f in fragments]
        values = [plain_variable(v).read_value() for some in kept for v in some]
        digest = _checksum(reducers[0], values)
        exchanges = sum(int(reducer.steps) for reducer in reducers)
        own = ExchangeState(_BEGINS, 1, exchanges, 0, 0, digest, 0)
        self._require_equal(self._gather_states(own))
        self._compared, self.has_diverged = True, False

    def _agree(self, reducers: Sequence[GraphReducer]) -> None:
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
        self.agreed = True

    def were_set(self, here: bool, is_exchanged: bool) -> bool:
        """Return True if variables of some rank were set, and no rank is between exchanges.

        Args:
            here: those of this rank were.
            is_exchanged: this rank has the global variables, but for what was set.
        """
        states = self._gather((here, is_exchanged), tuple[bool, bool])
        return any(here for here, _ in states) and all(done for _, done in states)

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
        missed, moved = self._averages.has_missed(number), int(self._counters.moved[number])
        own = ExchangeState(
            number,
            int(asked),
            int(fragment.reducer.steps),
            int(self._counters.clock),
            moved,
            _checksum(fragment.reducer, fragment.shared),
            fault=int(missed and moved > 0),
        )
        states = self._gather_states(own)
        self._require_equal(states)
        if alone := [rank for rank, state in states.items() if state.fault]:
            raise RuntimeError(
                "hierarchical=True averages gradients over the ranks of a host in every step, and "
                f"rank {', '.join(map(str, alone))} has averaged none since the last exchange: "
                "call gradients = local.reduce_gradients(gradients) before the optimizer"
            )
        return states

    def _gather_states(self, own: ExchangeState) -> States:
        every = self._gather(own, ExchangeState)
        states = dict(zip(self._process_set.ranks or range(len(every)), every))
        if error := out_of_step(states):
            raise error
        return states

    def _require_equal(self, states: States) -> None:
        remedy = (
            "Make LocalSteps once all ranks have equal variables, by hvd.broadcast_variables or a "
            "seed, and call restart() on all of them after setting variables in mid-training"
        )
        if different := diverged(digests_of(states), "variables", remedy):
            self.has_diverged = True
            raise different

    def _gather(self, item: Any, kind: Any) -> list[Any]:
        with tf.init_scope(), comm.explained("the exchange of local steps"):
            return comm.gather_objects(item, kind, self.title, self._process_set)


def _checksum(reducer: GraphReducer, values: Sequence[Any]) -> int:
    return zlib.crc32(checksums.digests_of(reducer.ops, values).numpy().tobytes())
