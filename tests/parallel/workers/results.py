"""What a worker writes for the test that started it."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any

import numpy as np


def write(folder: str, rank: int, result: Any) -> None:
    Path(folder, f"{rank}.json").write_text(json.dumps(result))


def finish(hvd: Any, folder: str, result: Any) -> None:
    """Writes, and ends with all ranks: one that ends sooner takes Horovod from the others.

    Where the last cases are a rank's own, the others may have left long ago.
    """
    write(folder, hvd.rank(), result)
    has = hasattr(hvd, "allgather_object")  # Keras's module has not
    (hvd if has else import_module("horovod.tensorflow")).allgather_object(None, name="end")
    hvd.shutdown()


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


@contextmanager
def on_timeline(hvd: Any, folder: str, **options: Any) -> Iterator[None]:
    """Runs Horovod with a timeline, and starts it anew without one: its writer never sleeps.

    It takes what is left of a core, as long as Horovod runs. MPI starts once in a process: what is
    started here Horovod does not end.
    """
    if "OMPI_COMM_WORLD_RANK" in os.environ:
        import_module("mpi4py.MPI")
    os.environ["HOROVOD_TIMELINE"] = str(Path(folder, "timeline.json"))
    hvd.init(**options)
    yield
    hvd.shutdown()
    del os.environ["HOROVOD_TIMELINE"]


def digest(arrays: Iterable[Any]) -> str:
    """Equal only if all bits are."""
    total = hashlib.sha256()
    for x in arrays:
        total.update(np.ascontiguousarray(x).tobytes())
    return total.hexdigest()


def flipped(folder: Path, rank: int, load: Any, barrier: Any, times: int) -> dict[str, list[str]]:
    """What a load says after each of some flips of one bit, by the file of a checkpoint."""
    version = (folder / "current").read_text().split()[0]
    messages: dict[str, list[str]] = {}
    for name in ("current", "manifest", "shared", "rank-0-of-2", "rank-1-of-2"):
        path = folder / name if name == "current" else folder / version / name
        whole, random = path.read_bytes(), Random(name)
        for _ in range(times):
            damaged = bytearray(whole)
            damaged[random.randrange(len(whole))] ^= 1 << random.randrange(8)
            barrier()
            if rank == 0:
                path.write_bytes(damaged)
            barrier()
            messages.setdefault(name, []).append(errors_of({name: load})[name])
        barrier()
        if rank == 0:
            path.write_bytes(whole)
        barrier()
    return messages


def forged(version: Path, name: str, data: bytes) -> None:
    """Changes a file of a checkpoint, and makes every checksum right again."""
    manifest = json.loads((version / "manifest").read_text())
    (version / name).write_bytes(data)
    manifest[name] = [len(data), hashlib.sha256(data).hexdigest()]
    text = json.dumps(manifest).encode()
    (version / "manifest").write_bytes(text)
    pointer = f"{version.name} {hashlib.sha256(text).hexdigest()}"
    (version.parent / "current").write_text(pointer)


def errors_of(cases: dict[str, Any]) -> dict[str, str]:
    """What each case raises."""
    results = {}
    for name, case in cases.items():
        print("case:", name, flush=True)  # the last one is what hangs, should one hang
        try:
            case()
            results[name] = "nothing was raised"
        except Exception as error:
            results[name] = f"{type(error).__name__}: {error}"
    return results
