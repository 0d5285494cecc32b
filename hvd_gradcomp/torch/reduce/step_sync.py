"""Synchronization of the ranks before an exchange ends: messages, and the decisions from them.

An exchange ends with backward, so that code between backward and the optimizer's step sees reduced
gradients. There no rank may wait for a gradient that another rank will not have: that rank may lack
a layer in this step, get it in a second backward, or have called `step` already. So ranks at the
end of a backward or in `step` first exchange messages: a header (`runtime.step_header`), and a
number for each layer if a rank lacks something. Decisions depend only on the messages of all ranks,
so they are the same on all ranks:

- The exchange ends in the first round, with zeros for missing gradients. It waits for another round
  only if no rank is in `step` and a rank lacks a layer that was late on it in an earlier step.
- A gradient that arrives after the end is late: it is summed uncompressed, and awaited in later
  steps.
- While a rank may still have late gradients, `step` begins with a round.
- A rank that has called `hvd.join()` lacks nothing, and its step and settings are ignored: it takes
  part with zeros and its residual. If gradients are only summed it sends no message: Horovod lets
  it add zeros.
- A layer that no rank has used has no gradient, unless a residual has arrived for it.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from hvd_gradcomp.core.collectives import Allreduce
from hvd_gradcomp.monitoring import verify
from hvd_gradcomp.ops import PayloadError
from hvd_gradcomp.runtime import config_check, errors
from hvd_gradcomp.runtime.stall_inspector import StallChannel
from hvd_gradcomp.runtime.step_header import Kind, StepHeader, compare, values
from hvd_gradcomp.torch.reduce.claims import Claim
from hvd_gradcomp.torch.reduce.reducer import Reducer

# Flags of a layer's code.
HERE = 1  # its gradient has been taken
SPARSE = 2  # and is sparse
LATE = 4  # it came after the exchange had ended
CHANGED = 8  # it was changed since it was taken or reduced

_ALIKE = (
    "Freeze and thaw the same parameters on all ranks, before the same step, and scale the loss on "
    "all of them or on none"
)
_KIND = HERE | SPARSE
_LAST, _PLAIN = 1, 2  # flags of a header


class GradientChangedError(RuntimeError):
    """Error: a gradient was changed in a way that cannot be applied on all ranks."""


class SyncMessage(NamedTuple):
    """Message of one rank.

    Attributes:
        header: that of its step; flags are `_LAST`, in `step` or `synchronize`, where no more
            gradients will arrive; and `_PLAIN`, with the usual codes.
        layers: a code for each layer.
    """

    header: StepHeader
    layers: tuple[int, ...]

    @classmethod
    def of(
        cls,
        kind: Kind,
        step: int,
        layers: Sequence[int],
        *,
        last: bool,
        sparse: Collection[int] = (),
        settings: int = 0,
        digest: int = 0,
    ) -> SyncMessage:
        """Return the message of this rank.

        Args:
            kind: STEP; REDUCED if the exchange of this step has ended; or JOINED.
            step: exchanges before this one.
            layers: a code for each layer.
            last: this rank is in `step` or `synchronize`: no more gradients will arrive.
            sparse: layers whose gradients all ranks know to be sparse.
            settings: a digest of the settings that must be equal in this step; 0 before it begins.
            digest: that of the sums of the previous exchange; 0 for none.
        """
        codes = tuple(layers)
        flags = _LAST * last + _PLAIN * (codes == usual(len(codes), sparse))
        return cls(StepHeader(kind, step, settings=settings, digest=digest, flags=flags), codes)

    @property
    def last(self) -> bool:
        """Return True if no more gradients will arrive on the rank."""
        return bool(self.header.flags & _LAST) or self.header.kind == Kind.ABSENT

    @property
    def joined(self) -> bool:
        """Return True if the rank has joined, and has no gradients of its own any more."""
        return not self.header.takes_part

    def absent(self) -> list[int]:
        """Return the layers whose gradient has not been taken."""
        return [i for i, code in enumerate(self.layers) if not code & (HERE | LATE)]


def digest_of(settings: Mapping[str, str]) -> int:
    """Return a digest of the settings that must be equal in a step; 0 for none."""
    return zlib.crc32(repr(sorted(settings.items())).encode()) if settings else 0


def usual(layers: int, sparse: Collection[int]) -> tuple[int, ...]:
    """Return the codes of a rank that has all gradients, none of them late or changed."""
    return tuple(HERE | SPARSE * (layer in sparse) for layer in range(layers))


def read(headers: Sequence[StepHeader], layers: Sequence[Sequence[int]]) -> list[SyncMessage]:
    """Return the messages of all ranks.

    Args:
        headers: of each rank.
        layers: the codes of each rank; if all are plain, the usual ones.
    """
    return [
        SyncMessage(header, (HERE,) * len(codes) if header.kind == Kind.ABSENT else tuple(codes))
        for header, codes in zip(headers, layers)
    ]


def all_plain(headers: Sequence[StepHeader]) -> bool:
    """Return True if all ranks have the usual codes, so none need be sent."""
    return all(each.flags & _PLAIN or each.kind == Kind.ABSENT for each in headers)


def changed_alone(name: str, rank: int) -> str:
    """Return the error message for a reduced gradient that only some ranks could change."""
    return (
        f"the gradient of {name} was changed on rank {rank} where other ranks could not do the "
        "same: they have called step() without backward(), or a gradient came later. Call "
        "optimizer.synchronize() on all ranks before gradients are clipped, scaled or replaced"
    )


@dataclass
class StepSync:
    """State of one step's rounds, equal on all ranks; and of what earlier steps have shown.

    Attributes:
        ended: gradients are reduced.
        closed: no rank can have a late gradient any more.
        mixed: the exchange ended with some ranks at the end of backward and others in `step`.
        ragged: it ended with zeros for a layer whose gradient may still arrive on a rank.
        joined: a rank had joined in the last round.
        unused: layers for which no rank had a gradient in this step.
        awaited: (rank, layer) of late gradients in earlier steps.
        sparse: layers whose gradient was sparse on some rank when the last exchange ended.
        both: those of them whose gradient was dense on another rank.
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

    def clear(self) -> None:
        """Clear the record of earlier steps.

        Other ranks may not know them, or number the layers in another way.
        """
        self.awaited.clear()
        self.sparse.clear()

    def begin(self) -> None:
        """Begin a step."""
        self.ended = self.closed = self.mixed = self.ragged = False
        self.unused.clear()

    def receive(
        self, messages: Sequence[SyncMessage], names: Sequence[str], ranks: Sequence[int]
    ) -> list[int]:
        """Process one round's messages; if `ended` becomes True, the exchange ends.

        Args:
            messages: of all ranks.
            names: of the layers.
            ranks: the numbers of the ranks, for errors.

        Returns:
            The layers for which a rank has a late gradient.

        Raises:
            OutOfStepError: the ranks are in different steps, or not all have exchanged.
            PayloadError: the sums of the previous exchange differ between ranks.
            GradientChangedError: naming the layer and the rank.
        """
        if not self.ended:
            active = [each.layers for each in messages if not each.joined]
            self.sparse = {i for codes in active for i, c in enumerate(codes) if c & SPARSE}
            self.both = {i for i in self.sparse for codes in active if codes[i] & _KIND == HERE}
        self._check(messages, names, ranks)
        self.joined = any(each.joined for each in messages)
        late = {(r, i) for r, m in enumerate(messages) for i, c in enumerate(m.layers) if c & LATE}
        if not self.ended:
            lacking = {(r, i) for r, each in enumerate(messages) for i in each.absent()}
            last = [each.last for each in messages if not each.joined]
            if not any(last) and lacking & self.awaited:
                return []
            self.awaited -= lacking
            self.ended = True
            absent = [set(each.absent()) for each in messages if not each.joined]
            self.unused = set.intersection(*absent) if absent else set()
            self.ragged = any(not messages[rank].last for rank, _ in lacking)
            self.mixed = any(last) and not all(last)
        self.awaited |= late
        self.unused -= {i for _, i in late}
        self.closed = not self.ragged or all(each.last for each in messages)
        return sorted({i for _, i in late})

    def _check(
        self, messages: Sequence[SyncMessage], names: Sequence[str], ranks: Sequence[int]
    ) -> None:
        # A rank that has joined over Horovod may count other steps.
        headers = {r: m.header for r, m in zip(ranks, messages) if not m.joined}
        if error := compare(headers):
            raise error
        sums = values(headers, "digest")
        if len(set(sums.values())) > 1:
            raise PayloadError(verify.sums_differ(sums))
        changed = [
            (rank, names[i])
            for rank, message in zip(ranks, messages)
            for i, code in enumerate(message.layers)
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
        late = any(code & LATE for message in messages for code in message.layers)
        if self.mixed or late:
            raise GradientChangedError(changed_alone(name, rank))


class Step(Protocol):
    """Step whose settings ranks compare."""

    @property
    def settings(self) -> dict[str, str]:
        """Return the settings that must be equal on all ranks; {} before it begins."""


class ConfigCheck:
    """Comparison of what the ranks of a reducer do, before training and in each step.

    Args:
        reducer: of this rank.
        settings: that must be equal on all ranks, besides those of the reducer.
        claim: of the reducer to its parameters, which is checked once more; None for none.

    Attributes:
        claim: as given.
        reached: the ranks have agreed, and nothing has changed since.
    """

    def __init__(self, reducer: Reducer, settings: str, claim: Claim | None = None) -> None:
        self._reducer, self._settings, self.claim = reducer, settings, claim
        self.reached = False

    def description(self) -> config_check.Description:
        """Describe everything that must be equal on all ranks."""
        reducer, planner = self._reducer, self._reducer.planner
        return config_check.describe(
            planner.layers,
            planner.compressor,
            [bucket.layout for bucket in planner.buckets],
            self._settings,
            framework=f"torch {torch.__version__.partition('+')[0]}",
            horovod=reducer.transport.version,
        )

    def agree(self) -> None:
        """Compare the descriptions of all ranks, once before the first collective.

        Raises:
            MismatchError: on all ranks, if they differ.
            Exception: that of the claim, on all ranks that have it.
        """
        if self.reached:
            return
        description, reducer = self.description(), self._reducer
        refusal = None if self.claim is None else self.claim.refusal()
        if not reducer.planner.compressor.is_linear:  # sums are the same in every step
            description[config_check.STEP] = str(reducer.steps)
        participants = reducer.participants
        ranks = participants.process_set.ranks
        config_check.compare(description, self.gather, ranks, refusal)
        if participants.place is not None:
            with self._named("the exchange of what the ranks train"):
                _ = participants.groups  # all ranks are here together
        self.reached = True

    def exchange(
        self, message: SyncMessage, sparse: Collection[int], step: Step, stalls: StallChannel
    ) -> Generator[None, None, list[SyncMessage]]:
        """Send this rank's message to all ranks, and return those of all; yield while waiting.

        Args:
            message: of this rank.
            sparse: layers whose gradients all ranks know to be sparse.
            step: has the settings that are compared, if their digests differ.
            stalls: completes a stall report that some rank has sent.

        Raises:
            MismatchError: on all ranks, if they do not train alike in this step.
        """
        reported = int(stalls.report is not None)
        rows = yield from self._exchange_rows([*message.header, reported], "end")
        if any(row[-1] for row in rows):
            stalls.complete()
        headers = [StepHeader(*row[:-1]) for row in rows]
        if len(set(values(dict(enumerate(headers)), "settings").values())) > 1:
            self._compare_step(step.settings)
        layers: Sequence[Sequence[int]] = [usual(len(message.layers), sparse)] * len(headers)
        if not all_plain(headers):
            layers = yield from self._exchange_rows(message.layers, "end.layers")
        return read(headers, layers)

    def _compare_step(self, settings: Mapping[str, str]) -> None:
        """Compare the settings of this step over the ranks; all ranks call it.

        Raises:
            MismatchError: on all ranks, naming the difference.
        """
        every = self.gather(dict(settings), dict[str, str])
        ranks = self._reducer.participants.process_set.ranks or range(len(every))
        begun = {rank: each for rank, each in zip(ranks, every) if each}
        config_check.agree(list(begun.values()), list(begun), _ALIKE)

    def gather(self, item: Any, kind: Any) -> list[Any]:
        """Gather an item of type `kind` from every rank."""
        with self._named("the exchange of what the ranks train"):
            return self._reducer.transport.gather_objects(item, kind, "handshake")

    def _named(self, what: str) -> AbstractContextManager[None]:
        transport = self._reducer.transport
        return errors.explain_errors(transport.failure, what, transport.library)

    def _exchange_rows(
        self, row: Sequence[int], what: str
    ) -> Generator[None, None, list[list[int]]]:
        """Exchange rows of integers, of equal length on all ranks; yield while waiting.

        An allreduce with a row for each rank, rather than an allgather, works with `hvd.join()`.
        """
        reducer, transport = self._reducer, self._reducer.transport
        process_set = reducer.participants.process_set
        size = process_set.size()
        if size == 1:
            return [list(row)]
        table = torch.zeros(size, len(row), dtype=torch.int64, device="cpu")
        table[process_set.rank()] = torch.tensor(row, device="cpu")
        try:
            with self._named(f"the end of step {reducer.steps}'s exchange"):
                title = f"{transport.name}.{what}"
                work = transport.allreduce(Allreduce(table), title, process_set)
                while not work.ready():
                    if not reducer.programs.poll():
                        yield
                return transport.wait(work).tolist()
        except transport.failure:
            reducer.programs.poll()
            if reducer.programs.errors:  # which name what was on its way
                raise reducer.programs.errors[0] from None
            raise
