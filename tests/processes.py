"""Whether processes that a test started have ended."""

from __future__ import annotations

from pathlib import Path


def alive(process: int) -> bool:
    """Not a zombie: those stay where the first process of a container waits for none."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return not stat.rpartition(") ")[2].startswith("Z")
