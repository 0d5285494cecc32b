"""What the ranks tell each other before an exchange ends, and what follows from it.

An exchange ends with backward, so that what is done to gradients before the optimizer steps is done
to reduced ones. No rank may wait there for a gradient that another rank will not have: it may lack
a layer in this step, get it in a second backward, or have called `step` already. So ranks that are
at the end of a backward, or in `step`, first tell each other what they have: four numbers, and one
more for each layer where a rank lacks something. All that follows comes from all ranks' words
alone, so all ranks come to the same conclusion:

- The exchange ends in the first round, with zeros for what a rank lacks. It waits for another round
  only if a rank that is not in `step` lacks a layer that came to it too late in the last step.
- A gradient that comes after the end is late: it is added up as it is, and awaited from then on.
- As long as a rank may have late ones, `step` begins with a round.
- A rank that has called `hvd.join()` lacks nothing, and what it says of itself does not count: it
  takes part with zeros and what its compressor keeps. Where gradients are only added up it says
  nothing: Horovod lets it add zeros.
- A layer that no rank has used has no gradient, if nothing that was kept has arrived for it.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from hvd_gradcomp.monitoring import verify
from hvd_gradcomp.ops import PayloadError

# What a rank says of a layer, added up.
HERE = 1  # its gradient has been taken
SPARSE = 2  # and is sparse
LATE = 4  # it came after the exchange had ended
CHANGED = 8  # somebody has changed it since it was taken or reduced

_KIND = HERE | SPARSE
_LAST, _ENDED, _PLAIN, _SPEAKS, _TOLD, _JOINED = 1, 2, 4, 8, 16, 32


class OutOfStepError(RuntimeError):
    """The ranks are not at the same place of the same step."""


class GradientChangedError(RuntimeError):
    """A gradient was changed where that cannot be honoured on all ranks."""


class SyncMessage(NamedTuple):
    """What one rank tells.

    Attributes:
        step: exchanges before this one.
        last: this rank is in `step` or `synchronize`: it has no more gradients to come.
        ended: the exchange of this step has ended.
        layers: a code for each layer.
        settings: a digest of what has to be equal on all ranks in this step; 0 before it begins.
        summed: a digest of what was added up in the exchange before, below 2**31; 0 for none.
        told: this rank has told that it waits, and not all have; see `deadlock`.
        joined: the rank has joined, and has no gradients of its own any more.
    """

    step: int
    last: bool
    ended: bool
    layers: Sequence[int]
    settings: int = 0
    summed: int = 0
    told: bool = False
    joined: bool = False

    def head(self, sparse: Collection[int] = ()) -> list[int]:
        """What always travels, four numbers below 2**31.

        Args:
            sparse: layers whose gradients all ranks know to be sparse.
        """
        plain = tuple(self.layers) == usual(len(self.layers), sparse)
        flags = _LAST * self.last + _ENDED * self.ended + _PLAIN * plain + _TOLD * self.told
        flags += _JOINED * self.joined
        return [_SPEAKS + flags, self.step % 2**31, self.settings, self.summed]

    def absent(self) -> list[int]:
        """Layers whose gradient has not been taken."""
        return [i for i, code in enumerate(self.layers) if not code & (HERE | LATE)]


def digest_of(settings: Mapping[str, str]) -> int:
    """A number below 2**31 for what has to be equal on all ranks in a step; 0 for nothing."""
    return zlib.crc32(repr(sorted(settings.items())).encode()) & 0x7FFFFFFF if settings else 0


def usual(layers: int, sparse: Collection[int]) -> tuple[int, ...]:
    """The codes of a rank that has everything, and nothing more to say."""
    return tuple(HERE | SPARSE * (layer in sparse) for layer in range(layers))


def read(heads: Sequence[Sequence[int]], layers: Sequence[Sequence[int]]) -> list[SyncMessage]:
    """The words of all ranks.

    Args:
        heads: theirs.
        layers: their codes; where all are plain, the usual ones.
    """
    words = []
    for (flags, step, settings, summed), codes in zip(heads, layers):
        if flags & _SPEAKS:
            last, ended, joined = (bool(flags & bit) for bit in (_LAST, _ENDED, _JOINED))
            words.append(
                SyncMessage(step, last, ended, tuple(codes), settings, summed, joined=joined)
            )
        else:
            words.append(SyncMessage(0, True, True, (HERE,) * len(codes), joined=True))
    return words


def all_plain(heads: Sequence[Sequence[int]]) -> bool:
    """Whether no rank has anything to say of its layers."""
    return all(flags & _PLAIN or not flags & _SPEAKS for flags, *_ in heads)


def any_told(heads: Sequence[Sequence[int]]) -> bool:
    """Whether a rank has told that it waits, and not all have."""
    return any(flags & _TOLD for flags, *_ in heads)


def all_set_alike(heads: Sequence[Sequence[int]]) -> bool:
    """Whether what has to be equal in a step is so on all ranks that have begun it."""
    return len({settings for flags, _, settings, _ in heads if flags & _SPEAKS and settings}) < 2


def changed_alone(name: str, rank: int) -> str:
    """What is wrong where only some ranks could change a reduced gradient."""
    return (
        f"the gradient of {name} was changed on rank {rank} where other ranks could not do the "
        "same: they have called step() without backward(), or a gradient came later. Call "
        "optimizer.synchronize() on all ranks before gradients are clipped, scaled or replaced"
    )


@dataclass
class StepSync:
    """One step's rounds, on every rank alike; and what was learned in the steps before.

    Attributes:
        ended: gradients are reduced.
        closed: no rank can have a late gradient any more.
        mixed: the exchange ended with some ranks at the end of backward and others in `step`.
        ragged: it ended with zeros for a layer that a rank lacked which may still bring it.
        joined: in the last round a rank had joined.
        unused: layers of which no rank had a gradient in this step.
        awaited: (rank, layer) of what came late in an earlier step.
        sparse: layers whose gradient was sparse on a rank when the exchange ended last.
        both: those of them whose gradient was dense on another.
    """

    ended: bool = False
    closed: bool = False
    mixed: bool = False
    ragged: bool = False
    joined: bool = False
    unused: set[int] = field(default_factory=set)
    awaited: set[tuple[int, int]] = field(default_factory=set)
    sparse: set[int] = field(default_factory=set)
    both: set[int] = field(default_factory=set)

    def forget(self) -> None:
        """Forgets the steps before, which other ranks may not know, or know by other numbers."""
        self.awaited.clear()
        self.sparse.clear()

    def begin(self) -> None:
        """Begins a step."""
        self.ended = self.closed = self.mixed = self.ragged = False
        self.unused.clear()

    def receive(
        self, words: Sequence[SyncMessage], names: Sequence[str], ranks: Sequence[int]
    ) -> list[int]:
        """Takes one round's words in; the exchange ends where `ended` becomes true.

        Args:
            words: of all ranks.
            names: of the layers.
            ranks: what the ranks are called.

        Returns:
            The layers of which a rank has a late gradient.

        Raises:
            OutOfStepError: the ranks are in different steps, or not all have exchanged.
            PayloadError: what was added up in the exchange before is not the same on all ranks.
            GradientChangedError: naming the layer and the rank.
        """
        if not self.ended:
            taken = [word.layers for word in words if not word.joined]
            self.sparse = {i for codes in taken for i, c in enumerate(codes) if c & SPARSE}
            self.both = {i for i in self.sparse for codes in taken if codes[i] & _KIND == HERE}
        self._check(words, names, ranks)
        self.joined = any(word.joined for word in words)
        late = {(r, i) for r, w in enumerate(words) for i, c in enumerate(w.layers) if c & LATE}
        if not self.ended:
            lacking = {(r, i) for r, word in enumerate(words) for i in word.absent()}
            last = [word.last for word in words if not word.joined]
            if not any(last) and lacking & self.awaited:
                return []
            self.awaited -= lacking
            self.ended = True
            absent = [set(word.absent()) for word in words if not word.joined]
            self.unused = set.intersection(*absent) if absent else set()
            self.ragged = any(not words[rank].last for rank, _ in lacking)
            self.mixed = any(last) and not all(last)
        self.awaited |= late
        self.unused -= {i for _, i in late}
        self.closed = not self.ragged or all(word.last for word in words)
        return sorted({i for _, i in late})

    def _check(
        self, words: Sequence[SyncMessage], names: Sequence[str], ranks: Sequence[int]
    ) -> None:
        speaking = [(rank, word) for rank, word in zip(ranks, words) if not word.joined]
        if len({word.step for _, word in speaking}) > 1:
            listed = ", ".join(f"rank {rank} in step {word.step}" for rank, word in speaking)
            raise OutOfStepError(
                f"the ranks are in different steps: {listed}. Load the same checkpoint on all "
                "ranks, and call backward() and step() equally often on all of them"
            )
        sums = {rank: word.summed for rank, word in speaking if word.summed}
        if len(set(sums.values())) > 1:
            raise PayloadError(verify.sums_differ(sums))
        if len({word.ended for _, word in speaking}) > 1:
            behind = [str(rank) for rank, word in speaking if not word.ended]
            raise OutOfStepError(
                f"rank {', '.join(behind)} has begun another step, while other ranks still are to "
                "call step(): call zero_grad() and step() equally often on all ranks"
            )
        changed = [
            (rank, names[i])
            for rank, word in zip(ranks, words)
            for i, code in enumerate(word.layers)
            if code & CHANGED
        ]
        if not changed:
            return
        rank, name = changed[0]
        if not self.ended:
            raise GradientChangedError(
                f"the gradient of {name} was changed on rank {rank} before it was reduced, which "
                "the other ranks cannot know. The exchange had not ended with backward(): fewer "
                "than backward_passes_per_step passes have come, or one that came late in the "
                "last step has not, or it has raised an error, or compiled autograd runs it. Call "
                "optimizer.synchronize() before gradients are clipped, scaled or replaced"
            )
        late = any(code & LATE for word in words for code in word.layers)
        if self.mixed or late:
            raise GradientChangedError(changed_alone(name, rank))
