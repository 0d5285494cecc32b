"""Line that says what begins: what is compressed, how, and about how many times fewer bytes it is.

Rank 0 logs it once, at level INFO. Who has configured no logging sees it on stderr all the same:
`logging.getLogger("hvd_gradcomp").setLevel(logging.WARNING)` silences it.

The factors are those of `CompressionStats.ratio`: bytes of float32 gradients in every step, by
bytes that a rank hands to collectives. They come from what the methods say of their payloads; where
gradients decide these the line says so instead of a number.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from hvd_gradcomp.algorithms.combined.local_steps import LocalSchedule
from hvd_gradcomp.algorithms.combined.round_length import QuadraticRule, called
from hvd_gradcomp.core.cost_model import Exchange, dense_exchange
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.method.compressor import Compressor
from hvd_gradcomp.method.learned import Learned
from hvd_gradcomp.planning.worth import Plan

LOGGER = logging.getLogger("hvd_gradcomp")
EACH_STEP = LocalSchedule(every=1)


class Traffic(NamedTuple):
    """Bytes of a rank in an exchange: handed to collectives, and over its link one way."""

    sent: float
    received: float


def announce(line: str | None) -> None:
    """Log what begins; write it to stderr if nobody has configured logging.

    Args:
        line: from `announcement`.
    """
    if line is None:
        return
    LOGGER.info("%s", line)
    silenced = LOGGER.disabled or max(LOGGER.level, LOGGER.manager.disable + 1) > logging.INFO
    if not silenced and not LOGGER.hasHandlers():
        print(f"hvd_gradcomp: {line}", file=sys.stderr, flush=True)


def announcement(
    compressor: Compressor,
    plan: Plan,
    ranks: int,
    schedule: LocalSchedule = EACH_STEP,
    scope: str = "",
) -> str | None:
    r"""Return the line; None if nothing is compressed, and all of it is exchanged in every step.

    Args:
        compressor: as the user gave it.
        plan: the buckets with their compressors, from `assignment.plan`.
        ranks: number of ranks that exchange; of hosts, if a host is one to the compressor.
        schedule: of the exchanges, with their first dense steps.
        scope: which of the model's elements these are, or between whom they travel; "" for all.

    >>> from hvd_gradcomp import Int8Compressor
    >>> plan = [(Int8Compressor(), Layout(("weight", "bias"), ((500, 1000), (1000,))))]
    >>> print(*announcement(Int8Compressor(), plan, 2, LocalSchedule(15)).split("; "), sep="\n")
    compressing 2 tensors, 0.501 M elements, with Int8Compressor(), every 15 local steps
    about 59 times fewer bytes
    """
    kinds = [(method.working, layout) for method, layout in plan]
    taken = [pair for pair in kinds if pair[0].compresses]
    if not taken and schedule.every == 1:
        return None
    counted = _counted([layout for _, layout in taken or kinds], scope)
    line = f"compressing {counted}" if taken else f"exchanging {counted}, uncompressed"
    if taken and len(taken) < len(kinds):
        rest = [layout for method, layout in kinds if not method.compresses]
        line += f" (and {_counted(rest)}, dense)"
    if taken:
        line += f", with {compressor}"
    if not schedule.is_constant:
        line += f", in local steps with every={called(schedule.every)}"
    elif schedule.every != 1:
        line += f", every {schedule.every:,} local steps"
    if schedule.warmup_steps:
        line += f", after {schedule.warmup_steps:,} dense steps"
    return f"{line}; {_savings(kinds, ranks, schedule)}"


def _counted(layouts: Sequence[Layout], scope: str = "") -> str:
    """Return the numbers of tensors and of their elements as text."""
    tensors = sum(len(layout.names) for layout in layouts)
    elements = sum(layout.elements for layout in layouts)
    millions = elements / 1e6
    text = f"{elements:,}" if elements < 100_000 else f"{_short(millions)} M"
    noun = "tensor" if tensors == 1 else "tensors"
    return f"{tensors:,} {noun}, {text} elements{scope and f' {scope}'}"


def _savings(kinds: Plan, ranks: int, schedule: LocalSchedule) -> str:
    """Return as text how many times fewer bytes travel than with dense gradients in every step."""
    steps, bound, each = 1, "about", ""
    if schedule.is_constant:
        assert isinstance(schedule.every, int)
        steps = schedule.every
    elif isinstance(schedule.every, QuadraticRule):
        steps, bound = schedule.every.base, "at least"
    else:
        each = " in an exchange"
    parts = [_traffic(method, layout, ranks) for method, layout in kinds]
    learned = [method for method, layout in kinds if method.exchange_of(layout, ranks) is None]
    known = [traffic for traffic in parts if traffic is not None]
    if len(known) < len(parts):
        return "how many bytes that takes depends on the gradients: see its statistics"
    dense = dense_exchange(sum(layout.elements for _, layout in kinds))
    fewer = steps * _factor(dense.collectives[0][1], sum(traffic.sent for traffic in known))
    less = steps * _factor(dense.received(ranks), sum(traffic.received for traffic in known))
    if learned:
        each += ", once it has learned"
    if ranks > 1 and abs(less - fewer) > 0.1 * fewer:
        return f"{bound} {_times(fewer)} bytes sent, {_times(less)} received{each}"
    return f"{bound} {_times(fewer)} bytes{each}"


def _traffic(method: Compressor, layout: Layout, ranks: int) -> Traffic | None:
    """Return the bytes of a bucket; None if its gradients decide."""
    if method.varies_in_size:
        return None
    exchange = method.exchange_of(layout, ranks)
    if exchange is not None:
        return Traffic(_handed_over(exchange, ranks), exchange.received(ranks))
    decided = any(method.layer_bytes(shape) is None for shape in layout.shapes)
    course = None if decided or not isinstance(method, Learned) else method.course(layout, ranks)
    return None if course is None else Traffic(course.step, course.step)


def _handed_over(exchange: Exchange, ranks: int) -> float:
    """Return the bytes that a rank hands over for others, in the mean over ranks."""
    shares = {"alltoall": (ranks - 1) / ranks, "broadcast": 1 / ranks}
    return sum(size * shares.get(kind, 1.0) for kind, size in exchange.collectives)


def _factor(dense: float, compressed: float) -> float:
    return dense / compressed if compressed else inf


def _times(factor: float) -> str:
    """Return a factor as text.

    >>> _times(3.98), _times(64.2), _times(1.02)
    ('4 times fewer', '64 times fewer', 'as many')
    """
    if factor < 1.05:
        return "as many"
    return f"{factor:.2g} times fewer" if factor < 10 else f"{factor:,.0f} times fewer"


def _short(number: float) -> str:
    """Return a positive number with three digits, and all before the point.

    >>> _short(3.0), _short(25.63), _short(1234.5)
    ('3', '25.6', '1,234')
    """
    return f"{number:.3g}" if number < 1000 else f"{number:,.0f}"
