"""NaN, infinities and what overflows in one rank's gradient; all ranks in one process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

import numpy as np

from hvd_gradcomp import Compressor, NonFiniteGradientError
from hvd_gradcomp.method.compressor import leaves
from hvd_gradcomp.testing import World
from tests.chaos.outcomes import Input
from tests.chaos.payloads import (
    RANKS,
    Framework,
    drawn,
    gradients,
    host,
    like,
    usable,
    world_of,
)

VALUES = {"NaN": np.nan, "an infinity": np.inf, "minus infinity": -np.inf}
HUGE = {"1e38": 1e38, "3e38": 3e38, "the smallest numbers": 1e-45}
ONE, ALL = "on one rank", "on all ranks"


def attacks(seed: int, share: float = 1.0, only: Sequence[str] = ()) -> Iterator[Input]:
    """Yield the attacks of this part.

    Args:
        seed: of what is drawn.
        share: of the methods.
        only: words, of which one has to be in the name of a framework; all if empty.
    """
    for name, framework, dice, compressor, moments in drawn(seed, share, only):
        yield from _on(name, compressor, framework, moments, dice)


def _on(
    name: str, compressor: Compressor, framework: Framework, moments: Sequence[int], dice: Random
) -> Iterator[Input]:
    ops, random = framework.ops(), np.random.default_rng(dice.randrange(2**32))
    begun = world_of(compressor, ops)
    for moment in moments:
        while begun.steps < moment:
            begun.step(gradients(begun, framework, random))
        flats, later = (gradients(begun, framework, random) for _ in range(2))

        def poisoned(value: float, ranks: Sequence[int], every: bool, flats: Any = flats) -> Any:
            arrays = [host(flat) for flat in flats]
            for rank in ranks:
                # Where there is a layer: what pads them holds nothing.
                places = slice(0, 600) if every else dice.randrange(600)
                arrays[rank][places] = value
            return [framework.tensor(x) for x in arrays]

        for title, value in VALUES.items():
            rank, every = dice.randrange(RANKS), dice.random() < 0.5
            bad = poisoned(value, [rank], every)
            case = f"{compressor} after {moment} steps, rank {rank}"
            outcome, message = _refused(like(begun), bad, later)
            yield Input(f"{name}, raise", f"{title} {ONE}", outcome, message, case=case)
            if name == "PyTorch":
                outcome, message = _left_out(like(begun), like(begun), bad, flats)
                yield Input(f"{name}, skip", f"{title} {ONE}", outcome, message, case=case)
        for title, value in HUGE.items():
            for spread, ranks in ((ONE, [dice.randrange(RANKS)]), (ALL, range(RANKS))):
                for every in (False, True):
                    bad = poisoned(value, list(ranks), every)
                    outcome, message = _endured(like(begun), bad, later)
                    case = f"{compressor} after {moment} steps, {'600' if every else '1'} of them"
                    yield Input(f"{name}, raise", f"{title} {spread}", outcome, message, case=case)


def _refused(world: World, bad: Sequence[Any], later: Sequence[Any]) -> tuple[str, str]:
    """A step that cannot be made: an error on all ranks, and no state keeps anything of it."""
    try:
        world.step(bad)
    except NonFiniteGradientError as error:
        return _after(world, later), f"{type(error).__name__}: {error}"
    except Exception as error:
        return "unexplained", f"{type(error).__name__}: {error}"
    return "lost", "nothing was raised"


def _endured(world: World, bad: Sequence[Any], later: Sequence[Any]) -> tuple[str, str]:
    """A step that can be made, or not, as long as all ranks have the same and nothing stays."""
    try:
        totals = world.step(bad)
    except NonFiniteGradientError as error:
        return _after(world, later), f"{type(error).__name__}: {error}"
    except Exception as error:
        return "unexplained", f"{type(error).__name__}: {error}"
    if any(host(x).tobytes() != host(totals[0]).tobytes() for x in totals):
        return "diverged", "replicas differ"
    if not usable(totals):
        return "lost", "the result is not finite"
    if not _finite(world):
        return "lost", "a state is not finite"
    try:
        world.step(later)
    except NonFiniteGradientError as error:  # what it had kept of these was too large with more
        return "ended" if _finite(world) else "lost", f"{type(error).__name__}: {error}"
    return "survived", ""


def _after(world: World, later: Sequence[Any]) -> str:
    """What has come of a step that all ranks have refused."""
    if None in world.failures:
        return "diverged"
    if not _finite(world):
        return "lost"
    try:
        return "ended" if usable(world.step(later)) else "lost"
    except NonFiniteGradientError:  # what nobody has sent is too large by now
        return "lost"


def _finite(world: World) -> bool:
    """Whether states have a finite number for each element; others may be marks."""
    arrays = [host(x) for state in world.states for _, x in leaves(state)]
    kept = [x for x in arrays if x.dtype.kind == "f" and x.shape == (world.layout.size,)]
    return all(np.isfinite(x).all() for x in kept)


def _left_out(
    world: World, calm: World, bad: Sequence[Any], flats: Sequence[Any]
) -> tuple[str, str]:
    """Leave a step out as the reducer does for `nonfinite="skip"`, by plain ops."""
    kept = [x for state in world.states for _, x in leaves(state)]
    before = [host(x) for x in kept]
    world.ops.snapshot(kept)
    message = ""
    try:
        world.step(bad)
        return "lost", "nothing was raised"
    except NonFiniteGradientError as error:
        message = f"{type(error).__name__}: {error}"
    finally:
        world.ops.release_snapshot(kept, kept)
    same = all(host(x).tobytes() == y.tobytes() for x, y in zip(kept, before))
    totals = [w.step([flat * 1 for flat in flats]) for w in (world, calm)]
    same = same and all(host(a).tobytes() == host(b).tobytes() for a, b in zip(*totals))
    return "undone" if same else "lost", message
