"""Frames around payloads, and what is looked at in them.

A frame is some 32-bit words, a checksum of them and of the body, and the body.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from hvd_gradcomp.ops.tensors import Tensor

BEYOND = (
    "rank {ranks} sent an index that points outside of its bucket, or does not ascend: "
    "a payload is damaged"
)


class Field(NamedTuple):
    """A number within the words of a frame: which word, from which bit, of how many bits."""

    word: int
    low: int = 0
    bits: int = 32


class Weighing(NamedTuple):
    """What payloads count for in a sum, and what must hold of their bodies.

    A body may begin with magnitudes that nothing sent exceeds, by groups. Their sum over ranks,
    times the weight, must not exceed the limit.

    Attributes:
        weight: of each payload.
        groups: how many.
        vectors: of magnitudes: of two the larger counts.
        powers: they are exponents of powers of two, int8; else float32.
        limit: of the sum.
        refused: message and error where it is exceeded.
        ascending: the first word of indices, how many, their bits in a word, and how many elements
            they may point to; those of the last may repeat. Of verbs, `add_at` knows that.
    """

    weight: float = 1.0
    groups: int = 0
    vectors: int = 0
    powers: bool = False
    limit: float = 0.0
    refused: tuple[str, type[Exception]] = ("", Exception)
    ascending: tuple[int, int, int, int] | None = None


class Admitted(NamedTuple):
    """What `Framing.admit` has read.

    Attributes:
        words: int64 [rows, count].
        intact: what `Ops.require` gives of all facts together.
        needed: the most elements that a rank wanted, on the host; None where nobody looked.
        weights: what each row counts for, float32 [rows]; None for `weigh` to say.
    """

    words: Tensor
    intact: Any
    needed: Any = None
    weights: Tensor | None = None


class Framing:
    """Frames around payloads, and what is looked at in them."""

    def frame(self: Any, values: Sequence[Any], finite: Any, parts: Sequence[Tensor]) -> Tensor:
        """Words, checksum and a body in parts (uint8, whole words) as uint8.

        The words are values below 2**32, and 1 unless something was finite, or else 0.
        """
        poisoned = int(not finite) if isinstance(finite, bool) else 1 - self.cast(finite, "int64")
        body = self.concat(parts) if len(parts) > 1 else parts[0]
        return self.framed(self.words((*values, poisoned)), body)

    def framed(self: Any, words: Tensor, body: Tensor) -> Tensor:
        """The same of int64 words."""
        checksum = self.reshape(self.checksum(words, body), (1,))
        return self.headed(self.to_bytes(self.concat((words, checksum)), "uint32"), body)

    def headed(self: Any, head: Tensor, body: Tensor) -> Tensor:
        """One after the other."""
        return self.concat((head, body))

    def examine(
        self: Any, frames: Tensor, count: int, fields: Sequence[Field], expected: Sequence[Any]
    ) -> tuple[Tensor, list[Tensor]]:
        """What frames say, and what is right about it.

        Args:
            frames: uint8 [rows, bytes].
            count: of the words of a frame.
            fields: places of numbers within the words.
            expected: the numbers, each an integer or a scalar.

        Returns:
            The words, int64 [rows, count]. And bool [rows], whether the checksum matches, and then
            for each field, whether its number is as expected.
        """
        front = self.from_bytes(frames[:, : 4 * (count + 1)], "uint32")
        words, numbers = front[:, :count], self.words(expected)
        held = [front[:, count] == self.checksum(words, frames[:, 4 * (count + 1) :])]
        for i, (word, low, bits) in enumerate(fields):
            held.append(words[:, word] // (1 << low) % (1 << bits) == numbers[i])
        return words, held

    def admit(
        self: Any,
        frames: Tensor,
        count: int,
        fields: Sequence[Field],
        expected: Sequence[Any],
        messages: Sequence[str],
        poisoned: tuple[str, type[Exception]],
        weighing: Weighing,
    ) -> Admitted:
        """Requires that frames are as `examine` expects them, and that their last word is 0.

        Args:
            frames, count, fields, expected: of `examine`.
            messages: for what is wrong, of each that `examine` looks at.
            poisoned: message and error where the last word is not 0.
            weighing: what else must hold.
        """
        words, held = self.examine(frames, count, fields, expected)
        intact = self.require(dict(zip(messages, held)))
        facts = [(poisoned, words[:, count - 1] == 0)]
        if weighing.vectors:
            sides = self._sides(frames[:, 4 * (count + 1) :], weighing)
            fits = self.summable(sides, weighing.weight, weighing.limit)
            facts.append((weighing.refused, fits))
        for (message, error), fact in facts:
            known = self.require({message: fact}, error)
            intact = None if known is None else intact & known
        return Admitted(words, intact)

    def weigh(self: Any, weight: float, intact: Tensor) -> Tensor:
        """The weight where a rank's payload is intact, else 0; float32 [world]."""
        weights = self.full((intact.shape[0],), weight, "float32")
        return weights * self.cast(intact, "float32")

    def checked_sides(
        self: Any, sides: Sequence[Tensor], finite: Any
    ) -> tuple[Sequence[Tensor], Any]:
        """Side values, and whether these times 4 are finite and something else was.

        Zeros instead of all where that is known too late to leave them out. Donating.
        """
        healthy = self.finite(self.concat(sides) * 4.0)
        if not self.dynamic_shapes:
            sides = [self.where(healthy, side, 0.0) for side in sides]
        return sides, finite & healthy

    def summable(self: Any, sides: Sequence[Tensor], weight: float, limit: float) -> Tensor:
        """Whether `weight * sum over ranks of the largest |side|` of a group is beyond no limit.

        Args:
            sides: float32 [world, groups] each.
            weight: of all.
            limit: a number.

        Returns:
            bool [1].
        """
        most = self.abs(sides[0])
        for side in sides[1:]:
            most = self.maximum(most, self.abs(side))
        total = self.max(self.sum(self.cast(most, "float64"), 0)) * weight
        return self.reshape(total, (1,)) <= limit

    def checksum(self: Any, words: Tensor, body: Tensor) -> Tensor:
        """Of words, each times 2 * place + 1, and a body; or of rows of both."""
        weights = self.arange(self.length(words)) * 2 + 1
        return (self.sum(words * weights, -1) + self.weighted_sum(body)) % (1 << 32)

    def sound(self: Any, x: Tensor, how: str) -> tuple[Any, Tensor]:
        """Whether x is finite; and x, or zeros where that is known too late to leave it out.

        Donating where shapes are static.

        Args:
            x: float32 [size].
            how: "elements" asks for each; "squares" and "sum" for 4096 times their sum.
        """
        if how == "elements":
            finite = self.finite(x)
        else:
            total = self.inner(x, x) if how == "squares" else self.sum(x)
            finite = self.finite(total * 4096.0)
        return finite, x if self.dynamic_shapes else self.where(finite, x, 0.0)

    def sound_with(self: Any, gradient: Tensor, moment: Tensor) -> tuple[Any, Tensor, Tensor]:
        """`sound` of a gradient's squares and of the sum of its moment: of both, and each."""
        finite, gradient = self.sound(gradient, "squares")
        fine, moment = self.sound(moment, "sum")
        return finite & fine, gradient, moment

    def _sides(self: Any, bodies: Tensor, weighing: Weighing) -> list[Tensor]:
        """The magnitudes that bodies begin with; float32 [rows, groups] each."""
        groups = weighing.groups
        if weighing.powers:
            return [
                self.bits_float((self.from_bytes(bodies[:, :groups], "int8") + 127) * (1 << 23))
            ]
        cuts = [4 * groups * vector for vector in range(weighing.vectors + 1)]
        return [self.from_bytes(bodies[:, a:b], "float32") for a, b in zip(cuts, cuts[1:])]
