"""Starts real Horovod processes and hands back what each rank wrote."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tests.parallel.forkserver import ROOT, python

HOROVODRUN = (sys.executable, "-m", "tests.parallel.horovodrun")
WORKERS = "tests.parallel.workers"
# They are started as usual: their ranks differ in the seed of string hashes, and their interpreters
# end after importing everything themselves.
FRESH = ("torch_features", "tensorflow_features")
LOOPBACK = ("localhost", "127.0.0.1", "127.1", "127.0.1")  # four hosts to Horovod, one machine


def environment(**variables: str) -> dict[str, str]:
    """What ranks are started in."""
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        **variables,
    }


def horovodrun(variables: Mapping[str, str], *options: str) -> list[str]:
    """Return the start of a command that runs a program on some ranks, two over gloo by default."""
    options = options or ("--gloo", "-np", "2")
    return [*python("horovodrun", variables), *HOROVODRUN[1:], *options]


def imports(*words: str) -> str:
    """Return what a program imports by the framework in its name, or else in its arguments."""
    tensorflow = any("tensorflow" in word or "keras" in word for word in words)
    return "horovod.tensorflow" if tensorflow else "horovod.torch"


def ranks_on(device: str, ranks: int) -> int:
    """How many ranks there can be: NCCL wants a GPU for each; through the host they share one."""
    if device == "cpu":
        return ranks
    import horovod.torch as horovod
    import torch

    return min(ranks, torch.cuda.device_count()) if horovod.nccl_built() else ranks


def launch(
    worker: str,
    ranks: int,
    backend: str,
    folder: Path,
    *arguments: str,
    hosts: str = "",
    deadline: float = 400.0,
    fails: bool = False,
    package: str = WORKERS,
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
        hosts: as `-H` of horovodrun takes them; this machine if empty.
        deadline: seconds; what runs longer hangs, and fails.
        fails: the run has to end with an exit code that is not zero.
        package: where the worker is.

    Returns:
        What the ranks wrote, in their order; None for one that wrote nothing.
    """
    # ms; on two cores idle threads are much of the load: at Horovod's 1 up to a third. What tests
    # start without this function has Horovod's.
    framework = imports(worker, *arguments)
    variables = {"HOROVOD_CYCLE_TIME": "5" if framework == "horovod.tensorflow" else "3"}
    output = run(
        worker,
        folder,
        f"--{backend}",
        "-np",
        str(ranks),
        *(["-H", hosts] if hosts else []),
        arguments=arguments,
        deadline=deadline,
        fails=fails,
        variables=variables,
        package=package,
    )
    paths = [folder / f"{rank}.json" for rank in range(ranks)]
    results = [json.loads(p.read_text()) if p.exists() else None for p in paths]
    assert fails or None not in results, output
    return results


def launch_elastic(
    worker: str, ranks: int, folder: Path, *, patience: int, deadline: float
) -> tuple[list[list[dict[str, Any]]], str]:
    """Runs a worker elastically on some ranks, each on a host of its own.

    The hosts are names of this machine. One that a process died on is not used again; one more is
    found once a worker calls `survival.open_slot(folder)`.

    Args:
        patience: seconds that gloo waits: for a rank that starts, which has to import its
            framework first, and for one that is gone without its neighbour's notice.

    Returns:
        The diary of each process that there was, and the end of the output.
    """
    names = [f"{name}:1" for name in LOOPBACK]
    (folder / "hosts").write_text("\n".join(names[:ranks]))
    (folder / "hosts.later").write_text("\n".join(names[: ranks + 1]))
    script = folder / "discover"
    script.write_text(f"#!/bin/sh\ncat '{folder}/hosts'\n")
    script.chmod(0o755)
    options = ["--gloo", "-np", str(ranks), "--min-np", "1", "--max-np", str(ranks)]
    options += ["--host-discovery-script", str(script), "--network-interface", "lo"]
    variables = {"HOROVOD_GLOO_TIMEOUT_SECONDS": str(patience)}
    output = run(worker, folder, *options, deadline=deadline, variables=variables)
    diaries = [
        [json.loads(line) for line in path.read_text().splitlines()]
        for path in sorted(folder.glob("process-*.jsonl"))
    ]
    return diaries, output


def run(
    worker: str,
    folder: Path,
    *options: str,
    arguments: Sequence[str] = (),
    deadline: float,
    fails: bool = False,
    variables: Mapping[str, str] = MappingProxyType({}),
    package: str = WORKERS,
) -> str:
    """Runs a worker under `horovodrun` with these options; the end of what was printed."""
    started_in = environment(**variables)
    start = python("" if worker in FRESH else imports(worker, *arguments), started_in)
    program = [*start, "-m", f"{package}.{worker}", str(folder), *arguments]
    command = [*horovodrun(started_in, *options), *program]
    log = folder / "output"
    with log.open("w") as stream:
        job = subprocess.Popen(
            command,
            cwd=ROOT,
            env=started_in,
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
    return output


def says(messages_: Mapping[str, str], messages: Mapping[str, str]) -> None:
    """Requires that each case has said what it has to say."""
    for name, message in messages.items():
        assert message in messages_[name], f"{name}: {messages_[name]}"


def on_timeline(path: Path) -> set[str]:
    """What travelled, by the names on a Horovod timeline."""
    events = json.loads(path.read_text())
    return {event["args"]["name"] for event in events if "name" in event.get("args", {})}
