"""Planning of a model's buckets while it trains: layers join, the execution order is learned."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Protocol

import torch

from hvd_gradcomp.core.compressor import Compressor
from hvd_gradcomp.monitoring.stats import CompressionStats
from hvd_gradcomp.planning import assignment, worth
from hvd_gradcomp.runtime import naming
from hvd_gradcomp.runtime.collectives import Transport
from hvd_gradcomp.torch.bucket import (
    BUCKET_BYTES,
    Bucket,
    Named,
    as_used,
    carry_over,
    leaving_dense,
    planned,
)
from hvd_gradcomp.torch.exchange import LOGGER, Reducer, stats_of
from hvd_gradcomp.torch.moments import tracker
from hvd_gradcomp.torch.moments.sources import Sources, source_of
from hvd_gradcomp.torch.parameters import layers_of


class Peers(Protocol):
    """Ranks of an exchange, for statistics and verification."""

    def global_rank(self) -> int:
        """Return this rank's number in the whole job."""

    def gather_rows(self, row: torch.Tensor) -> torch.Tensor:
        """Gather the row of every rank, for comparison; all ranks call it."""

    def gather_named(self, numbers: dict[str, int]) -> list[dict[str, int]]:
        """Gather the numbers of every rank; their names may differ between ranks."""


class BucketPlanner(Reducer):
    """Reducer that plans its buckets.

    Args:
        named_parameters: (name, parameter) of everything that is reduced; the order is the same
            on all ranks.
        compressor: assigned to the layers.
        transport: see `Reducer`.
        name: prefix of the names of all collectives.
        tracking: the call that sets up per-sample moments, for messages.
        passes: backward passes for each exchange.
        batch_size: samples that a rank sees for each exchange, for `moments="microbatch"`.
        bucket_bytes: target size of a bucket; 25 MiB if None.
        how: options of `Reducer`.

    Attributes:
        layers: of the model, in the user's order.
        used: the same layers in planned order.
        order: layer names in execution order, once known.
    """

    def __init__(
        self,
        named_parameters: Named,
        compressor: Compressor,
        transport: Transport,
        *,
        name: str,
        tracking: str,
        passes: int = 1,
        batch_size: int | None = None,
        bucket_bytes: int | None = None,
        **how: Any,
    ) -> None:
        super().__init__(transport, **how)
        _require_data(named_parameters)
        self.name = name
        self.compressor = compressor = leaving_dense(compressor, named_parameters)
        self.order: list[str] = []
        self._arrived: list[str] | None = [] if compressor.needs_execution_order else None
        self._named, self._bucket_bytes = list(named_parameters), bucket_bytes
        self._name_of = {p: name for name, p in named_parameters}
        self.layers = layers_of(named_parameters)
        assigned = assignment.assign(compressor, self.layers, self.seat[1])
        using = [pair for pair, one in zip(named_parameters, assigned) if one.uses_moments]
        tells = self.process_set.rank() == 0
        source = source_of(compressor, using, passes, tells, tracking)
        self.sources = Sources(source, batch_size, self.scaling)
        self._judged = False
        self.adopt(list(self._plan(self._named)))
        self.sources.watch(self.buckets)

    @property
    def named_parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Return the (name, parameter) pairs, in the user's order."""
        return list(self._named)

    @property
    def ordered_parameters(self) -> list[torch.nn.Parameter]:
        """Return the parameters, in an order that is the same on all ranks."""
        return [p for _, p in self._named]

    @property
    @abstractmethod
    def peers(self) -> Peers:
        """Return the ranks that exchange."""

    def _plan(self, named_parameters: Named, placed: Collection[Bucket] = ()) -> Iterator[Bucket]:
        """Yield new buckets for these parameters, except for layers that `placed` has already."""
        known = {layer[0]: layer for layer in self.layers}
        new = layers_of([pair for pair in named_parameters if pair[0] not in known])
        known |= {layer[0]: layer for layer in new}
        self.used = [known[name] for name, _ in named_parameters]
        return planned(
            named_parameters,
            self.used,
            self.compressor,
            name=self.name,
            ranks=self.seat[1],
            place=self.place,
            bucket_bytes=self._bucket_bytes,
            with_moments=self.sources.kept,
            placed=placed,
        )

    def add(self, named_parameters: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
        """Plan buckets for parameters that join, on all ranks before the same step.

        The ranks compare their configuration again. Methods that learn start to learn the new
        layers at this step.

        Raises:
            ValueError: the compressor orders the layers of the whole model (LGC, or a partition
                with it); second moments of the parameters are not tracked; a dtype is not
                supported.
        """
        _require_data(named_parameters)
        names = ", ".join(name for name, _ in named_parameters)
        if self.compressor.needs_execution_order:
            raise ValueError(
                f"the compressor plans the whole model at once: {names} cannot join. Build a new "
                "DistributedOptimizer once all that will be trained requires gradients. It is "
                f"{self.compressor}"
            )
        untracked = [
            name
            for name, p in named_parameters
            if not tracker.is_tracked(p) and not tracker.is_sent_dense(p)
        ]
        if self.sources.source == "sample" and untracked:
            raise ValueError(
                "moments='sample' needs hvd.track_moments(model) before its parameters join; not "
                f"tracked: {', '.join(untracked)}"
            )
        if self.sources.source == "sample":
            self.compressor = leaving_dense(self.compressor, named_parameters)
        everything = [*self._named, *named_parameters]
        new = list(self._plan(everything, self.buckets))
        for bucket in new:
            bucket.since = self.steps
            bucket.state = bucket.compressor.retrained(bucket.ops, bucket.state, self.steps)
        self._named = everything
        self._name_of.update((p, name) for name, p in named_parameters)
        self.layers += self.used[len(self.used) - len(named_parameters) :]
        self.adopt([*self.buckets, *new])
        self.sources.watch(new)

    @property
    def known(self) -> tuple[list[Any], dict[Any, str], list[Any]]:
        """Return the parameters, their names and layers, joined ones included, for rollback."""
        return list(self._named), dict(self._name_of), list(self.layers)

    @known.setter
    def known(self, known: tuple[list[Any], dict[Any, str], list[Any]]) -> None:
        named, names, layers = known
        self._named, self._name_of, self.layers = list(named), dict(names), list(layers)

    @property
    def counted(self) -> tuple[list[int], dict[str, int]]:
        """Return this rank's traffic counters, for rollback."""
        return list(self.ledger.counters), dict(self.ledger.gathered)

    @counted.setter
    def counted(self, counted: tuple[list[int], dict[str, int]]) -> None:
        counters, gathered = counted
        self.ledger.counters, self.ledger.gathered = list(counters), dict(gathered)

    def stats(self) -> CompressionStats:
        """Return totals since the start; synchronizes with the device."""
        return stats_of(self, [name for name, _, _ in self.layers])

    def order_is_known(self) -> None:
        """Fix the execution order; gradients that arrive later are those of unused layers."""
        if self._arrived is not None and self.steps == 0:
            self.order, self._arrived = list(dict.fromkeys(self._arrived))[::-1], []

    def unorder(self) -> None:
        """Plan the buckets in the model's order, until a step shows the execution order again."""
        self._arrived, self.order = [], []
        self.adopt(list(self._plan(self._named)))

    def reorder(self, order: Sequence[str]) -> None:
        """Plan the buckets for this execution order, the same on all ranks.

        The new buckets inherit velocities, and residuals where their compressor has them.
        """
        self._arrived, self.order = None, list(order)
        known, ranks, names = dict(self._named), self.seat[1], as_used(self.layers, order)
        layers = {layer[0]: layer for layer in self.layers}
        before = assignment.assign(self.compressor, self.used, ranks)
        after = assignment.assign(self.compressor, [layers[name] for name in names], ranks)
        if dict(zip((name for name, _, _ in self.used), before)) == dict(zip(names, after)):
            return
        left = self.buckets
        self.adopt(list(self._plan([(name, known[name]) for name in names])))
        carry_over(left, self.buckets)

    def judge(self) -> None:
        """Warn once, on one rank, if the compressor does not pay off on this model."""
        if self._judged or not self.ordered:
            return
        self._judged = True
        if self.process_set.rank() == 0:
            target, ranks = self._bucket_bytes or BUCKET_BYTES, self.seat[1]
            plan = assignment.plan(self.compressor, self.used, target, ranks=ranks)
            for line in worth.warnings(self.compressor, plan, ranks):
                LOGGER.warning("%s", line)

    def rename(self, name: str) -> None:
        """Change the prefix of all names on the timeline."""
        self.name = name
        for place, bucket in enumerate(self.buckets):
            bucket.name = naming.bucket(name, place, bucket.layout)

    @property
    def ordered(self) -> bool:
        """Return True if the buckets follow the execution order, or need not."""
        return self._arrived is None

    @property
    def moments_of_layers(self) -> list[str]:
        """Describe how the per-sample moments of each layer in `used` are found; [] if not used."""
        if self.sources.source != "sample":
            return []
        known = dict(self._named)
        return [tracker.how(known[name]) for name, _, _ in self.used]


def _require_data(named_parameters: Named) -> None:
    """Check that all parameters have data.

    Raises:
        ValueError: one is on the device "meta", where tensors have no data.
    """
    empty = [name for name, p in named_parameters if p.is_meta]
    if empty:
        raise ValueError(
            f"on the device meta, where tensors have no data: {', '.join(empty[:8])}. Materialize "
            "them first, by model.to_empty(device=...) and an initialisation or by "
            "load_state_dict(..., assign=True); then make the optimizer"
        )
