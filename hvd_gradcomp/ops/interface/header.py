"""Frames around payloads, and checks of their content.

A frame is some 32-bit words, a checksum of them and of the body, and the body.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from hvd_gradcomp.ops.errors import PayloadError
from hvd_gradcomp.ops.interface.bitpack import BitPacking
from hvd_gradcomp.ops.interface.host import HostControl
from hvd_gradcomp.ops.interface.matrices import Matrices
from hvd_gradcomp.ops.tensors import Tensor

BEYOND = (
    "rank {ranks} sent an index that points outside of its bucket, or does not ascend: "
    "a payload is damaged"
)


class Field(NamedTuple):
    """Bit field in the words of a frame: the word, its first bit, the number of bits."""

    word: int
    low: int = 0
    bits: int = 32


class ReductionSpec(NamedTuple):
    """Weights of payloads in a sum, and conditions on their bodies.

    A body may begin with magnitudes by group that no sent value exceeds. Their sum over ranks,
    times the weight, must not exceed the limit.

    Attributes:
        weight: of each payload.
        groups: their number.
        vectors: of magnitudes: of two the larger counts.
        powers: magnitudes are exponents of powers of two, int8; else float32.
        limit: of the sum.
        refused: message and error if the sum exceeds it.
        ascending: the first word of the indices, their number, the mask of an index in a word, and
            the number of elements that they may point to; the last element may repeat. Without
            kernels, `add_at` checks the range.
    """

    weight: float = 1.0
    groups: int = 0
    vectors: int = 0
    powers: bool = False
    limit: float = 0.0
    refused: tuple[str, type[Exception]] = ("", Exception)
    ascending: tuple[int, int, int, int] | None = None


class CheckedFrames(NamedTuple):
    """Content of frames that `Headers.validate_headers` has checked.

    Attributes:
        words: int64 [rows], for each word of a frame.
        intact: result of `Ops.require` for all facts together.
        needed: the most elements that a rank wanted, on the host; None if not read.
        weights: of each row, float32 [rows]; None if `weigh` computes them.
    """

    words: Sequence[Tensor]
    intact: Any
    needed: Any = None
    weights: Tensor | None = None


class Headers(BitPacking, Matrices, HostControl):
    """Ops for frames around payloads, and for checks of their content."""

    def frame(self, values: Sequence[Any], finite: Any, parts: Sequence[Tensor]) -> Tensor:
        """Build a frame: words, checksum and a body in parts (uint8, whole words), as uint8.

        The words are the values below 2**32, and a last word: 0 if `finite`, else 1.
        """
        if self.native is not None:
            words = self.listed_words(values, finite)
            return self._framed(self.numbers(words), len(words), parts)
        body = self.concat(parts) if len(parts) > 1 else parts[0]
        return self.framed(self.head_words(values, finite), body)

    def frames(
        self, values: Sequence[Any], finite: Any, bodies: Sequence[Sequence[Tensor]]
    ) -> Tensor:
        """Build frames of equal words around bodies of one length, in as many parts each."""
        if self.native is not None:
            words = self.listed_words(values, finite)
            size = 4 * (len(words) + 1) + sum(self.extent(part.shape[0]) for part in bodies[0])
            inputs = self.numbers(words), *(part for body in bodies for part in body)
            outputs = (self.empty((len(bodies), size), "uint8"),)
            return self.native("frame", inputs, outputs, (len(bodies),))
        return self.stack([self.frame(values, finite, parts) for parts in bodies])

    def head_words(self, values: Sequence[Any], finite: Any) -> Tensor:
        """Return the words of a frame."""
        return self.words(self.listed_words(values, finite))

    def listed_words(self, values: Sequence[Any], finite: Any) -> list[Any]:
        """Return the words of a frame, each by itself."""
        poisoned = int(not finite) if isinstance(finite, bool) else 1 - self.cast(finite, "int64")
        return [*values, poisoned]

    def framed(self, words: Tensor, body: Tensor) -> Tensor:
        """Build a frame from int64 words and a body."""
        if self.native is not None:
            return self._framed(words, self.extent(words.shape[0]), (body,))
        checksum = self.reshape(self.checksum(words, body), (1,))
        return self.headed(self.to_bytes(self.concat((words, checksum)), "uint32"), body)

    def _framed(self, words: Any, count: Any, parts: Sequence[Tensor]) -> Tensor:
        """Build a frame of so many words by the kernel; in place if the last part is a `body`."""
        sizes = [self.extent(part.shape[0]) for part in parts]
        front = 4 * (count + 1) + sum(sizes[:-1])
        out = self.before(parts[-1], front)
        if out is None:
            out = self.empty((front + sizes[-1],), "uint8")
        return self.native("frame", (words, *parts), (out,), (0,))

    def headed(self, head: Tensor, body: Tensor) -> Tensor:
        """Concatenate head and body."""
        return self.concat((head, body))

    def examine(
        self, frames: Tensor, count: int, fields: Sequence[Field], expected: Sequence[Any]
    ) -> tuple[Sequence[Tensor], list[Tensor]]:
        """Read frames and compare their fields with the expected numbers.

        Args:
            frames: uint8 [rows, bytes].
            count: number of words in a frame.
            fields: positions of numbers within the words.
            expected: the numbers, each an integer or a scalar.

        Returns:
            The words, int64 [rows] each. And bool [rows], whether the checksum matches, and then
            for each field, whether its number is as expected.

        Raises:
            PayloadError: frames are shorter than their words, or no whole words.
        """
        if self.native is not None:
            words, intact = self._examined(frames, count, fields, expected)
            return self.columns(words, count), self.each_row(intact, 1 + len(fields))
        front = self.from_bytes(frames[:, : 4 * (count + 1)], "uint32")
        words, numbers = front[:, :count], self.words(expected)
        checks = [front[:, count] == self.checksum(words, frames[:, 4 * (count + 1) :])]
        for i, (word, low, bits) in enumerate(fields):
            checks.append(words[:, word] // (1 << low) % (1 << bits) == numbers[i])
        return self.columns(words, count), checks

    def _examined(
        self, frames: Tensor, count: int, fields: Sequence[Field], expected: Sequence[Any]
    ) -> tuple[Tensor, Tensor]:
        """Return what `examine` does by the C library: [rows, count], and bool [facts, rows]."""
        ranks, size = frames.shape
        if isinstance(size, int) and (size % 4 or size < 4 * (count + 1)):
            raise PayloadError(f"a frame has {size} bytes: a payload is damaged")
        outputs = self.empty((ranks, count), "int64"), self.empty((1 + len(fields), ranks), "bool")
        numbers = self.numbers([number for field in fields for number in field])
        inputs = self.rows(frames), numbers, self.numbers(expected)
        words, intact = self.native("examine", inputs, outputs, (count,))
        return words, intact

    def columns(self, x: Tensor, count: int) -> Sequence[Tensor]:
        """Return the columns of a matrix that has so many."""
        return [x[:, i] for i in range(count)]

    def each_row(self, x: Tensor, count: int) -> list[Tensor]:
        """Return the rows of a matrix that has so many."""
        return [x[i] for i in range(count)]

    def validate_headers(
        self,
        frames: Tensor,
        count: int,
        fields: Sequence[Field],
        expected: Sequence[Any],
        messages: Sequence[str],
        poisoned: tuple[str, type[Exception]],
        spec: ReductionSpec,
    ) -> CheckedFrames:
        """Require that frames are as `examine` expects them, and that their last word is 0.

        Args:
            frames, count, fields, expected: of `examine`.
            messages: an error message for each check of `examine`.
            poisoned: message and error if the last word is not 0.
            spec: further conditions.
        """
        words, checks = self.examine(frames, count, fields, expected)
        intact = self.require(dict(zip(messages, checks)))
        facts = [(poisoned, words[count - 1] == 0)]
        if spec.vectors:
            sides = self._sides(frames[:, 4 * (count + 1) :], spec)
            fits = self.summable(sides, spec.weight, spec.limit)
            facts.append((spec.refused, fits))
        for (message, error), fact in facts:
            known = self.require({message: fact}, error)
            intact = None if known is None else intact & known
        return CheckedFrames(words, intact)

    def weigh(self, weight: float, intact: Tensor) -> Tensor:
        """Return the weight where a rank's payload is intact, else 0; float32 [world]."""
        return self.cast(intact, "float32") * weight

    def checked_sides(self, sides: Sequence[Tensor], finite: Any) -> tuple[Sequence[Tensor], Any]:
        """Return side values, and whether 4 times these are finite and `finite` holds.

        With static shapes, all side values become 0 if one fails. Donating.
        """
        healthy = self.finite(self.concat(sides) * 4.0)
        if not self.dynamic_shapes:
            sides = [self.where(healthy, side, 0.0) for side in sides]
        return sides, finite & healthy

    def summable(self, sides: Sequence[Tensor], weight: float, limit: float) -> Tensor:
        """Return True if `weight * sum over ranks of the largest |side|` of each group fits limit.

        Args:
            sides: float32 [world, groups] each.
            weight: of all.
            limit: a number.

        Returns:
            bool [1].
        """
        peaks = self.abs(sides[0])
        for side in sides[1:]:
            peaks = self.maximum(peaks, self.abs(side))
        total = self.max(self.sum(self.cast(peaks, "float64"), 0)) * weight
        return self.reshape(total, (1,)) <= limit

    def checksum(self, words: Tensor, body: Tensor) -> Tensor:
        """Return the checksum of words (weights 2 * index + 1) and a body, or of rows of both."""
        weights = self.arange(self.length(words)) * 2 + 1
        return (self.sum(words * weights, -1) + self.weighted_sum(body)) % (1 << 32)

    def check_finite(self, x: Tensor, how: str) -> tuple[Any, Tensor]:
        """Return whether x is finite, and x; with static shapes, zeros unless it is finite.

        Donating with static shapes.

        Args:
            x: float32 [size].
            how: "elements" checks each; "squares" and "sum" check 4096 times their sum.
        """
        if self.native is not None and how != "elements" and self.traversable(x):
            return self.native("sum_finite", (x,), (self.flag(),), (how == "squares",)), x
        if how == "elements":
            finite = self.finite(x)
        else:
            total = self.inner(x, x) if how == "squares" else self.sum(x)
            finite = self.finite(total * 4096.0)
        return finite, x if self.dynamic_shapes else self.where(finite, x, 0.0)

    def check_finite_with(self, gradient: Tensor, moment: Tensor) -> tuple[Any, Tensor, Tensor]:
        """Check a gradient's squares and its moment's sum; one verdict for both."""
        finite, gradient = self.check_finite(gradient, "squares")
        fine, moment = self.check_finite(moment, "sum")
        return finite & fine, gradient, moment

    def accumulate_largest_checked(
        self, x: Tensor, factor: float, y: Tensor, length: int, k: int
    ) -> tuple[Any, Tensor, Tensor, Tensor]:
        """Check the squares of y by `check_finite`, and return `accumulate_largest` behind that."""
        if self.native is not None:
            outputs = self.writable(y), *self._chosen_of_rows(x, length, k), self.flag()
            total, index, values, finite = self.native(
                "accumulate_largest", (x, y), outputs, (length, k), (factor,)
            )
            return finite, total, index, values
        finite, y = self.check_finite(y, "squares")
        return (finite, *self.accumulate_largest(x, factor, y, length, k))

    def _sides(self, bodies: Tensor, spec: ReductionSpec) -> list[Tensor]:
        """Return the magnitudes at the start of bodies; float32 [rows, groups] each."""
        groups = spec.groups
        if spec.powers:
            return [
                self.bits_float((self.from_bytes(bodies[:, :groups], "int8") + 127) * (1 << 23))
            ]
        cuts = [4 * groups * vector for vector in range(spec.vectors + 1)]
        return [self.from_bytes(bodies[:, a:b], "float32") for a, b in zip(cuts, cuts[1:])]
