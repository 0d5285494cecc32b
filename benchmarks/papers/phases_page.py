"""Times between hosts: their section of the page, and the claims that rest on them.

The time of an iteration has the computation in it, which the papers do not print. So a phase is
compared by its exchange alone, as a share of an uncompressed one.
"""

from __future__ import annotations

from benchmarks.papers.parts import NOT_RUN, Claim
from benchmarks.papers.phases import (
    BASES,
    CASES,
    COMPRESSED,
    CYCLE,
    DENSE,
    DENSE_ROUNDS,
    FULL,
    NAME,
    SAMPLED,
    SAMPLES,
    TOP_K,
    Phases,
)

TITLE = "Time between hosts"
LESS = 5.25  # times, that the aggregation of GradiVeQ takes less in the paper
ITERATIONS = {  # seconds of LGC's Table V
    "lgc-ring": {FULL: 1.0, TOP_K: 0.9, COMPRESSED: 0.4},
    "lgc-server": {FULL: 1.0, TOP_K: 1.6, COMPRESSED: 0.6},
}
HEAD = """## {title}

Seconds of a whole exchange between as many hosts as the paper has nodes, one rank each, over gloo.
The links have a rate at which the bits of an uncompressed exchange alone take so many seconds: for
GradiVeQ the 1.7 that the paper prints for its aggregation, for LGC {lgc:.0f}. LGC's paper names no
link, and its whole iteration takes a second; eight ranks on two cores take longer than that for the
work alone. Nothing is computed or learned here: gradients are noise. All ranks of GradiVeQ make
their bases at once, six on two cores here.

`make papers ARGS="--parts {name}"`, as root: {done} of {all} rows were timed; medians of {rounds}
uncompressed exchanges, and of all steps of a phase.

"""


def cycle(times: dict[str, float]) -> float:
    """Return the mean seconds of a step of GradiVeQ's cycle, of `Phases.seconds`."""
    whole = (SAMPLES - 1) * times[SAMPLED] + times[BASES] + (CYCLE - SAMPLES) * times[COMPRESSED]
    return whole / CYCLE


def aggregation(phases: Phases) -> Claim:
    """Return the claim that GradiVeQ's aggregation takes less time."""
    times = phases.seconds("gradiveq")
    ours, holds = NOT_RUN, None
    if times:
        less, compressed = times[DENSE] / cycle(times), times[DENSE] / times[COMPRESSED]
        ours = f"{less:.2f} times less in a whole cycle, {compressed:.2f} in compressed steps"
        holds = less >= LESS
    return Claim("time of aggregation", f"{LESS} times less", ours, holds, weaker=True)


def iterations(phases: Phases) -> Claim:
    """Return the claim that LGC's iterations take less time, phase by phase."""
    papers, ours, holds = [], [], []
    for key, paper in ITERATIONS.items():
        name = key.partition("-")[2]
        papers.append(f"{name} " + ", ".join(f"{seconds:g} s" for seconds in paper.values()))
        times = phases.seconds(key)
        if times:
            shares = {phase: times[phase] / times[FULL] for phase in paper}
            ours.append(f"{name} " + ", ".join(f"{share:.2f}" for share in shares.values()))
            holds += [shares[phase] <= paper[phase] / paper[FULL] for phase in paper]
    return Claim(
        "time of an iteration by phase: full, top-k, compressed",
        "; ".join(papers),
        f"exchanges alone, in full ones: {'; '.join(ours)}" if ours else NOT_RUN,
        all(holds) if ours else None,
        weaker=True,
    )


def section(phases: Phases) -> str:
    """Return the section; empty if nothing was timed."""
    timed = [case for case in CASES if phases[case.key]]
    if not timed:
        return ""
    lines = [
        "| method | network | hosts | link, Mb/s | phase | seconds | times less than dense |",
        "|---|---|--:|--:|---|--:|--:|",
    ]
    for case in timed:
        row = phases[case.key] or {}
        link = f"{float(row['rate'].removesuffix('kbit')) / 1e3:.1f}"
        times = phases.seconds(case.key)
        for phase, seconds in times.items():
            less = times[DENSE] / seconds
            cells = [case.title, case.network, str(case.ranks), link, phase]
            lines.append(f"| {' | '.join([*cells, f'{seconds:.2f}', f'{less:.1f}'])} |")
    head = HEAD.format(
        title=TITLE,
        name=NAME,
        done=len(timed),
        all=len(CASES),
        rounds=DENSE_ROUNDS,
        lgc=next(case.dense for case in CASES if case.key == "lgc-ring"),
    )
    return head + "\n".join(lines) + "\n\n"
