"""What a worker writes for the test that started it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np


def write(folder: str, rank: int, result: Any) -> None:
    Path(folder, f"{rank}.json").write_text(json.dumps(result))


def digest(arrays: Iterable[Any]) -> str:
    """Equal only if all bits are."""
    total = hashlib.sha256()
    for x in arrays:
        total.update(np.ascontiguousarray(x).tobytes())
    return total.hexdigest()
