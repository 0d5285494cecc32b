"""Parts that are tests of this project, on the device: the same bits, no waiting, ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from benchmarks.gpu.outcomes import FILE
from benchmarks.gpu.part import Part, Row, Setting

FILES = {
    "kernels": ("tests/triton", "--ignore=tests/triton/test_compiled.py"),  # that needs no GPU
    "reads": (
        "tests/single/test_device.py",
        "tests/single/test_golden.py",
        "tests/single/test_laws.py",
    ),
    "horovod": ("tests/parallel/test_torch.py",),
}
SELECTED = {  # of them, what says most of the device
    "kernels": "do_what or alike or large_bucket or captured_step or finite_becomes",
    "reads": "not tensorflow and not test_laws",  # beside TensorFlow no kernel would be taken
    "horovod": "gloo and (200_steps or backward)",
}
WHOLE = {"kernels": "", "reads": "not tensorflow", "horovod": SELECTED["horovod"]}
SHOWN = 20  # failed tests, in the results


def tests(part: str, share: float) -> Part:
    """Return a part of one row, of what pytest says of some files."""

    def measure(setting: Setting, names: list[str], deadline: float) -> Iterator[Row]:
        for name in names:
            yield {"name": name, **tested(part, setting, deadline)}

    return Part(share, lambda setting: ["all tests" if setting.whole else "tests"], measure)


def tested(part: str, setting: Setting, deadline: float) -> Row:
    """Run pytest, until the deadline at the latest; return how many tests have passed or failed."""
    chosen = (WHOLE if setting.whole else SELECTED)[part]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "benchmarks.gpu.outcomes"]
    command += ["-p", "no:cacheprovider", "--device", setting.device, *FILES[part]]
    command += ["-k", chosen] if chosen else []
    command += ["-n", str(setting.workers)] if setting.workers else []
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "outcomes")
        file.touch()
        # Called by a worker of pytest-xdist, the command is none of its workers.
        outside = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_XDIST")}
        code = _code_of(command, {**outside, FILE: str(file)}, deadline)
        outcomes = [json.loads(line) for line in file.read_text().splitlines()]
    counts = Counter(outcome["outcome"] for outcome in outcomes)
    failed = [outcome for outcome in outcomes if outcome["outcome"] == "failed"]
    row: Row = {key: counts[key] for key in ("passed", "failed", "skipped")}
    row |= {"seconds": time.monotonic() - begin, "command": " ".join(command[1:])}
    row |= {"failures": failed[:SHOWN]} if failed else {}
    if failed:
        row["error"] = f"{len(failed)} failed, the first one {failed[0]['test']}"
    elif code is None:
        row["cut"] = "its time was over"
    elif code not in (0, 5):  # 5: there is no such test
        row["error"] = f"pytest ended with {code}"
    return row


def _code_of(command: list[str], environment: dict[str, str], deadline: float) -> int | None:
    """Run a command with its workers; return its code, or None if it was stopped."""
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        return process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
