"""Inspection of installed packages in a separate process: an import may crash, abort or hang.

    python -m hvd_gradcomp.cli.inspection torch

prints facts as lines of JSON, each as soon as it is known, so those before a crash count.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

_MARK = "@inspection "
_GRACE = 5  # seconds between SIGTERM and SIGKILL
_QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3"}

Facts = dict[str, Any]


def run(
    command: Sequence[str], timeout: float, environment: Mapping[str, str] = _QUIET
) -> tuple[int | None, str]:
    """Run a command and its child processes with a timeout.

    Args:
        command: program and arguments.
        timeout: seconds.
        environment: variables in addition to this process's own.

    Returns:
        Its exit code, None after a timeout, and its output.
    """
    with tempfile.TemporaryFile() as output:
        job = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        code: int | None = None
        try:
            code = job.wait(timeout)
        except subprocess.TimeoutExpired:
            pass
        finally:  # also on Ctrl-C, which does not reach another session
            _end(job)
        output.seek(0)
        return code, output.read().decode(errors="replace")


def _end(job: subprocess.Popen[bytes]) -> None:
    """Terminate a process and its group: launchers terminate their ranks on SIGTERM."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if job.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.wait(_GRACE)


def inspect(subject: str, timeout: float, *arguments: str) -> Facts:
    """Inspect a subject in a separate process.

    Args:
        subject: a name in `_SUBJECTS`.
        timeout: seconds.
        arguments: for the subject.

    Returns:
        The facts, empty if it is not installed; with "error" if they are incomplete.
    """
    command = [sys.executable, "-m", __spec__.name, subject, *arguments]
    code, output = run(command, timeout)
    facts: Facts = {}
    printed = []
    for line in output.splitlines():
        if line.startswith(_MARK):
            facts.update(json.loads(line[len(_MARK) :]))
        else:
            printed.append(line)
    if code is None:
        facts["error"] = f"it hangs: no answer in {timeout:g} s"
    elif code < 0:
        last = "".join(f"; it said: {line.strip()}" for line in printed[-1:])
        facts["error"] = f"the process died of {signal.Signals(-code).name}{last}"
    elif code > 0:
        facts.setdefault("error", "\n".join(printed[-3:]))
    return facts


def _horovod() -> Iterator[Facts]:
    if importlib.util.find_spec("horovod") is None:
        return
    import horovod

    root = Path(horovod.__file__).parent
    yield {"version": horovod.__version__, "path": str(root)}
    built = root / "metadata.json"  # written by its build
    yield {"built": json.loads(built.read_text()) if built.exists() else {}}


def _torch() -> Iterator[Facts]:
    if importlib.util.find_spec("torch") is None:
        return
    import torch

    yield {"version": torch.__version__, "path": str(Path(torch.__file__).parent)}
    yield {"gpu": torch.cuda.is_available()}
    if importlib.util.find_spec("torch.distributed") is not None:
        import torch.distributed as dist

        yield {"ddp": dist.is_available() and dist.is_gloo_available()}
        yield {"fsdp": dist.is_available() and _has_fsdp2()}
    if importlib.util.find_spec("horovod") is None:
        return
    import horovod.torch as horovod

    if not hasattr(horovod, "init"):  # the import only prints this error
        raise ImportError("Extension horovod.torch has not been built")
    yield _backends(horovod)
    from horovod.torch.optimizer import _DistributedOptimizer

    import hvd_gradcomp.torch
    from hvd_gradcomp.torch.drop_in.optimizer import check_seam

    check_seam(_DistributedOptimizer)
    yield {"seam": hvd_gradcomp.torch.__name__}


def _has_fsdp2() -> bool:
    """Return True if this package compresses for `fully_shard` of this PyTorch."""
    try:
        import hvd_gradcomp.torch.fsdp  # noqa: F401
    except ImportError:
        return False
    return True


def _tensorflow() -> Iterator[Facts]:
    if importlib.util.find_spec("tensorflow") is None:
        return
    import tensorflow

    yield {"version": tensorflow.__version__, "path": str(Path(tensorflow.__file__).parent)}
    yield {"gpu": bool(tensorflow.config.list_physical_devices("GPU"))}
    from hvd_gradcomp.ops.tensorflow import library

    yield {"operations": library() is not None}
    if importlib.util.find_spec("keras") is None:
        yield {"keras": None}
    else:
        import keras

        yield {"keras": keras.__version__}
    if importlib.util.find_spec("horovod") is None:
        return
    import horovod.tensorflow as horovod

    yield _backends(horovod)
    import hvd_gradcomp.tensorflow
    from hvd_gradcomp.tensorflow.tape import check_seam

    check_seam(horovod.DistributedGradientTape(tensorflow.GradientTape()))
    yield {"seam": hvd_gradcomp.tensorflow.__name__}


def _backends(horovod: Any) -> Facts:
    return {
        "gloo": horovod.gloo_built(),
        "mpi": horovod.mpi_built(),
        "nccl": bool(horovod.nccl_built()),
    }


def _addresses(*hosts: str) -> Iterator[Facts]:
    for host in hosts:
        try:
            addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except OSError:
            addresses = []
        yield {host: list(dict.fromkeys(address[0] for *_, address in addresses))}


_SUBJECTS = {
    "horovod": _horovod,
    "torch": _torch,
    "tensorflow": _tensorflow,
    "addresses": _addresses,
}


def main(subject: str, *arguments: str) -> None:
    """Print the facts; exit with 1 if an inspection raises."""
    try:
        for facts in _SUBJECTS[subject](*arguments):
            print(f"\n{_MARK}{json.dumps(facts)}", flush=True)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        print(f"\n{_MARK}{json.dumps({'error': reason})}", flush=True)
        sys.exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
