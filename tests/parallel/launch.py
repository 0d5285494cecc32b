"""Starts real Horovod processes and hands back what each rank wrote."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def launch(
    worker: str,
    ranks: int,
    backend: str,
    folder: Path,
    *arguments: str,
    deadline: float = 400.0,
    fails: bool = False,
) -> list[Any]:
    """Runs `python -m tests.parallel.workers.<worker> FOLDER ...` on some ranks.

    Each rank writes `FOLDER/<rank>.json` by itself, so that nothing that is tested carries the
    result.

    Args:
        worker: the module's name.
        ranks: how many.
        backend: "gloo" or "mpi".
        folder: where results go; empty.
        arguments: for the worker.
        deadline: seconds; what runs longer hangs, and fails.
        fails: the run has to end with an exit code that is not zero.

    Returns:
        What the ranks wrote, in their order; None for one that wrote nothing.
    """
    program = [sys.executable, "-m", f"tests.parallel.workers.{worker}", str(folder), *arguments]
    launcher = str(Path(sys.executable).with_name("horovodrun"))
    command = [launcher, f"--{backend}", "-np", str(ranks), *program]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    log = folder / "output"
    with log.open("w") as stream:
        job = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = job.wait(deadline)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)
            raise AssertionError(f"hangs: {log.read_text()[-6000:]}") from None
    output = log.read_text()[-6000:]
    assert (code != 0) == fails, output
    paths = [folder / f"{rank}.json" for rank in range(ranks)]
    results = [json.loads(p.read_text()) if p.exists() else None for p in paths]
    assert fails or None not in results, output
    return results


def on_timeline(path: Path) -> set[str]:
    """What travelled, by the names on a Horovod timeline."""
    events = json.loads(path.read_text())
    return {event["args"]["name"] for event in events if "name" in event.get("args", {})}
