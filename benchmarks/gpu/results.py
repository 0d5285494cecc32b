"""File of all results, written after each row, and what it says as tables."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.gpu.part import Row
from benchmarks.gpu.requirements import NEEDS


class Results:
    """Results of one machine, by part.

    Args:
        path: of the file, whose results are kept.
        machine: where it is measured.

    Raises:
        ValueError: the file has results of another machine.
    """

    def __init__(self, path: Path, machine: dict[str, Any]) -> None:
        self.path, self.machine = path, machine
        self.parts: dict[str, dict[str, Any]] = {}
        if path.exists():
            kept = json.loads(path.read_text())
            if kept["machine"] != json.loads(json.dumps(machine)):
                raise ValueError(f"{path} has results of another machine: pass another --folder")
            self.parts = kept["parts"]

    def rows(self, part: str) -> list[Row]:
        return list(self.parts.get(part, {}).get("rows", []))

    def left(self, part: str, names: Iterable[str]) -> list[str]:
        """Return the names that have no row yet, or one with an error, or that was cut."""
        done = {row["name"] for row in self.rows(part) if not _lacks(row)}
        return [name for name in names if name not in done]

    def add(self, part: str, row: Row) -> None:
        """Add a row, in the place of one of the same name."""
        others = [each for each in self.rows(part) if each["name"] != row["name"]]
        self.parts[part] = {"rows": [*others, row]}
        self.save()

    def end(self, part: str, left: list[str], error: str = "") -> None:
        """Say what a part has left out, and what has stopped it."""
        outcome: dict[str, Any] = {"rows": self.rows(part), "left": left}
        self.parts[part] = {**outcome, "error": error} if error else outcome
        self.save()

    def skip(self, part: str, why: str) -> None:
        """Say why a part is not run."""
        if not self.rows(part):
            self.parts[part] = {"not run": why}
        self.save()

    def failed(self) -> bool:
        """Return True if a part or a row has an error."""
        return any(
            "error" in part or any("error" in row for row in part.get("rows", []))
            for part in self.parts.values()
        )

    def save(self) -> None:
        """Write the file and the table beside it, each at once."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        kept = json.dumps({"machine": self.machine, "parts": self.parts}, indent=1) + "\n"
        for path, text in ((self.path, kept), (self.path.with_suffix(".md"), self.table())):
            scratch = path.with_name(path.name + ".part")
            scratch.write_text(text)
            scratch.replace(path)

    def table(self) -> str:
        """Return all of it as Markdown."""
        lines = ["| part | what came of it |", "|---|---|"]
        parts = sorted(self.parts.items(), key=lambda item: [*NEEDS].index(item[0]))
        lines += [f"| {part} | {_summary(outcome)} |" for part, outcome in parts]
        if self.machine.get("kernels") is False:  # all that is measured is of plain ops
            lines += ["", "PyTorch took no kernels here."]
        for part, outcome in parts:
            rows = outcome.get("rows", [])
            if any("calls" in row for row in rows):
                lines += self._counts(rows)
            elif any("ms" in row or " | " in row["name"] for row in rows):
                lines += _times(part, rows)
        return "\n".join(lines) + "\n"

    def _counts(self, rows: list[Row]) -> list[str]:
        calls = "launches" if self.machine["device"] == "cuda" else "operators"
        lines = ["", f"| point | copies | {calls} a bucket | extra memory, buckets |"]
        lines.append("|---|--:|--:|--:|")
        for row in rows:
            point = row["name"].partition(" | ")[0]
            if _lacks(row):
                lines.append(f"| {point} | {_last_line(row)} | | |")
            else:
                numbers = row["copies"], row["calls"] / row["buckets"], row["extra_buckets"]
                lines.append(f"| {point} | " + " | ".join(f"{x:.2f}" for x in numbers) + " |")
        return lines


def _summary(outcome: dict[str, Any]) -> str:
    """Return what came of a part, in a line."""
    if "not run" in outcome:
        return f"not run: {outcome['not run']}"
    rows, parts = outcome.get("rows", []), []
    if any("passed" in row for row in rows):
        for row in rows:
            counts = ", ".join(f"{row[key]} {key}" for key in ("passed", "failed", "skipped"))
            parts.append(f"{row['name']}: {counts}{_because(row)}")
    else:
        errors, cut = (sum(key in row for row in rows) for key in ("error", "cut"))
        parts.append(f"{len(rows) - errors - cut} measured")
        parts += [f"{errors} failed"] if errors else []
        parts += [f"{cut} stopped"] if cut else []
    if left := outcome.get("left"):
        methods = ", ".join(name.partition(" | ")[0] for name in left)
        parts.append(f"no time for {len(left)}: {methods}")
    return "; ".join(parts) + _because(outcome)


def _lacks(row: Row) -> bool:
    return "error" in row or "cut" in row


def _because(outcome: dict[str, Any]) -> str:
    return f" ({_last_line(outcome)})" if _lacks(outcome) else ""


def _last_line(outcome: dict[str, Any]) -> str:
    """Return what has failed, or why it was cut, for a cell."""
    text = str(outcome.get("error") or outcome["cut"])
    return text.strip().splitlines()[-1].replace("|", "/")


def _times(part: str, rows: list[Row]) -> list[str]:
    heads = part, "over", "ranks", "ms a step", "first", "without exchange", "a round", "bytes sent"
    lines = ["", f"| {' | '.join(heads)} |", "|---|---|--:|--:|--:|--:|--:|--:|"]
    for row in rows:
        if _lacks(row):
            lines.append(f"| {row['name']} | {_last_line(row)} | | | | |")
            continue
        keys = "ms", "first_ms", "step_ms", "round_ms"
        cells = [f"{row[key]:.1f}" if key in row else "" for key in keys]
        cells.append(f"{row['bytes_sent']:,}" if row["bytes_sent"] else "")
        lines.append(f"| {row['name']} | {' | '.join(cells)} |")
    return lines
