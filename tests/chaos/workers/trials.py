"""What attacked ranks share: one trial after another, each with a time limit, noted on disk."""

from __future__ import annotations

import faulthandler
import itertools
import json
import os
import resource
import signal
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import hvd_gradcomp

PACKAGE = Path(hvd_gradcomp.__file__).parent
LIMIT = 60  # seconds that a rank may wait because of what another one did
_SLACK = 15  # for what comes before the mistake, and for a machine that is busy
# After these Horovod still has requests, or takes none: the next case needs other processes.
ENDS = (
    "HorovodInternalError",
    "gradcomp.checkpoint.sz",
    "saves or loads a checkpoint",
    "same name as",
    "a loss scaler",
    "Horovod has been shut down",
    "waits for barrier",
)


class Trial:
    """One attack.

    Attributes:
        folder: of its own; all ranks have the same.
        made: whether this rank has made its mistake.
        details: what is written beside the result.
    """

    def __init__(self, folder: Path, rank: int, name: str) -> None:
        self.folder = folder / name.replace(" ", "-")
        self.made = False
        self.details: dict[str, Any] = {}
        self._note = folder / f"mistakes-{rank}.jsonl", name

    def now(self) -> None:
        """This rank makes the mistake now. It is on disk at once: it may be the end."""
        self.made = True
        path, name = self._note
        _append(path, {"case": name, "at": time.time()})


def run(
    folder: str,
    rank: int,
    cases: Mapping[str, Callable[[Trial], Any]],
    names: Sequence[str],
    barrier: Callable[[], Any],
) -> None:
    """Goes through trials, and writes a line of each to `FOLDER/trials-RANK.jsonl`.

    A case returns what has to be equal on all ranks if it goes on. One that hangs ends the
    process, and says in `FOLDER/hangs-RANK` where.
    """
    path = Path(folder, f"trials-{rank}.jsonl")
    # horovodrun ends the other ranks as soon as one has failed; they shall say what they saw.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with Path(folder, f"hangs-{rank}").open("w") as stream:
        for name in names:
            barrier()
            print("trial:", name, flush=True)
            trial = Trial(Path(folder), rank, name)
            faulthandler.dump_traceback_later(LIMIT + _SLACK, exit=True, file=stream)
            message, replicas = "", None
            try:
                replicas = cases[name](trial)
            except Exception as error:
                message = f"{type(error).__name__}: {error}"
                trial.details["names"] = _raised_by_package(error)
            faulthandler.cancel_dump_traceback_later()
            line = {"case": name, "said": message, "replicas": replicas, "at": time.time()}
            _append(path, {**line, **trial.details})
            if any(word in message for word in ENDS):
                raise SystemExit(1)


def meeting(folder: str, rank: int, size: int) -> Callable[[], None]:
    """Return what lets ranks meet before each trial, in a process group of their own."""
    import torch.distributed as dist  # not where TensorFlow is attacked

    met = itertools.count()

    def meet() -> None:
        """Begin anew: groups that were destroyed on some ranks would give others other names."""
        if dist.is_initialized():
            dist.destroy_process_group()
        path = Path(folder, f"met-{next(met)}").absolute()
        dist.init_process_group("gloo", f"file://{path}", rank=rank, world_size=size)

    return meet


class LocalAttacks(NamedTuple):
    """Attacks on local steps of any frontend, which supplies what they are made of.

    Attributes:
        local: returns a model and its optimizer; takes the settings of local steps.
        train: makes so many steps.
        end: exchanges, and returns a digest of the parameters.
        is_faulty: returns True on the rank that makes mistakes.
    """

    local: Callable[..., tuple[Any, Any]]
    train: Callable[[Any, Any, int], None]
    end: Callable[[Any, Any], str]
    is_faulty: Callable[[], bool]

    def alone(self, trial: Trial, change: Callable[[], Any]) -> None:
        """Do something on one rank, as its mistake."""
        if self.is_faulty():
            trial.now()
            change()

    def around(
        self, change: Callable[[Any, Any], Any], build: Any = None
    ) -> Callable[[Trial], str]:
        """Return a case: some steps, what one rank does alone, and more steps."""

        def case(trial: Trial) -> str:
            model, optimizer = (build or self.local)()
            self.train(model, optimizer, 4)
            self.alone(trial, lambda: change(model, optimizer))
            self.train(model, optimizer, 8)
            return self.end(model, optimizer)

        return case

    def other_settings(self, **more: Any) -> Callable[[Trial], str]:
        """Return a case: arguments of `local` on one rank."""

        def case(trial: Trial) -> str:
            trial.now()
            model, optimizer = self.local(**(more if self.is_faulty() else {}))
            self.train(model, optimizer, 12)
            return self.end(model, optimizer)

        return case


def _raised_by_package(error: BaseException) -> bool:
    """Return True if a `raise` of the package's raised an error, not what it has called."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = Path(frames[-1].filename).is_relative_to(PACKAGE)
    return ours and (frames[-1].line or "").startswith("raise")


def _append(path: Path, line: dict[str, Any]) -> None:
    with path.open("a") as stream:
        stream.write(json.dumps(line) + "\n")


def stop_for(seconds: float) -> None:
    """Stops this process, which another one lets go on."""
    subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


def stop_for_ever() -> None:
    """Stops this process; it is killed once nobody can wait for it any more, or it would stay."""
    subprocess.Popen(["sh", "-c", f"sleep {LIMIT + 2 * _SLACK}; kill -KILL {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


@contextmanager
def full_disk(size: int = 2000) -> Iterator[None]:
    """No file of this process can grow beyond so many bytes."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
