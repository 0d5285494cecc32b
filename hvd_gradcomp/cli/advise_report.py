"""Output of `hvd-gradcomp advise`: two tables, a recommendation, a figure."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hvd_gradcomp.cli import options, style
from hvd_gradcomp.cli.options import between, figure
from hvd_gradcomp.cli.output import duration
from hvd_gradcomp.core import registry
from hvd_gradcomp.tuning import recommend
from hvd_gradcomp.tuning.recommend import Span, Verdict

HOSTS = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_LOCAL = (
    "local(...): the exchange is one of LocalSteps, and a step the mean over steps. A training "
    "needs more of these, which is not in the table."
)
EVERY = (1, 4, 15, 30, 100)  # local steps between two exchanges


class Row(NamedTuple):
    """Figures of one method, as the tables and JSON have them; times in milliseconds.

    JSON has all fields, by their names: a new one is public at once.

    Attributes:
        method: its name.
        element_ratio, byte_ratio: of the gradient, divided by those sent; None where nothing is
            sent.
        predicted_ms, measured_ms: time of an exchange; None if it was not measured.
        error: of the prediction, as a share of the measured time; None without that.
        exchange_span_ms: time of an exchange, with its bounds.
        step_ms, step_span_ms: time of a step, and with its bounds.
        faster: speedup of a step over dense gradients.
        local_ms: mean time of a step with local steps, by their number.
        pays_below, pays_below_span: bits per second below which it saves time; None if dense.
        hosts: predicted speedup of a step, by number of hosts.
        every: steps for each exchange.
    """

    method: str
    element_ratio: float | None
    byte_ratio: float
    predicted_ms: float
    measured_ms: float | None
    error: float | None
    exchange_span_ms: Span
    step_ms: float
    step_span_ms: Span
    faster: Span
    local_ms: dict[int, float]
    pays_below: float | None
    pays_below_span: Span | None
    hosts: dict[int, float]
    every: int = 1


def text(advised: dict[str, Any], rows: Sequence[Row], verdict: Verdict) -> str:
    """Format the whole output; `advised` is the rest of the content for JSON."""
    measured = advised["median_error"] is not None
    here = advised["link"]["ranks"]
    beyond = advised["for_hosts"] not in (None, here)
    parts = [
        f"link: {_rate(advised['bandwidth'])} at {here} ranks{_shards(advised['shards'])}; forward:"
        f" {figure(advised['forward_ms'])} ms, backward: {figure(advised['backward_ms'])} ms"
        + ("" if advised["backward_ms"] else " (no loss: a step is an exchange)")
    ]
    if beyond:
        parts.append(
            options.wrapped(
                f"The table and the answer are for {advised['for_hosts']} hosts, extrapolated from "
                f"{here} ranks: nothing was measured among so many."
            )
        )
    if advised["probes"]:
        parts.append(options.wrapped(probes(advised["probes"])))
    parts.append(table(rows, measured and not beyond))
    parts += options.moments_used([row.method for row in rows], advised["moments"])
    if any(row.every > 1 for row in rows):
        parts.append(options.wrapped(_LOCAL))
    parts.append(hosts(rows[1:]))
    parts.append(options.wrapped(by_hosts(rows)))
    parts.append(local_steps(rows))
    if measured:
        parts.append(f"median error of the model: {advised['median_error']:.0%}")
    answer = recommendation(verdict, rows[0], advised["bandwidth"], beyond)
    if verdict.best is None and len(rows) > 1:
        answer = only_local_steps(rows)
    if verdict.faster is not None:
        answer += (
            f" Faster yet is {_written(verdict.faster.name)}, "
            f"{_span([1e3 * x for x in verdict.faster.step], 'ms')}; with "
            f"{advised['optimizer']}, methods that send few elements trained transformers worse: "
            "compare first."
        )
    if advised["takes_over"]:
        answer += (
            " It takes the momentum of SGD over; if yours is another optimizer, say so "
            "(--optimizer)."
        )
    parts.append(options.wrapped(answer))
    if advised["local_steps"]:
        parts.append(
            options.wrapped(recommended_local_steps(advised["local_steps"], advised["unlike"]))
        )
    return "\n\n".join(parts)


def first_look(rows: Sequence[Row], compute_ms: float, left: float) -> str:
    """Return a rough answer from few rounds, and the seconds that all methods will take."""
    dense, *others = rows
    gains = ", ".join(f"{row.method} {between(row.faster.low, row.faster.high)}" for row in others)
    return (
        f"first look, from one round: a step takes about {figure(dense.step_ms)} ms without "
        f"compression, {figure(compute_ms)} of it forward and backward. Times faster, by the cost "
        f"model: {gains or 'nothing known'}. All of it takes about {duration(left)}"
    )


def only_local_steps(rows: Sequence[Row]) -> str:
    """Return what is known of local steps where no method was named that exchanges in each step."""
    fastest = min(rows[1:], key=lambda row: row.step_ms)
    return (
        f"With {_written(fastest.method)} a step takes {_span(fastest.step_span_ms, 'ms')} in the "
        f"mean instead of {_span(rows[0].step_span_ms, 'ms')}. No method was named that exchanges "
        "in each step, to compare with."
    )


def recommended_local_steps(choice: dict[str, Any], unlike: str) -> str:
    """Recommend local steps.

    Args:
        choice: what to recommend.
        unlike: hosts and parameters of this training, where they are out of the law's range.
    """
    low, _, high = choice["steps_needed"]
    text = (
        f"Or exchange seldom: LocalSteps(every={choice['every']}) with "
        f"{_written(choice['use'])}: a step takes {_span(choice['step_span_ms'], 'ms')} in the "
        f"mean. A small transformer needed {low:.2f} to {high:.2f} times as many steps so; if "
        f"yours does, it is at the same loss {_span(choice['sooner'], 'times')} sooner than "
        "without compression. Try it: hvd-gradcomp compare."
    )
    if unlike:
        text += f" Yours has {unlike}, which was not measured: it may need more, or fewer."
    return text


def probes(readings: dict[str, Any]) -> str:
    """Describe the probes' findings about the gradients."""
    text = (
        "gradients, by probes: an element has {entropy:.1f} bits (entropy of a histogram of 32 "
        "bins); would send: Variance(alpha=2) {density_variance:.2%}, EGC {density_egc:.2%}, DGC "
        "{density_dgc:.2%}".format(**readings)
    )
    if readings["mutual_information"] is not None:
        text += (
            ". Ranks 0 and 1 share {mutual_information:.1f} bits: so much does an element of one "
            "rank's gradient tell of the same element of the other's; {chance:.1f} bits are shared "
            "by chance, with elements that do not belong together".format(**readings)
        )
        if readings["mutual_information"] > 0.95 * readings["entropy"]:
            text += ". That is all there is: do your ranks draw the same batches?"
    return text


def by_hosts(rows: Sequence[Row]) -> str:
    """Name the fastest method for each number of hosts, among those that send in each step.

    >>> times = Span(1.0, 1.0, 1.0)
    >>> rest = (1.0, None, None, times, 1.0, times, times, {}, None, None)
    >>> dense = Row("dense", 1.0, 1.0, *rest, dict.fromkeys(HOSTS, 1.0))
    >>> dgc = Row("DGC()", 960.0, 960.0, *rest, {n: 64 / n for n in HOSTS})
    >>> by_hosts([dense, dgc])
    'fastest by hosts: DGC() 2-32, dense 64-1024'
    """
    sending = [row for row in rows if row.element_ratio and row.every == 1]
    fastest = {n: max(sending, key=lambda row: row.hosts[n]).method for n in HOSTS}
    fastest = {n: "dense" if name == rows[0].method else name for n, name in fastest.items()}
    runs: list[tuple[str, list[int]]] = []
    for n, method in fastest.items():
        if not runs or runs[-1][0] != method:
            runs.append((method, []))
        runs[-1][1].append(n)
    spans = (f"{name} {ns[0]}" + (f"-{ns[-1]}" if len(ns) > 1 else "") for name, ns in runs)
    return f"fastest by hosts: {', '.join(spans)}"


def table(rows: Sequence[Row], measured: bool) -> str:
    """Format the times of each method, the dense one first."""
    head = ["method", "elem-\nents", "bytes", "model\nms"]
    head += ["took\nms"] if measured else []
    head += ["step\nms", "faster", "pays\nbelow"]

    def cells(row: Row) -> tuple[str, ...]:
        low, _, high = row.exchange_span_ms
        least, _, greatest = row.faster
        below = row.pays_below
        return (
            row.method,
            figure(row.element_ratio) if row.element_ratio else "none",
            figure(row.byte_ratio),
            figure(row.predicted_ms),
            *((between(low, high),) if measured else ()),
            figure(row.step_ms),
            between(least, greatest),
            "" if below is None else _rate(below).replace("b/s", "").replace(" ", ""),
        )

    return options.table(head, map(cells, rows))


def hosts(rows: Sequence[Row]) -> str:
    """Format the speedup by numbers of hosts, four characters wide each."""

    def cell(times: float) -> str:
        if times > 999:
            return ">999"
        return f"{times:.0f}" if times >= 9.995 else f"{times:.2f}"

    head = ("faster on hosts:", *map(str, HOSTS))
    return options.table(head, [(row.method, *(cell(row.hosts[n]) for n in HOSTS)) for row in rows])


def local_steps(rows: Sequence[Row]) -> str:
    """Format the mean time of a step with local steps, by their number.

    An exchange that nothing overlaps with, after every so many steps, on top of forward and
    backward; what the outer optimizer takes is left out.
    """
    head = ("step, ms, with\nlocal steps:", *map(str, EVERY))
    return options.table(
        head,
        [(row.method, *(figure(row.local_ms[n]) for n in EVERY)) for row in rows if row.every == 1],
    )


def recommendation(verdict: Verdict, dense: Row, bandwidth: float, beyond: bool = False) -> str:
    """Return the recommendation; `beyond` is True for more hosts than were measured."""
    best = verdict.best
    plain = _span(dense.step_span_ms, "ms")
    if best is None:
        return "Use none: there is no compressor to compare with."
    step = _span([1e3 * x for x in best.step], "ms")
    if verdict.answer == "none":
        return (
            f"Use none: a step takes {plain} without compression, and no compressor can save a "
            f"tenth of that (the fastest: {_written(best.name)}, {step})."
        )
    if verdict.answer == "use":
        low, _, high = best.pays_below
        pays = f"It pays on links slower than {_rate(low)}"
        pays = "It pays on any link" if math.isinf(low) else pays
        if high > 1.05 * low:
            pays += ", perhaps on any" if math.isinf(high) else f", perhaps up to {_rate(high)}"
        return (
            f"Use {_written(best.name)}: a step takes {step} instead of {plain}. {pays}; this one "
            f"has {_rate(bandwidth)}. Whether accuracy holds: hvd-gradcomp compare."
        )
    # More rounds narrow measured times only.
    more = f"Take more rounds (--rounds {4 * recommend.ROUNDS}) while nothing else runs here"
    if beyond:
        more = "Measure among so many hosts (-np, -H)"
    elif dense.measured_ms is None:
        more = "Let it measure whole exchanges, on hosts that have this link (-np, -H)"
    return (
        f"Cannot say: with {_written(best.name)} a step takes {step}, without compression {plain}; "
        f"the difference may be a tenth of it or more, and may be none. {more}, or try it: "
        "hvd-gradcomp compare."
    )


def _span(values: Sequence[float], unit: str) -> str:
    low, _, high = values
    return f"{between(low, high).replace('-', ' to ')} {unit}"


def _written(method: str) -> str:
    """Format a method as Python code.

    >>> _written("after(5, DGC(density=0.1), None)")
    'after(5, DGCCompressor(density=0.1), None)'
    """

    def name(match: re.Match[str]) -> str:
        class_name = f"{match[1]}Compressor"
        return f"{class_name if class_name in registry.known() else match[1]}("

    return re.sub(r"\b([A-Z]\w*)\(", name, method)


def _shards(shards: int) -> str:
    return f", for each of {shards} shards" if shards > 1 else ""


def _rate(bits_per_second: float) -> str:
    """Format a bandwidth in a suitable unit."""
    if bits_per_second == 0:
        return "never"
    if math.isinf(bits_per_second):
        return "any"
    for unit, size in (("Gb/s", 1e9), ("Mb/s", 1e6)):
        if bits_per_second >= size:
            return f"{bits_per_second / size:.3g} {unit}"
    return f"{bits_per_second / 1e3:.3g} kb/s"


def draw(path: Path, advised: dict[str, Any], rows: Sequence[Row]) -> None:
    """Plot the speedup by number of hosts, a line for each method but the dense one."""
    rows = rows[1:]
    with options.drawing(path, 9, 5) as axes:
        for row, line in zip(rows, style.lines(len(rows))):
            axes.plot(HOSTS, [row.hosts[n] for n in HOSTS], markersize=4, label=row.method, **line)
        axes.axhline(1, color=style.INK, linewidth=1)
        axes.set(
            xscale="log", yscale="log", xlabel="hosts", ylabel="times faster than dense, a step"
        )
        axes.set_xticks(HOSTS, [str(hosts) for hosts in HOSTS])
        axes.set_title(f"{advised['model']} at {_rate(advised['bandwidth'])}, predicted")
        axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
