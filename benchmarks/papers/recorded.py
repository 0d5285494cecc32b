"""Results by case, in a file that is written after each."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

R = TypeVar("R", bound="Recorded")


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

    Attributes:
        name: of the file, without its ending.
        cases: all that there can be, in order.
    """

    name: ClassVar[str]
    cases: ClassVar[Sequence[Case]]

    def __init__(self, folder: Path) -> None:
        self.path = folder / f"{self.name}.json"
        rows = json.loads(self.path.read_text()) if self.path.exists() else []
        self._rows: dict[str, dict[str, Any]] = {row["key"]: row for row in rows}

    @classmethod
    def beside(cls: type[R], folder: Path) -> R:
        """Return the results for the rows of a folder; those of long trainings have none there."""
        return cls(folder if (folder / f"{cls.name}.json").exists() else folder.parent / "papers")

    def __getitem__(self, key: str) -> dict[str, Any] | None:
        """Return a result whose settings are still those of its case; else None."""
        settings = next(case.settings for case in self.cases if case.key == key)
        row = self._rows.get(key)
        return row if row and row["settings"] == settings else None

    def add(self, case: Case, result: dict[str, Any]) -> None:
        """Keep a result, in the place of an older one, and write the file anew."""
        self._rows[case.key] = {"key": case.key, "settings": case.settings, **result}
        rows = [self._rows[one.key] for one in self.cases if one.key in self._rows]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fresh = self.path.with_suffix(".new")
        fresh.write_text("[\n" + ",\n".join(f"  {json.dumps(row)}" for row in rows) + "\n]\n")
        os.replace(fresh, self.path)
