"""Payloads that are damaged on their way, of all methods; all ranks in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any, NamedTuple

import numpy as np

from hvd_gradcomp import Compressor
from hvd_gradcomp.core.collectives import Allreduce, Switch
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.testing import World
from tests.chaos import damage
from tests.chaos.outcomes import Input
from tests.methods import EVERY, GRADIVEQ_BY_LOSS, LEARNED, LGC_SERVER, ONE_OF_EACH

SHAPES = ((30, 20), (9,), (300,))
RANKS = 3
ANOTHERS = "that of another rank in its place"
EARLIER = "that of the step before in its place"


class Framework(NamedTuple):
    """How a world is made of numpy's arrays."""

    ops: Callable[[], Any]
    tensor: Callable[[np.ndarray], Any]


def pytorch() -> Framework:
    import torch

    from hvd_gradcomp.ops.torch import TorchOps

    torch.set_num_threads(1)
    return Framework(TorchOps, lambda x: torch.from_numpy(x.copy()))


def tensorflow() -> Framework:
    import tensorflow as tf

    from hvd_gradcomp.ops.tensorflow import TensorFlowOps

    return Framework(TensorFlowOps, tf.constant)


FRAMEWORKS = {"PyTorch": pytorch, "TensorFlow": tensorflow}


def points(name: str) -> list[tuple[Compressor, tuple[int, ...]]]:
    """(method, after which steps it is attacked): those that learn are met in each phase."""
    if name == "TensorFlow":
        learned = [(one, (70,)) for one in (GRADIVEQ_BY_LOSS, LGC_SERVER)]
        return [(one, (3,)) for one in ONE_OF_EACH] + learned
    return [(one, (4,)) for one in EVERY] + [(one, (15, 45, 90, 130)) for one in LEARNED]


def drawn(
    seed: int, share: float, only: Sequence[str]
) -> Iterator[tuple[str, Framework, Random, Compressor, tuple[int, ...]]]:
    """(its framework's name, that framework, dice of the seed, method, after which steps) of each.

    Args:
        seed, share, only: see `attacks`.
    """
    for name in FRAMEWORKS:
        if only and not any(word in name for word in only):
            continue
        framework, dice = FRAMEWORKS[name](), Random(f"{seed} {name}")
        chosen = points(name)
        if share < 1:
            chosen = dice.sample(chosen, max(1, round(len(chosen) * share)))
        for compressor, moments in chosen:
            yield name, framework, dice, compressor, moments


def attacks(seed: int, share: float = 1.0, only: Sequence[str] = ()) -> Iterator[Input]:
    """Yield the attacks of this part.

    Args:
        seed: of what is drawn.
        share: of the inputs; below 1, of the methods too.
        only: words, of which one has to be in the name of a framework; all if empty.
    """
    for name, framework, dice, compressor, moments in drawn(seed, share, only):
        for attack, request, outcome, message in _on(compressor, framework, moments, dice, share):
            checked = "dense, added up" if Allreduce.__name__ in request else "payloads"
            case = f"{compressor} {request}"
            yield Input(f"{name}, {checked}", attack, outcome, message, case=case)


def world_of(compressor: Compressor, ops: Any, ranks: int = RANKS) -> World:
    names = tuple(f"layer{i}" for i in range(len(SHAPES)))
    return World(compressor, ops, Layout(names, SHAPES, block=compressor.block), ranks)


def host(x: Any) -> np.ndarray:
    """A copy of a tensor of any framework."""
    return np.asarray(x).copy()


def gradients(world: World, framework: Framework, random: Any) -> list[Any]:
    """One bucket for each rank."""
    return [
        world.flat([framework.tensor(random.standard_normal(s).astype("f4")) for s in SHAPES])
        for _ in range(world.size)
    ]


class Tampering:
    """Puts something else in place of what one rank hands to one collective of a step.

    Attributes:
        what: takes the bytes that were to travel and those of all ranks, and returns others.
        seen: (kind of collective, what each rank has handed to it) of each round.
    """

    def __init__(
        self, framework: Framework, ranks: int, rank: int = 0, place: int = -1, what: Any = None
    ) -> None:
        self._framework, self._ranks, self._rank, self._place = framework, ranks, rank, place
        self.what, self.seen = what, []
        self._count = 0

    def __call__(self, rank: int, request: Any) -> Any:
        if isinstance(request, Switch):
            return request
        place, self._count = self._count // self._ranks, self._count + 1
        data = host(request.tensor)
        if rank == 0:
            self.seen.append((type(request).__name__, []))
        self.seen[place][1].append(data)
        if rank != self._rank or place != self._place or not data.size:
            return request
        changed = np.frombuffer(self.what(data.tobytes()), data.dtype).reshape(data.shape)
        return request._replace(tensor=self._framework.tensor(changed))


def _on(
    compressor: Compressor,
    framework: Framework,
    moments: tuple[int, ...],
    dice: Random,
    share: float,
) -> Iterator[tuple[str, str, str, str]]:
    """(attack, where it met, outcome, what was said) on a method."""
    ops, random = framework.ops(), np.random.default_rng(dice.randrange(2**32))
    begun = world_of(compressor, ops)
    for moment in moments:
        while begun.steps < moment:
            before = begun.tamper = Tampering(framework, RANKS)
            begun.step(gradients(begun, framework, random))
        flats = gradients(begun, framework, random)
        calm = Tampering(framework, RANKS)
        right = [host(x) for x in like(begun, calm).step([flat * 1 for flat in flats])]
        for place, (kind, sent) in enumerate(calm.seen):
            for attack, rank, what in _changes(place, sent, before.seen, dice, share):
                where = f"after {moment} steps, {kind} {place} of rank {rank}"
                world = like(begun, Tampering(framework, RANKS, rank, place, what))
                try:
                    totals = world.step([flat * 1 for flat in flats])
                except Exception as error:
                    message = f"{type(error).__name__}: {error}"
                    yield attack, where, _ended(kind, world, flats, message), message
                else:
                    yield attack, where, _compared(kind, attack, right, totals), ""


def like(begun: World, tamper: Any = None) -> World:
    """Another world in the same state."""
    world = World(begun.compressor, begun.ops, begun.layout, begun.size, tamper=tamper)
    world.states, world.steps = copy.deepcopy(begun.states), begun.steps
    return world


def _changes(
    place: int, sent: list[np.ndarray], earlier: list[Any], dice: Random, share: float
) -> Iterator[tuple[str, int, Any]]:
    """(attack, rank, what takes its place) on one round."""
    for attack, harm in damage.OF_PAYLOADS.items():
        for _ in range(max(1, round((5 if attack != "zeros" else 1) * share))):
            rank = dice.randrange(RANKS)
            yield attack, rank, lambda data, harm=harm: harm(data, dice)
    rank = dice.randrange(RANKS)
    other = sent[(rank + 1) % RANKS].tobytes()
    if len(other) == sent[rank].nbytes:
        yield ANOTHERS, rank, lambda data: other
    if place < len(earlier) and earlier[place][1][rank].shape == sent[rank].shape:
        yield EARLIER, rank, lambda data: earlier[place][1][rank].tobytes()


def _ended(kind: str, world: World, flats: Sequence[Any], message: str) -> str:
    """What has come of a step in which something was raised."""
    if not any(word in message for word in _CAUSES):
        return "unexplained"
    # Of these one rank alone gets what was damaged. It ends, and with it the others.
    if kind not in ("Alltoall", "Gather") and None in world.failures:
        return "diverged"
    world.tamper = None
    return "ended" if usable(world.step(flats)) else "diverged"


def usable(totals: Sequence[Any]) -> bool:
    """Whether what ranks got is finite, and the same on all to the bit."""
    arrays = [host(total) for total in totals]
    alike = all(x.tobytes() == arrays[0].tobytes() for x in arrays)
    return alike and bool(np.isfinite(arrays[0]).all())


_CAUSES = (
    "damaged payload",
    "no hvd_gradcomp payload",
    "another wire format",
    "another algorithm",
    "another model",
    "another step",
    "NaN or an infinity",
)


def _compared(kind: str, attack: str, right: Sequence[np.ndarray], totals: Sequence[Any]) -> str:
    """What has come of a step in which nothing was raised."""
    if any(host(x).tobytes() != host(totals[0]).tobytes() for x in totals):
        return "diverged"
    if host(totals[0]).tobytes() == right[0].tobytes():
        return "survived"
    # What is added up has no room for a checksum; and a payload does not say whose it is.
    return "unchecked" if kind == Allreduce.__name__ or attack == ANOTHERS else "lost"
