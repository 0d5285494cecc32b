"""Names for collectives, drawn in the same order on all ranks."""

from __future__ import annotations


class UniqueNames:
    """Counter of a process's reducers. All ranks draw each name, in the process set or not.

    Attributes:
        number: the next one.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix, self.number = prefix, 0

    def draw(self) -> int:
        """Return the next number."""
        self.number += 1
        return self.number - 1

    def take(self) -> str:
        """Return the name of the next reducer."""
        return f"{self._prefix}.{self.draw()}"

    def continue_from(self, number: int) -> None:
        """Continue another rank's numbers, if this rank started later."""
        self.number = number
