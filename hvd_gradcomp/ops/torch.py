"""The verbs in PyTorch.

On a CPU a large bucket is worked through in tiles that stay in the second-level cache, and
comparisons go through float32, where ATen has vector code (`a > b` into bool has none: measured
4 times slower than comparing in place and converting).

On CUDA no verb waits for the device. What the host must know (how many elements the ranks wanted)
is copied to pinned memory and read one step later; a payload that does not check out adds nothing
to the result of its step and raises at the next step, before anything else is sent.
"""

from __future__ import annotations

import ctypes
import importlib.util
import itertools
import sys
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from hvd_gradcomp.foundation.bands import Bands
from hvd_gradcomp.foundation.layout import Layout
from hvd_gradcomp.ops import LOGGER, Ops, PayloadError, Tensor
from hvd_gradcomp.ops.blocks import Axes, Blocks, Lifted
from hvd_gradcomp.ops.composites import _FACTOR, BEYOND, GROUP, Admitted, Field, Weighing
from hvd_gradcomp.ops.native import library
from hvd_gradcomp.ops.passes import LargestPasses, WordPasses

_DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "int64": torch.int64,
    "int32": torch.int32,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "bool": torch.bool,
}
_WORD = 0xFFFFFFFF
_EVEN_BYTES, _EACH_PAIR = 0x00FF00FF00FF00FF, 0x0001000100010001  # of a word of eight
_TILE = 1 << 18  # elements: few enough to stay in cache, enough that calls do not count
_HEAD = 64  # bytes before a body, at most
_CACHED = 1 << 18  # elements that are written past the caches if there are more


class TorchOps(Ops):
    """Eager PyTorch on one device.

    Args:
        device: where buckets live.
        static: keep to the verbs that a GPU and a compiler need, also on a CPU. The tests use it
            to hold both ways to the same bytes.
        kernels: take the passes in Triton; needs `static` where the device is no GPU. None takes
            them on CUDA where Triton can be loaded.
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        static: bool = False,
        kernels: bool | None = None,
    ) -> None:
        self.device = torch.device(device)
        self.on_host = self.device.type == "cpu"
        self.dynamic_shapes = self.on_host and not static
        self.native = library() if self.dynamic_shapes else None
        self.word_passes: Any = WordPasses(self) if self.native is not None else None
        self.largest_passes: Any = LargestPasses(self) if self.native is not None else None
        self.kernels: Any = None
        self.quantizers: Any = None  # the kernels of codes for every element
        if _triton_loads(self.device) if kernels is None else kernels:
            from hvd_gradcomp.ops.triton.common import Common
            from hvd_gradcomp.ops.triton.largest import LargestPasses as LargestKernels
            from hvd_gradcomp.ops.triton.quantizers import Quantizers
            from hvd_gradcomp.ops.triton.words import WordPasses as WordKernels

            self.kernels, self.word_passes = Common(self), WordKernels(self)
            self.largest_passes, self.quantizers = LargestKernels(self), Quantizers(self)
        self._bands: dict[Bands, Any] = {}
        self._tables: dict[tuple[Layout, str], Tensor] = {}
        self._constants: dict[tuple[float, ...], Tensor] = {}
        self._pool: dict[torch.dtype, list[Tensor]] = {}
        self._lent: dict[torch.dtype, int] | None = None  # how many of each pool, within a tile
        self._copied: Any = None  # CUDA: the event after the newest copy to the host
        self._pending: list[tuple[Sequence[str], Tensor, type[Exception]]] = []
        self._headless: Tensor | None = None  # see `body`
        self._kept: set[int] = set()  # places that verbs must not write to
        self._rooms: dict[tuple[torch.dtype, int], list[Tensor]] = {}  # to write to instead

    # -- a step that may have to be undone -----------------------------------------------------

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Donating verbs leave these as they are, and write elsewhere, until `let_go`."""
        self._kept.update(_place(x) for x in tensors if x.numel() > 1)

    def let_go(self, kept: Iterable[Tensor], now: Iterable[Tensor]) -> None:
        """Ends `keep`; what is not among those that are used now is room for later steps."""
        used = {_place(x) for x in now}
        for x in kept:
            if _place(x) in self._kept and _place(x) not in used:
                self._rooms.setdefault((x.dtype, x.numel()), []).append(x)
            self._kept.discard(_place(x))

    def room(self, x: Tensor) -> Tensor:
        """Where a donating verb may write: x, or as much memory, of any content, if it is kept."""
        if not self._kept or _place(x) not in self._kept:
            return x
        rooms = self._rooms.get((x.dtype, x.numel()))
        return rooms.pop().view(x.shape) if rooms else torch.empty_like(x)

    def own(self, x: Tensor) -> Tensor:
        """The same with the content of x, for verbs that write to a part."""
        room = self.room(x)
        return room if room is x else room.copy_(x)

    def raise_found(self) -> None:
        """Raises now what a GPU has found wrong in this step; waits for it."""
        if self._copied is not None:
            self._copied.synchronize()
            self._raise_pending()

    # -- the verbs -----------------------------------------------------------------------------

    def zeros(self, shape: Sequence[int], dtype: str = "float32") -> Tensor:
        return torch.zeros(tuple(shape), dtype=_DTYPES[dtype], device=self.device)

    def full(self, shape: Sequence[int], value: Any, dtype: str = "int64") -> Tensor:
        return torch.full(tuple(shape), value, dtype=_DTYPES[dtype], device=self.device)

    def arange(self, count: int) -> Tensor:
        return torch.arange(count, device=self.device)

    def table(self, layout: Layout, field: str) -> Tensor:
        key = (layout, field)
        if key not in self._tables:
            self._tables[key] = torch.tensor(
                getattr(layout, field), dtype=torch.int64, device=self.device
            )
        return self._tables[key]

    def words(self, values: Sequence[Any]) -> Tensor:
        known = [v if isinstance(v, int) else 0 for v in values]
        if self.on_host:
            return self._given([int(v) for v in values], torch.int64)
        words = self._given(known, torch.int64)
        for place, value in enumerate(values):
            if not isinstance(value, int):
                words[place] = value
        return words

    def reals(self, values: Sequence[float]) -> Tensor:
        return self._given(values, torch.float32)

    def constants(self, values: tuple[float, ...]) -> Tensor:
        if values not in self._constants:
            self._constants[values] = self.reals(values)
        return self._constants[values]

    def _given(self, values: Sequence[Any], dtype: torch.dtype) -> Tensor:
        """Numbers of the host; from pinned memory, since a copy from other would wait."""
        given = torch.tensor(values, dtype=dtype, device="cpu", pin_memory=not self.on_host)
        return given.to(self.device, non_blocking=True)

    def host(self, value: int) -> Tensor:
        return torch.tensor(value, dtype=torch.int64, device="cpu")

    def abs(self, x: Tensor) -> Tensor:
        return torch.abs(x, out=self._scratch(x))

    def square(self, x: Tensor) -> Tensor:
        return torch.mul(x, x, out=self._scratch(x))

    def times(self, x: Tensor, factor: float) -> Tensor:
        return torch.mul(x, factor, out=self._scratch(x))

    def log2(self, x: Tensor) -> Tensor:
        return torch.log2(x)

    def sqrt(self, x: Tensor) -> Tensor:
        return torch.sqrt(x)

    def maximum(self, x: Tensor, y: Any) -> Tensor:
        return torch.maximum(x, y) if isinstance(y, torch.Tensor) else x.clamp(min=y)

    def minimum(self, x: Tensor, y: Any) -> Tensor:
        return torch.minimum(x, y) if isinstance(y, torch.Tensor) else x.clamp(max=y)

    def where(self, condition: Tensor, x: Any, y: Any) -> Tensor:
        return torch.where(condition, x, y)

    def greater(self, x: Tensor, y: Any) -> Tensor:
        if self.native is not None and self._lent is not None and x.dtype == torch.float32:
            return _Greater(x, y)
        if self.on_host and x.dtype == torch.float32:
            flags = self._scratch(x, torch.bool)
            return x.gt_(y).bool() if flags is None else flags.copy_(x.gt_(y))
        return x > y

    def accumulate(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.add(x, y, out=self.room(x))

    def clear(self, x: Tensor) -> Tensor:
        return self.room(x).zero_()

    def scale(self, x: Tensor, factor: Any) -> Tensor:
        return torch.mul(x, factor, out=self.room(x))

    def cast(self, x: Tensor, dtype: Any) -> Tensor:
        return x.to(_DTYPES.get(dtype, dtype))

    def split_bits(self, x: Tensor, low: int) -> tuple[Tensor, Tensor]:
        return x >> low, x & ((1 << low) - 1)

    def shift_right(self, x: Tensor, amount: Tensor) -> Tensor:
        return x >> amount

    def xor(self, x: Tensor, y: Any) -> Tensor:
        return x ^ y

    def float_bits(self, x: Tensor) -> Tensor:
        return x.view(torch.int32).to(torch.int64) & _WORD

    def bits_float(self, bits: Tensor) -> Tensor:
        return _low_word(bits).view(torch.float32)

    def reshape(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        if Axes.of(x):
            across, x = x, self._empty(x.shape)
            self._copy(x, across)
        return x.reshape(tuple(shape))

    def _copy(self, into: Tensor, x: Tensor) -> None:
        """`into` is contiguous; what lies across is read in blocks, or rows, not in strides."""
        axes = Axes.of(x)
        if axes is None:
            into.copy_(x)
            return
        first, middle, last = axes
        if self.native is not None:
            there = (x.data_ptr(), *axes, middle * last, into.data_ptr(), middle * first)
            self.native.reverse(*there, x.numel() > _CACHED, torch.get_num_threads())
        else:
            there = x.as_strided(axes, (middle * last, last, 1))
            if last < first:
                rows = there.view(first, -1).t().contiguous().view(middle, last, first)
                into.view(last, middle, first).copy_(rows.transpose(0, 1))
            else:
                into.view(last, -1).copy_(there.transpose(0, 1).reshape(-1, last).t())

    def concat(self, xs: Sequence[Tensor]) -> Tensor:
        return torch.cat(tuple(xs), dim=-1)

    def stack(self, xs: Sequence[Tensor]) -> Tensor:
        return torch.stack(tuple(xs))

    def gather(self, x: Tensor, index: Tensor) -> Tensor:
        if self.native is not None and x.dtype == torch.float32 and x.is_contiguous():
            index, out = index.contiguous(), self._empty(index.shape)
            pointers = (x.data_ptr(), x.shape[0], index.data_ptr(), index.numel())
            _in_range(self.native.gather(*pointers, out.data_ptr()))
            return out
        # On a CPU several times faster than x[index].
        return x.index_select(0, index.reshape(-1)).view(index.shape)

    def gather_rows(self, x: Tensor, index: Tensor) -> Tensor:
        return torch.gather(x, 1, index)

    def put(self, x: Tensor, index: Tensor, values: Any) -> Tensor:
        x = self.own(x)
        if isinstance(values, torch.Tensor):
            return x.index_put_((index,), values)
        if self.native is not None and x.dtype == torch.float32:
            pointers = (x.data_ptr(), x.shape[0], index.data_ptr(), index.shape[0])
            _in_range(self.native.fill_at(*pointers, values))
            return x
        return x.index_fill_(0, index, values)

    def overwrite(self, x: Tensor, y: Tensor) -> Tensor:
        return self.room(x).copy_(y)

    def assemble(self, room: Tensor, pieces: Sequence[Tensor]) -> Tensor:
        room, start = self.own(room), 0
        for piece in pieces:
            place = room[start : start + piece.numel()]
            if isinstance(piece, Lifted):
                piece.into(place)
            elif piece.dim() > 1:
                self._copy(place.view(piece.shape), piece)
            elif place.shape[0] and place.data_ptr() != piece.data_ptr():
                place.copy_(piece[: place.shape[0]])
            start += piece.numel()
        return room

    def add_slice(self, x: Tensor, start: int, y: Tensor) -> Tensor:
        x, room = self.own(x), max(x.shape[0] - start, 0)
        x[start : start + y.shape[0]].add_(y[:room])
        return x

    def add_at(self, x: Tensor, index: Tensor, values: Tensor) -> Tensor:
        x = self.own(x)
        if self.native is not None and x.dtype == torch.float32:
            index, values = index.contiguous(), values.contiguous()
            pointers = (x.data_ptr(), x.shape[0], index.data_ptr(), index.shape[0])
            _in_range(self.native.add_at(*pointers, values.data_ptr()))
            return x
        return x.index_add_(0, index, values)

    def clear_last(self, x: Tensor) -> Tensor:
        x = self.own(x)
        x[-1:].zero_()
        return x

    def sum(self, x: Tensor, axis: int | None = None) -> Tensor:
        return x.sum() if axis is None else x.sum(axis)

    def max(self, x: Tensor, axis: int | None = None) -> Tensor:
        return x.amax() if axis is None else x.amax(axis)

    def min(self, x: Tensor, axis: int) -> Tensor:
        return x.amin(axis)

    def cumsum(self, x: Tensor) -> Tensor:
        return torch.cumsum(x, 0)

    def sort(self, x: Tensor) -> Tensor:
        if self.native is None:
            return torch.sort(x).values
        x = x.clone()
        _check(self.native.sort(x.data_ptr(), x.shape[0]))
        return x

    def count_below(self, ascending: Tensor, x: Tensor) -> Tensor:
        return torch.searchsorted(ascending, x)

    def largest(self, x: Tensor, k: int) -> Tensor:
        return torch.topk(x, k).values

    def find(self, x: Tensor, bound: Tensor) -> Tensor:
        return self._indices(_Above(tile, *where) for tile, where in self._bounded(x, bound))

    def _bounded(self, x: Tensor, bound: Tensor) -> Iterator[tuple[Tensor, tuple[Tensor, int]]]:
        """Tiles, each with the bounds of its blocks and their length."""
        block = x.shape[0] // bound.shape[0]
        for place, tile in enumerate(x.split(_TILE)):
            yield tile, (bound[place * (_TILE // block) :], block)

    def finite(self, x: Tensor) -> Any:
        total = x.sum()  # a NaN or an infinity survives a sum, but large numbers may overflow too
        if not self.dynamic_shapes:
            return torch.isfinite(x).all()
        return bool(torch.isfinite(total)) or bool(torch.isfinite(x).all())

    def nonzero(self, mask: Tensor) -> Tensor:
        return mask.nonzero().view(-1)

    def segment_max(self, x: Tensor, segment: Tensor, count: int) -> Tensor:
        return self.zeros((count,), "int64").scatter_reduce_(0, segment, x, "amax")

    def segment_sum(self, x: Tensor, segment: Tensor, count: int) -> Tensor:
        return self.zeros((count,), "int64").index_add_(0, segment, x)

    def matmul(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.matmul(x, y)

    def matmul_plus(self, x: Tensor, y: Tensor, row: Tensor) -> Tensor:
        return torch.addmm(row, x, y)

    def project(self, x: Tensor, basis: Tensor, row: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        blocks = self._blocks(x, basis.shape[0])
        return blocks.project(x, basis, row) if blocks else super().project(x, basis, row)

    def lift(
        self, code: Tensor, basis: Tensor, row: Tensor, shape: Sequence[int], order: Sequence[int]
    ) -> Any:
        lying = torch.empty(tuple(shape), device="meta").permute(tuple(order))
        blocks = self._blocks(lying, basis.shape[0])
        if blocks:
            return Lifted(blocks, code, basis, row)
        return super().lift(code, basis, row, shape, order)

    def _blocks(self, x: Tensor, length: int) -> Blocks | None:
        """Of what lies like x, in rows of a length."""
        return None if self.native is None else Blocks.of(self.native, Axes.of(x), length)

    def inner(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.dot(x.reshape(-1), y.reshape(-1))

    def transpose(self, x: Tensor, axes: Sequence[int]) -> Tensor:
        return x.permute(tuple(axes))

    def eigh(self, x: Tensor) -> tuple[Tensor, Tensor]:
        values, vectors = torch.linalg.eigh(x)
        return values, vectors

    def orthogonalize(self, x: Tensor) -> Tensor:
        q, r = torch.linalg.qr(x)
        turned = (torch.diagonal(r, dim1=-2, dim2=-1) < 0).to(q.dtype).unsqueeze(-2)
        return q * (1.0 - 2.0 * turned)

    def value_and_grad(
        self, function: Callable[..., tuple[Tensor, ...]], parameters: Sequence[Tensor]
    ) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        with torch.enable_grad():
            leaves = [parameter.detach().requires_grad_() for parameter in parameters]
            values = function(*leaves)
            gradients = torch.autograd.grad(values[0], leaves)
        return tuple(value.detach() for value in values), list(gradients)

    def to_bytes(self, x: Tensor, dtype: str) -> Tensor:
        narrow = _low_word(x) if dtype == "uint32" else x.to(_DTYPES[dtype])
        return narrow.contiguous().view(torch.uint8)

    def from_bytes(self, x: Tensor, dtype: str) -> Tensor:
        if dtype in ("int8", "uint8"):
            return x.view(_DTYPES[dtype]).to(torch.int64)
        words = dtype in ("uint32", "float32") and _whole_words(x)
        x = x if words else x.contiguous()
        if dtype == "uint32":
            return x.view(torch.int32).to(torch.int64) & _WORD
        return x.view(_DTYPES[dtype])

    def length(self, x: Tensor) -> int:
        return x.shape[-1]

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

        def tiles() -> Iterator[Tensor | _Condition]:
            for place, tile in enumerate(self._tiles(rooms, donated, given)):
                flags, settled = body(*tile)
                _write(tile, settled)
                if bound is not None:
                    block = donated[0].shape[0] // bound.shape[0]
                    flags = _Above(flags, bound[place * (_TILE // block) :], block)
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

    def _tiles(
        self, rooms: tuple[Tensor, ...], donated: tuple[Tensor, ...], given: tuple[Tensor, ...]
    ) -> Iterator[tuple[Tensor, ...]]:
        """Pieces that stay in cache; within one, `_scratch` lends memory."""
        self._lent = {}
        moved = [(room, x) for room, x in zip(rooms, donated) if room is not x]
        pieces = zip(*(x.split(_TILE) for x in (*rooms, *given)))
        sources = zip(*(x.split(_TILE) for _, x in moved)) if moved else itertools.repeat(())
        places = [i for i, (room, x) in enumerate(zip(rooms, donated)) if room is not x]
        for tile, source in zip(pieces, sources):
            for place, x in zip(places, source):
                tile[place].copy_(x)
            for dtype in self._lent:
                self._lent[dtype] = 0
            yield tile
        self._lent = None

    def _indices(self, tiles: Iterable[Tensor | _Condition]) -> Tensor:
        """Where flags are set or conditions hold, tile after tile."""
        found, scratch = [], None
        for place, flags in enumerate(tiles):
            if isinstance(flags, _Condition):
                if self.native is not None:
                    if scratch is None:
                        scratch = self._empty(_TILE, dtype=torch.int64)
                    count = flags.find(self.native, place * _TILE, scratch)
                    found.append(scratch[:count].clone())
                    continue
                assert isinstance(flags, _Above)  # the others are made only where there is C
                flags = flags.flags()
            # Eight flags are one word: few words are set, and only those are looked into.
            if flags.shape[0] % 8:
                flags = torch.nn.functional.pad(flags, (0, -flags.shape[0] % 8))
            word = flags.view(torch.int64).nonzero().view(-1)
            row, bit = flags.view(-1, 8)[word].nonzero(as_tuple=True)
            found.append(word[row].add_(place * (_TILE // 8)).mul_(8).add_(bit))
        return torch.cat(found)

    # -- shadows of composites -----------------------------------------------------------------

    def _of(self, bands: Bands) -> tuple[Any, int]:
        """The bands as C sees them."""
        if bands not in self._bands:
            numbers = [number for band in bands.bands for number in band]
            self._bands[bands] = (ctypes.c_int64 * len(numbers))(*numbers)
        return self._bands[bands], len(bands.bands)

    def sound(self, x: Tensor, how: str) -> tuple[Any, Tensor]:
        if self.kernels is None:
            return super().sound(x, how)
        return self.kernels.sound(x, how), x

    def sound_with(self, gradient: Tensor, moment: Tensor) -> tuple[Any, Tensor, Tensor]:
        if self.kernels is None:
            return super().sound_with(gradient, moment)
        return self.kernels.sound(gradient, "squares", moment), gradient, moment

    def frame(self, values: Sequence[Any], finite: Any, parts: Sequence[Tensor]) -> Tensor:
        if self.kernels is None:
            return super().frame(values, finite, parts)
        return self.kernels.frame(values, finite, parts)

    def admit(
        self,
        frames: Tensor,
        count: int,
        fields: Sequence[Field],
        expected: Sequence[Any],
        messages: Sequence[str],
        poisoned: tuple[str, type[Exception]],
        weighing: Weighing,
    ) -> Admitted:
        if self.kernels is None:
            given = frames, count, fields, expected, messages, poisoned
            return super().admit(*given, weighing)
        words, said, intact, weights = self.kernels.look(frames, expected, weighing)
        needed, held = self.kernels.split(self.stage(said))
        errors = [*[(message, PayloadError) for message in messages], poisoned, weighing.refused]
        facts = [
            ((message,), fact[None], error)
            for (message, error), fact in zip((*errors, (BEYOND, PayloadError)), held)
        ]
        self.demand(facts)
        return Admitted(words, None if self.on_host else intact, needed, weights)

    def body(self, size: int) -> Tensor:
        """Memory for bytes, before which there is room for their head, if it comes next."""
        self._headless = self._empty(_HEAD + size, dtype=torch.uint8)
        return self._headless[_HEAD:]

    def headed(self, head: Tensor, body: Tensor) -> Tensor:
        room, self._headless = self._headless, None
        if room is None or room[_HEAD:].data_ptr() != body.data_ptr() or len(head) > _HEAD:
            return super().headed(head, body)
        whole = room[_HEAD - len(head) : _HEAD + len(body)]
        whole[: len(head)] = head
        return whole

    def weigh(self, weight: float, intact: Tensor) -> Tensor:
        return torch.mul(intact, weight, out=self._empty(intact.shape))

    def checked_sides(self, sides: Sequence[Tensor], finite: Any) -> tuple[Sequence[Tensor], Any]:
        if self.kernels is None or not sides[0].numel():
            return super().checked_sides(sides, finite)
        return self.kernels.checked_sides(sides, finite)

    def key(self, step: Any, salt: int) -> Any:
        """On the device no number of it is needed: where there are kernels, two integers."""
        if self.kernels is None:
            return super().key(step, salt)
        first = _mix(_mix(step % (1 << 32)) ^ salt)
        return first, _mix(first ^ 0x9E3779B9)

    def uniform(self, key: Any, count: Any) -> Tensor:
        return super().uniform(self.words(key) if isinstance(key, tuple) else key, count)

    def leaky_relu(self, x: Tensor, slope: float) -> Tensor:
        return torch.nn.functional.leaky_relu(x, slope)

    def count(self, flags: Tensor) -> Tensor:
        if flags.shape[-1] % 8 or flags.shape[-1] > 8 * 255:
            return super().count(flags)
        # Eight flags are one word: words add up byte by byte, and then their bytes in pairs.
        total = flags.view(torch.int64).sum(-1)
        total = (total & _EVEN_BYTES) + (total >> 8 & _EVEN_BYTES)
        return (total * _EACH_PAIR >> 48) & 0xFFFF

    def accumulate_square(self, x: Tensor, y: Tensor) -> Tensor:
        if self.native is None or self._lent is None:
            return super().accumulate_square(x, y)
        self.native.accumulate_square(x.data_ptr(), y.data_ptr(), x.shape[0])
        return x

    def square_exceeds(self, x: Tensor, y: Tensor, factor: float) -> Any:
        if self.native is None or self._lent is None:
            return super().square_exceeds(x, y, factor)
        # At once: what follows in the body may write to y.
        out = self._scratch(x, torch.int64)
        assert out is not None
        pointers = (x.data_ptr(), y.data_ptr(), factor)
        count = self.native.find_exceeding(*pointers, x.shape[0], 0, out.data_ptr())
        return _Found(out[:count])

    def advance(
        self, r: Tensor, u: Tensor, gradient: Tensor, momentum: float, nesterov: bool
    ) -> tuple[Tensor, Tensor]:
        if self.native is None:
            return super().advance(r, u, gradient, momentum, nesterov)
        r, u = self.own(r), self.own(u)
        both = r.data_ptr(), u.data_ptr()
        self.native.add_momentum(*both, *both, gradient.data_ptr(), r.shape[0], momentum, nesterov)
        return r, u

    def bit_planes(self, groups: Tensor, bits: int) -> Tensor:
        if self.native is None:
            return super().bit_planes(groups, bits)
        groups = groups.contiguous()
        planes = self._empty(groups.shape[0], bits, dtype=torch.int64)
        self.native.bit_planes(groups.data_ptr(), groups.shape[0], bits, planes.data_ptr())
        return planes

    def from_bit_planes(self, planes: Tensor) -> Tensor:
        if self.native is None:
            return super().from_bit_planes(planes)
        planes = planes.contiguous()
        groups = self._empty(planes.shape[0], GROUP, dtype=torch.int64)
        self.native.from_bit_planes(planes.data_ptr(), *planes.shape, groups.data_ptr())
        return groups

    def weighted_sum(self, data: Tensor) -> Tensor:
        if self.native is None:
            return super().weighted_sum(data)
        rows = [row.contiguous() for row in data.reshape(data.shape[:-1].numel(), -1)]
        sums = [
            self.native.weighted_sum(r.data_ptr(), r.shape[0] // 4, torch.get_num_threads())
            for r in rows
        ]
        return self._given(sums, torch.int64).view(data.shape[:-1])

    def layer_histograms(self, layout: Layout, x: Tensor, bins: int) -> Tensor:
        if self.native is None:
            return super().layer_histograms(layout, x, bins)
        counts = self._empty(bins, len(layout.names), dtype=torch.int64)
        tables = (self.table(layout, name).data_ptr() for name in ("offsets", "sizes"))
        out = counts.data_ptr(), torch.get_num_threads()
        self.native.layer_histograms(*tables, len(layout.names), x.data_ptr(), bins, *out)
        return counts

    def peaks(self, x: Tensor) -> Tensor:
        if self.native is None:
            return super().peaks(x)
        (rows, length), out, x = x.shape, self._empty(x.shape[0]), _rows(x)
        numbers = [number for row in range(rows) for number in (row * x.stride(0), 1, length)]
        bands = (ctypes.c_int64 * len(numbers))(*numbers)
        self.native.group_maxima(bands, rows, x.data_ptr(), out.data_ptr(), torch.get_num_threads())
        return out

    def group_maxima(self, bands: Bands, x: Tensor) -> Tensor:
        if self.quantizers is not None:
            return self.quantizers.group_maxima(bands, x)
        if self.native is None:
            return super().group_maxima(bands, x)
        out = self._empty(bands.groups)
        self.native.group_maxima(
            *self._of(bands), x.data_ptr(), out.data_ptr(), torch.get_num_threads()
        )
        return out

    def group_norms(self, bands: Bands, x: Tensor) -> Tensor:
        if self.quantizers is None:
            return super().group_norms(bands, x)
        return self.quantizers.group_norms(bands, x)

    def clipped_maxima(self, bands: Bands, x: Tensor, clip: float) -> Tensor:
        if self.quantizers is None:
            return super().clipped_maxima(bands, x, clip)
        return self.quantizers.clipped_maxima(bands, x, clip)

    def group_squares(self, bands: Bands, x: Tensor) -> Tensor:
        if self.quantizers is not None:
            return self.quantizers.group_squares(bands, x)
        if self.native is None:
            return super().group_squares(bands, x)
        out = self._empty(bands.groups)
        given = x.data_ptr(), out.data_ptr(), torch.get_num_threads()
        _check(self.native.group_squares(*self._of(bands), *given))
        return out

    def encode_levels(
        self, bands: Bands, x: Tensor, scale: Tensor, bits: int, key: Tensor
    ) -> Tensor:
        if self.quantizers is not None:
            return self.quantizers.encode_levels(bands, x, scale, bits, key)
        if self.native is None:
            return super().encode_levels(bands, x, scale, bits, key)
        packed = self._empty(x.shape[0] * bits // 8, dtype=torch.uint8)
        self.native.encode_levels(
            *self._of(bands),
            x.data_ptr(),
            x.shape[0],
            scale.data_ptr(),
            bits,
            *key.tolist(),
            packed.data_ptr(),
            torch.get_num_threads(),
        )
        return packed

    def add_levels(
        self,
        bands: Bands,
        base: Tensor | None,
        room: Tensor,
        packed: Tensor,
        scale: Tensor,
        bits: int,
        weights: Tensor,
    ) -> Tensor:
        if self.quantizers is not None:
            return self.quantizers.add_levels(bands, base, room, packed, scale, bits, weights)
        if self.native is None:
            return super().add_levels(bands, base, room, packed, scale, bits, weights)
        room = self.room(room)
        packed, scale = _rows(packed), _rows(scale)
        self.native.add_levels(
            *self._of(bands),
            None if base is None else base.data_ptr(),
            room.data_ptr(),
            room.shape[0],
            packed.shape[0],
            packed.data_ptr(),
            packed.stride(0) // 4,
            scale.data_ptr(),
            scale.stride(0),
            bits,
            weights.data_ptr(),
            torch.get_num_threads(),
        )
        return room

    def encode_signs(self, bands: Bands, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.quantizers is not None:
            return self.quantizers.encode_signs(bands, x)
        if self.native is None:
            return super().encode_signs(bands, x)
        above, below = self._empty(2, bands.groups)
        packed = self._empty(x.shape[0] // 8, dtype=torch.uint8)
        out = (above.data_ptr(), below.data_ptr(), packed.data_ptr())
        given = x.data_ptr(), x.shape[0], *out, torch.get_num_threads()
        _check(self.native.encode_signs(*self._of(bands), *given))
        return above, below, packed

    def add_signs(
        self,
        bands: Bands,
        base: Tensor | None,
        room: Tensor,
        packed: Tensor,
        above: Tensor,
        below: Tensor,
        weights: Tensor,
    ) -> Tensor:
        if self.quantizers is not None:
            return self.quantizers.add_signs(bands, base, room, packed, above, below, weights)
        if self.native is None:
            return super().add_signs(bands, base, room, packed, above, below, weights)
        room = self.room(room)
        packed, above, below = _rows(packed), above.contiguous(), below.contiguous()
        self.native.add_signs(
            *self._of(bands),
            None if base is None else base.data_ptr(),
            room.data_ptr(),
            room.shape[0],
            packed.shape[0],
            packed.data_ptr(),
            packed.stride(0) // 4,
            above.data_ptr(),
            below.data_ptr(),
            above.stride(0),
            weights.data_ptr(),
            torch.get_num_threads(),
        )
        return room

    def _empty(self, *shape: Any, dtype: torch.dtype = torch.float32) -> Tensor:
        """For C to write to, whatever PyTorch's defaults of device and dtype are."""
        return torch.empty(*shape, dtype=dtype, device=self.device)

    def _scratch(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor | None:
        """Memory for a temporary of one tile, lent until the next tile.

        Fresh memory of this size goes back to the system when it is freed, and taking it again
        costs more (page faults) than the arithmetic. None outside of tiles.
        """
        if self._lent is None:
            return None
        dtype = dtype or x.dtype
        used = self._lent.get(dtype, 0)
        self._lent[dtype] = used + 1
        pool = self._pool.setdefault(dtype, [])
        if used == len(pool):
            pool.append(self._empty(_TILE, dtype=dtype))
        size = x.shape[0]
        return pool[used] if size == _TILE else pool[used][:size]

    def cond(self, dense: bool, if_true: Callable[[], Any], if_false: Callable[[], Any]) -> Any:
        return if_true() if dense else if_false()

    def map_bytes(self, function: Callable[[bytes], bytes], data: Tensor) -> Tensor:
        result = function(data.cpu().contiguous().numpy().tobytes())
        return torch.frombuffer(bytearray(result), dtype=torch.uint8).to(self.device)

    def warn(self, condition: Any, message: str) -> None:
        if condition:
            LOGGER.warning("%s", message)

    def stage(self, x: Tensor) -> Tensor:
        if not x.is_cuda:
            return x
        copy = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True)
        copy.copy_(x, non_blocking=True)
        self._copied = torch.cuda.Event()
        self._copied.record(torch.cuda.current_stream(x.device))
        return copy

    def staged(self, x: Tensor) -> int:
        if self._copied is not None:
            self._copied.synchronize()
            self._raise_pending()
        return int(x)

    def pick(self, condition: bool, x: int, y: int) -> int:
        return x if condition else y

    def bisect(self, ascending: Sequence[int], x: int) -> int:
        return bisect_left(ascending, x)

    def choice(self, values: Sequence[int], index: int) -> int:
        return values[index]

    def require(
        self, facts: Mapping[str, Tensor], error: type[Exception] = PayloadError
    ) -> Tensor | None:
        known = tuple(facts.values())
        held = torch.stack(known) if len(known) > 1 else known[0][None]  # [facts, world]
        if self.on_host:
            _raise_false(tuple(facts), held, error)
            return None
        self._pending.append((tuple(facts), self.stage(held), error))
        return held.all(0) if len(known) > 1 else known[0]

    def demand(self, facts: Iterable[tuple[Sequence[str], Tensor, type[Exception]]]) -> None:
        """As `require`, of facts that are staged: messages, bool [messages, world], the error."""
        if not self.on_host:
            self._pending += facts
            return
        for fact in facts:
            _raise_false(*fact)

    def found_finite(self) -> bool:
        self.raise_found()
        return True

    def _raise_pending(self) -> None:
        pending, self._pending = self._pending, []
        for messages, held, error in pending:
            _raise_false(messages, held, error)


def _triton_loads(device: torch.device) -> bool:
    """Whether kernels can be had for a device; loading Triton after TensorFlow ends the process."""
    if device.type != "cuda" or "triton" in sys.modules:
        return device.type == "cuda"
    return "tensorflow" not in sys.modules and importlib.util.find_spec("triton") is not None


def _mix(x: int) -> int:
    """`Composites.mix` of one number."""
    for _ in range(2):
        x = (x ^ x >> 16) * _FACTOR % (1 << 32)
    return x ^ x >> 16


def _place(x: Tensor) -> int:
    """Where the memory of a tensor begins, or of what it is a view of."""
    return x.untyped_storage().data_ptr()


class _Condition(ABC):
    """A condition on a tile, not looked at yet: indices are found without forming flags."""

    def __and__(self, other: _Greater | _Both) -> _Both:
        return _Both(self, other)

    @abstractmethod
    def find(self, native: Any, base: int, out: Tensor) -> int:
        """Writes the indices, from base on, and returns how many."""


class _Greater(_Condition):
    """`x > y`."""

    def __init__(self, x: Tensor, y: Any) -> None:
        self.x, self.y = x, y

    def at(self, index: Tensor) -> Tensor:
        """As bool, at some indices."""
        y = self.y[index] if isinstance(self.y, torch.Tensor) else self.y
        return self.x[index] > y

    def find(self, native: Any, base: int, out: Tensor) -> int:
        x, size, room = self.x.data_ptr(), self.x.shape[0], out.data_ptr()
        if isinstance(self.y, torch.Tensor):
            return int(native.find_greater(x, self.y.data_ptr(), size, base, room))
        return int(native.find_beyond(x, self.y, size, base, room))


class _Found(_Condition):
    """Where a condition held when it was looked at."""

    def __init__(self, index: Tensor) -> None:
        self.index = index

    def find(self, native: Any, base: int, out: Tensor) -> int:
        count = self.index.shape[0]
        torch.add(self.index, base, out=out[:count])
        return count


class _Both(_Condition):
    """The first condition, and the second where the first holds."""

    def __init__(self, first: _Condition, second: _Greater | _Both) -> None:
        self.first, self.second = first, second

    def at(self, index: Tensor) -> Tensor:
        """As bool, at some indices."""
        assert isinstance(self.first, (_Greater, _Both))
        return self.first.at(index) & self.second.at(index)

    def find(self, native: Any, base: int, out: Tensor) -> int:
        index = out[: self.first.find(native, 0, out)]
        kept = index[self.second.at(index)]
        out[: kept.shape[0]] = kept + base
        return kept.shape[0]


class _Above(_Condition):
    """`|x| >= bound` of the block, and x is not 0."""

    def __init__(self, x: Tensor, bound: Tensor, block: int) -> None:
        self.x, self.bound, self.block = x, bound, block

    def flags(self) -> Tensor:
        """As bool."""
        magnitude = self.x.abs().view(-1, self.block)
        bounds = self.bound[: magnitude.shape[0], None]
        return ((magnitude >= bounds) & (magnitude > 0)).view(-1)

    def find(self, native: Any, base: int, out: Tensor) -> int:
        x, size, bound = self.x.data_ptr(), self.x.shape[0], self.bound.data_ptr()
        return int(native.find_above(x, size, bound, self.block, base, out.data_ptr()))


def _whole_words(x: Tensor) -> bool:
    """Whether bytes can be looked at as words of 32 bits where they lie."""
    return x.stride(-1) == 1 and not any(n % 4 for n in (*x.stride()[:-1], x.storage_offset()))


def _rows(x: Tensor) -> Tensor:
    """With rows that C can walk: neighbours adjacent, rows a multiple of 4 bytes apart."""
    apart = x.stride(0) * x.element_size(), x.storage_offset() * x.element_size()
    aligned = x.stride(1) == 1 and not any(number % 4 for number in apart)
    return x if aligned else x.contiguous()


def _in_range(failed: int) -> None:
    if failed:
        raise PayloadError("an index points outside of its bucket: a payload is damaged")


def _check(failed: int) -> None:
    if failed:
        raise MemoryError("no memory to compress a layer with")


def _write(tile: tuple[Tensor, ...], settled: tuple[Tensor, ...]) -> None:
    """What a body returns goes where its arguments came from."""
    for old, new in zip(tile, settled):
        if new is not old:
            old.copy_(new)


def _low_word(x: Tensor) -> Tensor:
    """The low 32 bits of int64 in [0, 2**32) as int32: a narrowing cast is modulo 2**32."""
    return x.to(torch.int32)


def _raise_false(messages: Sequence[str], held: Tensor, error: type[Exception]) -> None:
    """Raises the first message that does not hold for all ranks; held is [messages, world]."""
    if bool(held.all()):
        return
    for message, fact in zip(messages, held):
        if not bool(fact.all()):
            ranks = (~fact).nonzero().view(-1).tolist()
            raise error(message.replace("{ranks}", ", ".join(map(str, ranks))))
