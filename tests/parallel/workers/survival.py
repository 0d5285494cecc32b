"""What elastic workers share: a diary for each process, and a host that is found later."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


class Diary:
    """Events of this process, one a line, on disk at once: it may be killed."""

    def __init__(self, folder: str) -> None:
        self._path = Path(folder, f"process-{os.getpid()}.jsonl")

    def note(self, event: str, **facts: Any) -> None:
        with self._path.open("a") as stream:
            stream.write(json.dumps({"event": event, **facts}) + "\n")


def open_slot(folder: str) -> None:
    """Lets the discovery script find one more host."""
    Path(folder, "hosts").write_text(Path(folder, "hosts.later").read_text())
