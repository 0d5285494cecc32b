"""Progress of one rank in its rounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hvd_gradcomp.algorithms.local_steps import LocalSchedule


@dataclass
class Progress:
    """Counters of steps and rounds.

    Attributes:
        schedule: of the exchanges.
        steps: local steps so far, skipped ones included.
        clock: steps that the schedule counts.
        rounds: exchanges of the whole model that were applied so far.
        started: the global parameters have their first values.
        loaded: a state was loaded since the last step.
    """

    schedule: LocalSchedule
    steps: int = 0
    clock: int = 0
    rounds: int = 0
    started: bool = False
    loaded: bool = False

    @property
    def warms_up(self) -> bool:
        """Return True if the next step averages gradients."""
        return self.schedule.warms_up(self.clock + 1)

    def count_step(self) -> None:
        """Count a step."""
        self.clock, self.steps = self.clock + 1, self.steps + 1

    def begin_round(self, clocks: list[int]) -> None:
        """Begin the schedule's next round after an exchange that it did not ask for.

        Args:
            clocks: of all ranks, which may have made different numbers of steps.
        """
        every, warm = self.schedule.every, self.schedule.warmup_steps
        self.clock = warm + (max(clocks) - warm + every - 1) // every * every

    def save(self) -> dict[str, Any]:
        """Return what a checkpoint holds."""
        return {
            "started": self.started,
            "steps": self.steps,
            "clock": self.clock,
            "rounds": self.rounds,
        }

    def load(self, saved: Mapping[str, Any]) -> None:
        """Load what `save` returned."""
        self.started, self.loaded = saved["started"], True
        self.clock, self.steps, self.rounds = saved["clock"], saved["steps"], saved["rounds"]
