"""Starts the ranks of a command by horovodrun, and shows what rank 0 prints.

horovodrun puts `[0]<stdout>:` before each line of each rank. Here that is taken off again, and what
other ranks and horovodrun itself say is held back: it is shown if the run fails and says something
that rank 0 has not said.
"""

from __future__ import annotations

import functools
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from threading import Thread
from typing import IO, Any

import click

TERMINAL = "HVD_GRADCOMP_TERMINAL"  # columns of the terminal that rank 0's stderr ends on
_RANK = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "TORCHELASTIC_RUN_ID")
_ENDED = "Terminated\n"  # as a shell says of ranks that horovodrun ends because another failed
# Of gloo, of mpirun, and of torchrun.
_PREFIX = re.compile(r"\[(?:\d+,|default)?(\d+)\](?:<std(?:out|err)>)?:")


def with_ddp(command: Callable[..., Any]) -> Callable[..., Any]:
    """`--ddp` beside `-np`, for ranks of `torch.distributed`; comes before `with_ranks`."""

    @click.option(
        "--ddp",
        is_flag=True,
        help="Start the ranks of -np here, by torchrun: for DistributedDataParallel, without "
        "Horovod. On several hosts start torchrun yourself, with -m hvd_gradcomp.",
    )
    @functools.wraps(command)
    def started(*, ddp: bool, **given: Any) -> Any:
        if not ddp or any(name in os.environ for name in _RANK):
            return command(**given)
        ranks = given["ranks"] or 1
        if given["hosts"] is not None:
            raise click.UsageError("--ddp starts ranks here; on several hosts start torchrun")
        if find_spec("torch") is None:
            raise click.ClickException("--ddp starts ranks of PyTorch, which is not installed")
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--tee", "3"]
        program = ["--nproc-per-node", str(ranks), "-m", "hvd_gradcomp", *sys.argv[1:]]
        sys.exit(run([*torchrun, *program]))

    return started


def with_ranks(command: Callable[..., Any]) -> Callable[..., Any]:
    """`-np` and `-H`, with which a command starts its ranks itself."""

    @click.option(
        "-np", "ranks", type=click.IntRange(1), help="Start so many ranks, by horovodrun."
    )
    @click.option("-H", "--hosts", metavar="HOST:RANKS,...", help="Where. Default: here.")
    @click.option(
        "--horovodrun",
        "words",
        default="--gloo",
        show_default=True,
        metavar="OPTIONS",
        help='Its other options, such as "--mpi" or "--gloo --network-interfaces eth0".',
    )
    @functools.wraps(command)
    def started(*, ranks: int | None, hosts: str | None, words: str, **given: Any) -> Any:
        if any(name in os.environ for name in _RANK):
            return command(**given)
        if ranks is None:
            if hosts is not None:
                raise click.UsageError("-H says where ranks run; say with -np how many")
            return command(**given)
        if find_spec("horovod") is None:
            raise click.ClickException(
                "-np starts ranks by horovodrun, and Horovod is not installed: `hvd-gradcomp "
                "doctor` says what to do"
            )
        where = ["-H", hosts] if hosts else []
        program = [sys.executable, "-m", "hvd_gradcomp", *sys.argv[1:]]
        launch = [sys.executable, "-m", "horovod.runner.launch", *shlex.split(words)]
        sys.exit(run([*launch, "-np", str(ranks), *where, *program]))

    return started


def run(command: list[str]) -> int:
    """Runs a launcher of ranks, and shows what rank 0 says; the exit status."""
    environment = dict(os.environ)
    if sys.stderr.isatty():
        environment[TERMINAL] = str(os.get_terminal_size(sys.stderr.fileno()).columns)
    job = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    said: list[tuple[str | None, str]] = []  # (rank, line); no rank of the launcher's own
    found = io.StringIO()  # what a command finds, shown below how it went: these are two pipes
    streams = ((job.stdout, found), (job.stderr, sys.stderr))
    threads = [Thread(target=_follow, args=(*pair, said)) for pair in streams]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    code = job.wait()
    click.echo(found.getvalue(), nl=False)
    if code:
        _explain(said)
    return code


def _follow(source: IO[bytes], target: IO[str], said: list[tuple[str | None, str]]) -> None:
    for line in _lines(source):
        found = _PREFIX.match(line)
        rank, text = (found[1], line[found.end() :]) if found else (None, line)
        if text == _ENDED:
            continue
        said.append((rank, text))
        if rank == "0":
            target.write(text)
            target.flush()


def _lines(source: IO[bytes]) -> Iterator[str]:
    """Each with its end; a carriage return, by which a bar is drawn anew, is one too."""
    rest = b""
    while read := os.read(source.fileno(), 4096):
        *whole, rest = re.split(rb"(?<=[\r\n])", rest + read)
        yield from (line.decode(errors="replace") for line in whole)
    if rest:
        yield rest.decode(errors="replace")


def _explain(said: list[tuple[str | None, str]]) -> None:
    """What rank 0 has not said."""
    first = {line for rank, line in said if rank == "0"}
    others = [one for one in said if one[0] not in ("0", None) and one[1] not in first]
    if not others and not any("Error" in line for line in first):
        others = [one for one in said if one[0] is None]
    for rank, line in others:
        click.echo(line if rank is None else f"[{rank}] {line}", err=True, nl=False)
