"""Protocol of the jobs that commands measure in: their ranks, and what travels between these."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

from hvd_gradcomp.torch.local.wrapped_optimizer import WrappedOptimizer
from hvd_gradcomp.torch.reduce.backend import Backend
from hvd_gradcomp.torch.reduce.bucket import Named
from hvd_gradcomp.torch.reduce.reducer import BucketPrograms

Timed = Callable[[Iterator[None]], Iterator[None]]


class Job(Protocol):
    """Ranks that were started together, and the library that connects them.

    Attributes:
        library: that connects them, for tables and messages.
        group: the ranks that exchange with this one; has `rank()`, `size()` and `ranks`.
        shard, shards: index of this rank's shard of each parameter, and how many there are; 0 and 1
            where models are not sharded.
    """

    library: str
    group: Any
    shard: int
    shards: int

    def rank(self) -> int:
        """Return the number of this rank among all."""

    def size(self) -> int:
        """Return the number of all ranks."""

    def hosts(self) -> int:
        """Return the number of hosts."""

    def barrier(self) -> None:
        """Wait for all ranks."""

    def slowest(self, seconds: float) -> float:
        """Return the maximum over all ranks."""

    def gather_objects(self, item: Any, kind: Any) -> list[Any]:
        """Gather an item of type `kind` from every rank; see `runtime.typed_json`."""

    def backend(self) -> Backend:
        """Return a transport for one exchange in `group`; all ranks call it."""

    def exchange_dense(self, gradients: list[torch.Tensor]) -> float:
        """Average gradients in `group`, in place and uncompressed, as the library does by itself.

        Returns:
            `time.perf_counter()` after the last was submitted.
        """

    def dense_exchanges(self, layers: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
        """Return the uncompressed exchanges that the library begins during backward.

        Args:
            layers: the seconds after which each gradient is there, and its bytes.

        Returns:
            The seconds after which each exchange can begin, and its bytes.
        """

    def run_to_end(self, programs: BucketPrograms, timed: Timed) -> None:
        """Run programs that have started to their ends.

        Args:
            programs: of one reducer.
            timed: measures the pauses of a generator that yields while it waits for other ranks.
        """

    def local_steps(
        self, optimizer: torch.optim.Optimizer, named: Named, **settings: Any
    ) -> WrappedOptimizer:
        """Wrap an optimizer in `LocalSteps` over `group`; see there."""

    def momentum_exchange(
        self, optimizer: torch.optim.Optimizer, named: Named, **settings: Any
    ) -> WrappedOptimizer:
        """Wrap an optimizer in `MomentumExchange` over `group`; see there."""

    def close(self) -> None:
        """End the job, on this rank: those that wait for it fail."""
