"""Results by case, in a file that is written after each."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol


class Case(Protocol):
    """Case that is measured once."""

    @property
    def key(self) -> str:
        """Return its name."""

    @property
    def settings(self) -> dict[str, Any]:
        """Return what its result depends on, for JSON."""


class Recorded:
    """Results of cases in a file, which is written after each.

    Args:
        folder: where the file is.
        name: of the file, without its ending.
        cases: all that there can be, in order.
    """

    def __init__(self, folder: Path, name: str, cases: Sequence[Case]) -> None:
        self.path, self._cases = folder / f"{name}.json", cases
        rows = json.loads(self.path.read_text()) if self.path.exists() else []
        self._rows: dict[str, dict[str, Any]] = {row["key"]: row for row in rows}

    def __getitem__(self, key: str) -> dict[str, Any] | None:
        """Return a result whose settings are still those of its case; else None."""
        settings = next(case.settings for case in self._cases if case.key == key)
        row = self._rows.get(key)
        return row if row and row["settings"] == settings else None

    def add(self, case: Case, result: dict[str, Any]) -> None:
        """Keep a result, in the place of an older one, and write the file anew."""
        self._rows[case.key] = {"key": case.key, "settings": case.settings, **result}
        rows = [self._rows[one.key] for one in self._cases if one.key in self._rows]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fresh = self.path.with_suffix(".new")
        fresh.write_text("[\n" + ",\n".join(f"  {json.dumps(row)}" for row in rows) + "\n]\n")
        os.replace(fresh, self.path)


def folder_of(folder: Path, name: str) -> Path:
    """Return where a file is: in this folder, or in that of short trainings beside it."""
    return folder if (folder / f"{name}.json").exists() else folder.parent / "papers"
