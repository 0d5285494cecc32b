"""Traversal of a bucket in tiles that stay in cache."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator

import torch

from hvd_gradcomp.ops import Tensor
from hvd_gradcomp.ops.torch.base import TILE, Base


class Searching(Base):
    """Ops that traverse a bucket in tiles that stay in cache."""

    def search(
        self,
        body: Callable[..., tuple[Tensor, tuple[Tensor, ...]]],
        donated: tuple[Tensor, ...],
        inputs: tuple[Tensor, ...],
        bound: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        if not self.dynamic_shapes:
            return body(*donated, *inputs)

        outs = tuple(map(self.writable, donated))

        def tiles() -> Iterator[Tensor]:
            for place, tile in enumerate(self._tiles(outs, donated, inputs)):
                flags, after = body(*tile)
                _write(tile, after)
                if bound is not None:
                    flags = _reach(flags, bound, place, donated[0].shape[0] // bound.shape[0])
                yield flags

        return self._indices(tiles()), outs

    def sweep(
        self,
        body: Callable[..., tuple[Tensor, ...]],
        donated: tuple[Tensor, ...],
        inputs: tuple[Tensor, ...],
    ) -> tuple[Tensor, ...]:
        if not self.dynamic_shapes:
            return body(*donated, *inputs)
        outs = tuple(map(self.writable, donated))
        for tile in self._tiles(outs, donated, inputs):
            _write(tile, body(*tile))
        return outs

    def find(self, x: Tensor, bound: Tensor) -> Tensor:
        block = x.shape[0] // bound.shape[0]
        tiles = enumerate(x.split(TILE))
        return self._indices(_reach(tile, bound, place, block) for place, tile in tiles)

    def _tiles(
        self, outs: tuple[Tensor, ...], donated: tuple[Tensor, ...], inputs: tuple[Tensor, ...]
    ) -> Iterator[tuple[Tensor, ...]]:
        """Yield tiles that stay in cache; within one, `_scratch` lends memory."""
        self._lent = {}
        moved = [(out, x) for out, x in zip(outs, donated) if out is not x]
        pieces = zip(*(x.split(TILE) for x in (*outs, *inputs)))
        sources = zip(*(x.split(TILE) for _, x in moved)) if moved else itertools.repeat(())
        places = [i for i, (out, x) in enumerate(zip(outs, donated)) if out is not x]
        for tile, source in zip(pieces, sources):
            for place, x in zip(places, source):
                tile[place].copy_(x)
            for dtype in self._lent:
                self._lent[dtype] = 0
            yield tile
        self._lent = None

    def _indices(self, tiles: Iterable[Tensor]) -> Tensor:
        """Return the indices where flags are set, tile after tile."""
        indices = []
        for place, flags in enumerate(tiles):
            # Eight flags are one word: few words are set, and only those are inspected.
            if flags.shape[0] % 8:
                flags = torch.nn.functional.pad(flags, (0, -flags.shape[0] % 8))
            word = flags.view(torch.int64).nonzero().view(-1)
            row, bit = flags.view(-1, 8)[word].nonzero(as_tuple=True)
            indices.append(word[row].add_(place * (TILE // 8)).mul_(8).add_(bit))
        return torch.cat(indices)


def _write(tile: tuple[Tensor, ...], after: tuple[Tensor, ...]) -> None:
    """Copy the results of a body to its arguments."""
    for old, new in zip(tile, after):
        if new is not old:
            old.copy_(new)


def _reach(tile: Tensor, bound: Tensor, place: int, block: int) -> Tensor:
    """Return as bool where `|x|` reaches the bound of its block, and x is not 0."""
    magnitude = tile.abs().view(-1, block)
    bounds = bound[place * (TILE // block) :][: magnitude.shape[0], None]
    return ((magnitude >= bounds) & (magnitude > 0)).view(-1)
