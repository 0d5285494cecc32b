"""Codes for the ascending indices of sent elements: a fixed payload size for a given capacity.

`elias_fano` takes at most `log2(n/k) + 2` bits for each of k indices below n, whatever they are;
random ones need at least about `log2(n/k) + 1.44`. `int32` takes 32 bits.

Methods and fused kernels write plain words, an index each, maybe below a code of a few bits;
`encode_body` and `decode_bodies` translate these in one pass.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hvd_gradcomp.codecs.elias_fano import EliasFano, low_bits
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.method.wire import Part
from hvd_gradcomp.ops import Ops, Tensor


class Words(NamedTuple):
    """Words at the end of a body, each an ascending index below a code; unused ones are sinks.

    Attributes:
        side: bytes before the words.
        count: number of words; an integer, or a scalar of a graph.
        counts: the possible ones, ascending.
        sink: the largest index.
        bits: of a code; 0 if words are indices.
    """

    side: Any
    count: Any
    counts: Sequence[int]
    sink: int
    bits: int = 0

    def form(self, ops: Ops) -> tuple[Any, Any, Any, Any, int, int]:
        """Return side, count, low bits, width, universe and bits; see `Ops.encode_words`."""
        low = low_bits(self.count, self.sink) if isinstance(self.count, int) else self._low(ops)
        code = EliasFano(1, self.count, self.sink, low)
        return self.side, self.count, code.low, code.width, code.universe, self.bits

    def _low(self, ops: Ops) -> Any:
        low = [low_bits(count, self.sink) for count in (*self.counts, 1)]
        return ops.choice(low, ops.bisect(self.counts, self.count))


class IndexCoding(ABC):
    """Code of fixed size for ascending indices of one bucket, which may end in sinks."""

    @abstractmethod
    def parts(self, layout: Layout, count: int) -> dict[str, Part]:
        """Return the payload parts for so many indices."""

    @abstractmethod
    def bits(self, size: int, count: int) -> float:
        """Return the bits for each of `count` indices into `size` elements of a bucket."""

    @abstractmethod
    def encode(self, ops: Ops, layout: Layout, index: Tensor) -> dict[str, Tensor]:
        """Return the parts for ascending indices; int64 [count]."""

    @abstractmethod
    def decode(self, ops: Ops, layout: Layout, payload: Mapping[str, Tensor], count: int) -> Tensor:
        """Decode one rank's parts to indices; int64 [count]."""

    @abstractmethod
    def encode_body(self, ops: Ops, words: Words, body: Tensor) -> Tensor:
        """Return the body that travels instead of one that ends in words; uint8."""

    @abstractmethod
    def decode_bodies(self, ops: Ops, words: Words, bodies: Tensor) -> tuple[Tensor, Tensor | None]:
        """Invert `encode_body` of each row; uint8 [world, side + 4 * count].

        And return whose indices ascend, bool [world]; None if the code does not tell.
        """


class Plain(IndexCoding):
    """Plain code: 32 bits for each index."""

    def parts(self, layout: Layout, count: int) -> dict[str, Part]:
        del layout
        return {"index": Part("uint32", count)}

    def bits(self, size: int, count: int) -> float:
        del size, count
        return 32.0

    def encode(self, ops: Ops, layout: Layout, index: Tensor) -> dict[str, Tensor]:
        del ops, layout
        return {"index": index}

    def decode(self, ops: Ops, layout: Layout, payload: Mapping[str, Tensor], count: int) -> Tensor:
        del ops, layout, count
        return payload["index"]

    def encode_body(self, ops: Ops, words: Words, body: Tensor) -> Tensor:
        del ops, words
        return body

    def decode_bodies(self, ops: Ops, words: Words, bodies: Tensor) -> tuple[Tensor, Tensor | None]:
        del ops, words
        return bodies, None


class EliasFanoCoding(IndexCoding):
    """Elias-Fano code; see `codecs.elias_fano`."""

    def parts(self, layout: Layout, count: int) -> dict[str, Part]:
        return EliasFano.of(1, count, layout.sink).parts()

    def bits(self, size: int, count: int) -> float:
        code = EliasFano.of(1, count, size)  # of a layer: the bucket's is padded once for all
        return float(code.low + code.width / count)

    def encode(self, ops: Ops, layout: Layout, index: Tensor) -> dict[str, Tensor]:
        code = EliasFano.of(1, index.shape[0], layout.sink)
        return code.encode(ops, ops.reshape(index, (1, -1)))

    def decode(self, ops: Ops, layout: Layout, payload: Mapping[str, Tensor], count: int) -> Tensor:
        code = EliasFano.of(1, count, layout.sink)
        return ops.reshape(code.decode(ops, payload), (count,))

    def encode_body(self, ops: Ops, words: Words, body: Tensor) -> Tensor:
        return ops.encode_words(body, *words.form(ops))

    def decode_bodies(self, ops: Ops, words: Words, bodies: Tensor) -> tuple[Tensor, Tensor | None]:
        return ops.decode_words(bodies, *words.form(ops))


CODINGS: dict[str, IndexCoding] = {"elias_fano": EliasFanoCoding(), "int32": Plain()}
