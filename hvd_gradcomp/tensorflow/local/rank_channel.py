"""Comparison of the ranks of local steps: what they train, and what they are about to exchange."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf
from horovod import __version__ as horovod_version

from hvd_gradcomp.core.layers import Layer
from hvd_gradcomp.runtime import config_check
from hvd_gradcomp.tensorflow.comm import horovod as comm
from hvd_gradcomp.tensorflow.local.averaging import GradientAverage
from hvd_gradcomp.tensorflow.reduce.reducer import GraphReducer


class GraphRankChannel:
    """Comparison of ranks that train variables, eagerly; see `RankChannel`.

    Args:
        title: prefix of the collectives' names, equal on all ranks.
        process_set: the ranks.
        settings: that must be equal on all ranks, besides layers, compressor and buckets.
        layers: of the variables that are exchanged.
        reducers: of the pseudogradients of each fragment.
        averages: of gradients, which all ranks have to make, or none.

    Attributes:
        title: as given; another one where other ranks take part.
    """

    noun = "variables"
    remedy = (
        "Make LocalSteps once all ranks have equal variables, by hvd.broadcast_variables or a "
        "seed, and call restart() on all of them after setting variables in mid-training"
    )

    def __init__(
        self,
        title: str,
        process_set: Any,
        settings: str,
        layers: Sequence[Layer],
        reducers: Sequence[GraphReducer],
        averages: GradientAverage,
    ) -> None:
        self.title, self._process_set, self._settings = title, process_set, settings
        self._layers, self._reducers, self._averages = layers, reducers, averages

    @property
    def is_first(self) -> bool:
        """Return True on the rank that speaks for all."""
        return bool(self._process_set.rank() == 0)

    def compare_settings(self, refusal: Exception | None) -> None:
        """Compare what is trained, and how; then averages in hosts may begin."""
        description = config_check.describe(
            self._layers,
            self._reducers[0].compressor,
            [layout for reducer in self._reducers for layout in reducer.planner.layouts],
            self._settings,
            framework=f"tensorflow {tf.__version__}",
            horovod=horovod_version,
        )
        advice = "Give LocalSteps the same variables and arguments on all ranks"
        ranks = self._process_set.ranks
        config_check.compare(description, self._gather, ranks, refusal, advice)
        self._averages.connect(self.title, self._reducers[0].participants)

    def gather(self, row: Sequence[int]) -> dict[int, list[int]]:
        """Gather as many numbers from every rank, by rank."""
        rows = self._gather(list(row), list[int])
        return dict(zip(self._process_set.ranks or range(len(rows)), rows))

    def start_gather(self, row: Sequence[int]) -> Callable[[], dict[int, list[int]]]:
        rows = self.gather(row)  # an eager collective waits where it is made
        return lambda: rows

    def fault(self, number: int, moved: int) -> int:
        """Return 1 if this rank has averaged no gradients in its host, and had to."""
        missed = self._averages.has_missed(number)
        return int(missed and moved > 0)

    def refuse_faults(self, faults: Mapping[int, int]) -> None:
        """Raise a RuntimeError if a rank has averaged no gradients in its host, and had to."""
        if alone := [rank for rank, fault in faults.items() if fault]:
            raise RuntimeError(
                "hierarchical=True averages gradients over the ranks of a host in every step, and "
                f"rank {', '.join(map(str, alone))} has averaged none since the last exchange: "
                "call gradients = local.reduce_gradients(gradients) before the optimizer"
            )

    def _gather(self, item: Any, kind: Any) -> list[Any]:
        with tf.init_scope(), comm.explained("the exchange of local steps"):
            return comm.gather_objects(item, kind, self.title, self._process_set)
