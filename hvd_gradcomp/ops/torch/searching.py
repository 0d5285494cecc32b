"""Traversal of a bucket in tiles that stay in cache."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from hvd_gradcomp.ops import Tensor
from hvd_gradcomp.ops.torch.base import TILE, Base
from hvd_gradcomp.ops.torch.conditions import Above, Condition, Found


class Searching(Base):
    """Ops that traverse a bucket in tiles that stay in cache."""

    def search(
        self,
        body: Callable[..., tuple[Tensor, tuple[Tensor, ...]]],
        donated: tuple[Tensor, ...],
        given: tuple[Tensor, ...],
        bound: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        if not self.dynamic_shapes:
            return body(*donated, *given)

        rooms = tuple(map(self.room, donated))

        def tiles() -> Iterator[Tensor | Condition]:
            for place, tile in enumerate(self._tiles(rooms, donated, given)):
                flags, after = body(*tile)
                _write(tile, after)
                if bound is not None:
                    block = donated[0].shape[0] // bound.shape[0]
                    flags = Above(flags, bound[place * (TILE // block) :], block)
                yield flags

        return self._indices(tiles()), rooms

    def sweep(
        self,
        body: Callable[..., tuple[Tensor, ...]],
        donated: tuple[Tensor, ...],
        given: tuple[Tensor, ...],
    ) -> tuple[Tensor, ...]:
        if not self.dynamic_shapes:
            return body(*donated, *given)
        rooms = tuple(map(self.room, donated))
        for tile in self._tiles(rooms, donated, given):
            _write(tile, body(*tile))
        return rooms

    def find(self, x: Tensor, bound: Tensor) -> Tensor:
        return self._indices(Above(tile, *where) for tile, where in self._bounded(x, bound))

    def accumulate_square(self, x: Tensor, y: Tensor) -> Tensor:
        if self.native is None or self._lent is None:
            return super().accumulate_square(x, y)
        self.native.accumulate_square(x.data_ptr(), y.data_ptr(), x.shape[0])
        return x

    def square_exceeds(self, x: Tensor, y: Tensor, factor: float) -> Any:
        if self.native is None or self._lent is None:
            return super().square_exceeds(x, y, factor)
        # Evaluated at once: later ops of the body may write to y.
        out = self._scratch(x, torch.int64)
        assert out is not None
        pointers = (x.data_ptr(), y.data_ptr(), factor)
        count = self.native.find_exceeding(*pointers, x.shape[0], 0, out.data_ptr())
        return Found(out[:count])

    def _bounded(self, x: Tensor, bound: Tensor) -> Iterator[tuple[Tensor, tuple[Tensor, int]]]:
        """Yield tiles, each with the bounds of its blocks and their length."""
        block = x.shape[0] // bound.shape[0]
        for place, tile in enumerate(x.split(TILE)):
            yield tile, (bound[place * (TILE // block) :], block)

    def _tiles(
        self, rooms: tuple[Tensor, ...], donated: tuple[Tensor, ...], given: tuple[Tensor, ...]
    ) -> Iterator[tuple[Tensor, ...]]:
        """Yield tiles that stay in cache; within one, `_scratch` lends memory."""
        self._lent = {}
        moved = [(room, x) for room, x in zip(rooms, donated) if room is not x]
        pieces = zip(*(x.split(TILE) for x in (*rooms, *given)))
        sources = zip(*(x.split(TILE) for _, x in moved)) if moved else itertools.repeat(())
        places = [i for i, (room, x) in enumerate(zip(rooms, donated)) if room is not x]
        for tile, source in zip(pieces, sources):
            for place, x in zip(places, source):
                tile[place].copy_(x)
            for dtype in self._lent:
                self._lent[dtype] = 0
            yield tile
        self._lent = None

    def _indices(self, tiles: Iterable[Tensor | Condition]) -> Tensor:
        """Return the indices where flags are set or conditions hold, tile after tile."""
        found, scratch = [], None
        for place, flags in enumerate(tiles):
            if isinstance(flags, Condition):
                if self.native is not None:
                    if scratch is None:
                        scratch = self._empty(TILE, dtype=torch.int64)
                    count = flags.find(self.native, place * TILE, scratch)
                    found.append(scratch[:count].clone())
                    continue
                assert isinstance(flags, Above)  # the others exist only with the C library
                flags = flags.flags()
            # Eight flags are one word: few words are set, and only those are inspected.
            if flags.shape[0] % 8:
                flags = torch.nn.functional.pad(flags, (0, -flags.shape[0] % 8))
            word = flags.view(torch.int64).nonzero().view(-1)
            row, bit = flags.view(-1, 8)[word].nonzero(as_tuple=True)
            found.append(word[row].add_(place * (TILE // 8)).mul_(8).add_(bit))
        return torch.cat(found)


def _write(tile: tuple[Tensor, ...], after: tuple[Tensor, ...]) -> None:
    """Copy the results of a body to its arguments."""
    for old, new in zip(tile, after):
        if new is not old:
            old.copy_(new)
