"""Names for what travels, given alike on all ranks."""

from __future__ import annotations

import itertools


class Names:
    """Numbers the engines of a process. All ranks take one for each, in the process set or not."""

    def __init__(self, prefix: str) -> None:
        self._prefix, self._numbers = prefix, itertools.count()

    def draw(self) -> int:
        """The next number."""
        return next(self._numbers)

    def take(self) -> str:
        """The name of the next engine."""
        return f"{self._prefix}.{self.draw()}"

    def go_on_from(self, number: int) -> None:
        """Continues another rank's numbers, where this one began later."""
        self._numbers = itertools.count(number)
