"""What a worker writes for the test that started it."""

from __future__ import annotations

import hashlib
import json
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np


def write(folder: str, rank: int, result: Any) -> None:
    Path(folder, f"{rank}.json").write_text(json.dumps(result))


@contextmanager
def noted(folder: str, rank: int) -> Iterator[None]:
    """Writes what ends this rank.

    horovodrun ends the other ranks as soon as one has failed; they shall say what they saw.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    except Exception as error:
        write(folder, rank, [type(error).__name__, str(error)])
        raise


def digest(arrays: Iterable[Any]) -> str:
    """Equal only if all bits are."""
    total = hashlib.sha256()
    for x in arrays:
        total.update(np.ascontiguousarray(x).tobytes())
    return total.hexdigest()


def errors_of(cases: dict[str, Any]) -> dict[str, str]:
    """What each case raises."""
    found = {}
    for name, case in cases.items():
        print("case:", name, flush=True)  # the last one is what hangs, should one hang
        try:
            case()
            found[name] = "nothing was raised"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found
