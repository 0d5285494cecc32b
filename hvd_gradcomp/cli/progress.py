"""Progress of a command."""

from __future__ import annotations

import os
import time

import rich.progress
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TimeElapsedColumn

from hvd_gradcomp.cli.launching import TERMINAL
from hvd_gradcomp.cli.output import duration

EVERY = 10.0  # seconds between progress lines


class Progress:
    """Progress of a command on rank 0's stderr: a bar on a terminal, otherwise lines.

    Args:
        total: number of parts.
        shown: True on the rank that shows it.
    """

    def __init__(self, total: int, shown: bool = True) -> None:
        columns = os.environ.get(TERMINAL)  # the launcher's terminal, hidden behind a pipe
        self._console = Console(
            stderr=True,
            quiet=not shown,
            highlight=False,
            emoji=False,
            force_terminal=True if columns else None,
            width=int(columns) - 1 if columns else None,
        )
        self._total, self._done, self._what = total, 0, ""
        self._started = self._last_shown = time.monotonic()
        columns_ = (SpinnerColumn(), "{task.description}", BarColumn(), MofNCompleteColumn())
        self._bar = rich.progress.Progress(
            *columns_, TimeElapsedColumn(), console=self._console, transient=True
        )
        self._task = self._bar.add_task("", total=total)

    def __enter__(self) -> Progress:
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._console.is_terminal:
            self._bar.stop()

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self._console.print(text, markup=False, soft_wrap=True)

    def begin(self, what: str) -> None:
        """Begin the next part."""
        self._what = what
        self._bar.update(self._task, description=what)
        self._line()

    def end(self, amount: int = 1) -> None:
        """Mark `amount` parts as done."""
        self._done += amount
        self._bar.advance(self._task, amount)
        if time.monotonic() - self._last_shown > EVERY:
            self._line()

    def _line(self) -> None:
        self._last_shown = time.monotonic()
        if not self._console.is_terminal:
            self.say(f"  {self._done}/{self._total}  {self._what}{self._left()}")

    def _left(self) -> str:
        """Say how long the rest takes, by what is done; "" while that took little time."""
        passed = self._last_shown - self._started
        if not self._done or passed < EVERY:
            return ""
        left = passed / self._done * (self._total - self._done)
        return f", about {duration(left)} left" if left > EVERY else ""
