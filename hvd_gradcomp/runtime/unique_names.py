"""Names for what travels, given alike on all ranks."""

from __future__ import annotations


class UniqueNames:
    """Numbers the engines of a process. All ranks take one for each, in the process set or not.

    Attributes:
        number: the next one.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix, self.number = prefix, 0

    def draw(self) -> int:
        """The next number."""
        self.number += 1
        return self.number - 1

    def take(self) -> str:
        """The name of the next engine."""
        return f"{self._prefix}.{self.draw()}"

    def go_on_from(self, number: int) -> None:
        """Continues another rank's numbers, where this one began later."""
        self.number = number
