"""Traversal of a bucket in tiles that stay in cache."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

from hvd_gradcomp.ops.interface.elementwise import Elementwise
from hvd_gradcomp.ops.tensors import Tensor


class Searching(Elementwise):
    """Ops that traverse a bucket in tiles that stay in cache."""

    @abstractmethod
    def search(
        self,
        body: Callable[..., tuple[Tensor, tuple[Tensor, ...]]],
        donated: tuple[Tensor, ...],
        inputs: tuple[Tensor, ...],
        bound: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Apply `body(*donated, *inputs) -> (flags, donated)`, elementwise, tile by tile in cache.

        With a bound, the body returns values instead of flags, and `find` says which count.

        Donating, for all of `donated`. Within `body` use ops instead of `*`, so that a backend can
        reuse memory.

        Returns:
            With `dynamic_shapes` the ascending indices of the true flags, else the flags; and
            the new `donated`.
        """

    @abstractmethod
    def sweep(
        self,
        body: Callable[..., tuple[Tensor, ...]],
        donated: tuple[Tensor, ...],
        inputs: tuple[Tensor, ...],
    ) -> tuple[Tensor, ...]:
        """Apply `body(*donated, *inputs) -> donated`, like `search` without flags."""

    @abstractmethod
    def find(self, x: Tensor, bound: Tensor) -> Tensor:
        """Return the ascending indices where `|x| >= bound` of the element's block and x is not 0.

        bound is [blocks], for blocks of one length. Needs `dynamic_shapes`.
        """

    # -- composite ops ---------------------------------------------------------------------

    def accumulate_square(self, x: Tensor, y: Tensor) -> Tensor:
        """Return `x + y*y`. Donating."""
        return self.accumulate(x, self.square(y))

    def square_exceeds(self, x: Tensor, y: Tensor, factor: float) -> Any:
        """Return `x*x > factor*y`, for the body of a `search`."""
        return self.greater(self.square(x), self.times(y, factor))
