"""What an attack comes to, and the table of all.

Imports no framework: the site makes its page of what was measured with this.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

MEANINGS = {
    "ended": "all ranks stopped with an error that names the cause",
    "undone": "the step was left out, and everything is as if it had not been, to the bit",
    "survived": "training or loading went on, with the right result",
    "unchecked": "a wrong value was taken, equal on all ranks, where the README says nothing looks",
    "unexplained": "ended, with an error that does not name the cause",
    "hung": "a rank waited for longer than 60 seconds",
    "lost": "part of a gradient or of a state is gone without a word",
    "diverged": "ranks differ, or something else than what was saved or sent was taken",
    "doubled": "two exchanges of one model ran, without a word",
    "altered": "the training went another way than without the situation, without a word",
    "failed": "an error, where nothing was wrong",
    "late": "ended with an error that names the cause, but not in the first step",
    "leaked": "what was dropped still holds descriptors, threads, process groups or models",
}
BAD = (
    *("unexplained", "hung", "lost", "diverged"),
    *("doubled", "altered", "failed", "late", "leaked"),
)
_FEW = 20  # bad inputs of a row that are listed
_WIDE = 200  # characters of such a line


class Input(NamedTuple):
    """One input, and what came of it.

    Attributes:
        where: the framework, and what runs.
        attack: what was done.
        outcome: of `MEANINGS`.
        said: by the first rank that said anything; the error's name and its text.
        seconds: from the mistake to the error on the last rank; None where it is not waited for.
        case: what else it takes to do the same again, beside the seed.
    """

    where: str
    attack: str
    outcome: str
    message: str = ""
    seconds: float | None = None
    case: str = ""


def tallied(inputs: Iterable[Input]) -> list[dict[str, Any]]:
    """One row for each attack in each place, in the order in which they came."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for one in inputs:
        if one.outcome not in MEANINGS:
            raise ValueError(f"there is no outcome {one.outcome!r}")
        row = rows.setdefault(
            (one.where, one.attack),
            {
                "where": one.where,
                "attack": one.attack,
                "inputs": 0,
                "outcomes": {},
                "seconds": None,
                "errors": {},
                "bad": [],
            },
        )
        row["inputs"] += 1
        row["outcomes"] = dict(Counter(row["outcomes"]) + Counter([one.outcome]))
        error = one.message.partition(":")[0]
        if error.endswith("Error"):
            row["errors"] = dict(Counter(row["errors"]) + Counter([error]))
        if one.seconds is not None:
            row["seconds"] = round(max(one.seconds, row["seconds"] or 0.0), 1)
        if one.outcome in BAD and len(row["bad"]) < _FEW:
            row["bad"].append([one.outcome, one.case, one.message[:300]])
    return list(rows.values())


def renewed(before: Mapping[str, Any] | None, part: dict[str, Any]) -> dict[str, Any]:
    """A part of which some places were gone through again; the others stay as they were."""
    if before is None:
        return part
    places = {row["where"] for row in part["rows"]}
    kept = [row for row in before["rows"] if row["where"] not in places]
    if not kept:
        return part
    seconds = before["seconds"] + part["seconds"]
    return {**part, "seconds": seconds, "rows": [*kept, *part["rows"]]}


def bad(parts: Mapping[str, Any]) -> int:
    """How many inputs came to what must not be."""
    return sum(
        row["outcomes"].get(outcome, 0)
        for part in parts.values()
        for row in part["rows"]
        for outcome in BAD
    )


def table(parts: Mapping[str, Any]) -> str:
    """What was tried and what came of it, as text.

    Args:
        parts: by name: seed, seconds, and `rows` of `tallied`.
    """
    lines = []
    for name, part in parts.items():
        count = sum(row["inputs"] for row in part["rows"])
        lines += [f"{name}: {count} inputs, seed {part['seed']}, {part['seconds']:.0f} s", ""]
        lines += _aligned([_cells(row) for row in part["rows"]])
        lines.append("")
    everything = [row for part in parts.values() for row in part["rows"]]
    total: Counter[str] = Counter()
    for row in everything:
        total.update(row["outcomes"])
    lines.append(f"all: {sum(total.values())} inputs")
    lines += _aligned(
        [(name, str(total[name]), meaning) for name, meaning in MEANINGS.items()], ("", "", "")
    )
    for row in everything:
        for outcome, case, message in row["bad"]:
            where = f"{row['where']}, {row['attack']}"
            lines.append(f"{outcome}: {where}, {case}: {message}"[:_WIDE])
    return "\n".join(lines) + "\n"


_HEAD = ("where", "attack", "inputs", "came to", "s", "errors")


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    came = ", ".join(f"{count} {name}" for name, count in row["outcomes"].items())
    seconds = "" if row["seconds"] is None else f"{row['seconds']:.1f}"
    return row["where"], row["attack"], str(row["inputs"]), came, seconds, ", ".join(row["errors"])


def _aligned(rows: Sequence[Sequence[str]], head: Sequence[str] = _HEAD) -> list[str]:
    rows = [head, *rows] if any(head) else list(rows)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(x.ljust(w) for x, w in zip(row, widths)).rstrip() for row in rows]
