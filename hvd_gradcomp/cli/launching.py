"""Launching of a command's ranks by horovodrun or torchrun, with rank 0's output.

Both prefix each line of each rank, as with `[0]<stdout>:`. This module strips the prefix and holds
back the lines of other ranks and of the launcher itself: if the run fails, it shows those of other
ranks that rank 0 has not printed, and the launcher's reason if no rank shows an error.
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
from typing import IO, Any, NoReturn

import click

from hvd_gradcomp.cli.hosts import Host, check_names, parse
from hvd_gradcomp.cli.output import counted

TERMINAL = "HVD_GRADCOMP_TERMINAL"  # columns of the terminal that shows rank 0's stderr
# Variables of the environment by which launchers tell a rank what it is.
_TORCHRUN = "TORCHELASTIC_RUN_ID"
_HOROVODRUN = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
_BY_HAND = ("RANK", "WORLD_SIZE", "MASTER_ADDR")  # as torch.distributed reads them
_OPTIONS = "--gloo"  # of horovodrun
_PORT = 29400  # torchrun's own default
_ENDED = "Terminated\n"  # the shell's line when horovodrun ends ranks because another failed
# Prefixes of gloo, mpirun and torchrun.
_PREFIX = re.compile(r"\[(?:\d+,|default)?(\d+)\](?:<std(?:out|err)>)?:")
# Files in a traceback of horovodrun or torchrun.
_LAUNCHER = re.compile(r"/horovod/runner/|/torch/distributed/(?:run\.py|launcher/|elastic/)")


def launcher() -> str:
    """Return the library that connects the ranks of which this process is one; "" if it is none.

    Either "Horovod" or "torch.distributed".
    """
    if _TORCHRUN in os.environ:
        return "torch.distributed"
    if any(name in os.environ for name in _HOROVODRUN):
        return "Horovod"
    return "torch.distributed" if all(name in os.environ for name in _BY_HAND) else ""


def with_ranks(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `-np`, `-H` and `--ddp`, with which a command starts its own ranks."""

    @click.option(
        "-np",
        "ranks",
        type=click.IntRange(1),
        help="Start so many ranks: by horovodrun; by torchrun with --ddp, or without Horovod.",
    )
    @click.option(
        "-H",
        "--hosts",
        metavar="HOST:RANKS,...",
        callback=_checked_hosts,
        help="Hosts of the ranks, for horovodrun. Default: this one. With torch.distributed start "
        "torchrun on each host, with -m hvd_gradcomp.",
    )
    @click.option(
        "--ddp",
        is_flag=True,
        help="Start the ranks of -np by torchrun, over torch.distributed, though Horovod is here.",
    )
    @click.option(
        "--horovodrun",
        "words",
        default=_OPTIONS,
        show_default=True,
        metavar="OPTIONS",
        callback=_checked_words,
        help='Other options of horovodrun, such as "--mpi" or "--gloo --network-interfaces eth0".',
    )
    @functools.wraps(command)
    def started(
        *, ranks: int | None, hosts: str | None, ddp: bool, words: str, **arguments: Any
    ) -> Any:
        if launcher():
            return command(**arguments)
        if ranks is None:
            if hosts is not None:
                raise click.UsageError("-H says where ranks run; say with -np how many")
            return command(**arguments)
        known = [] if hosts is None else parse(hosts)
        slots = sum(host.ranks or 0 for host in known)
        if known and ranks > slots:
            raise click.UsageError(
                f"-np {ranks} asks for {ranks} ranks, and -H {hosts} has {slots}: raise the "
                "numbers behind the hosts, or name more hosts"
            )
        program = [sys.executable, "-m", "hvd_gradcomp", *sys.argv[1:]]
        if ddp or find_spec("horovod") is None:
            starter, launch = "torchrun", _by_torchrun(ranks, known, words, program)
        else:
            check_names(known)
            where = ["-np", str(ranks), *([] if hosts is None else ["-H", hosts])]
            horovodrun = [sys.executable, "-m", "horovod.runner.launch", *shlex.split(words)]
            starter, launch = "horovodrun", [*horovodrun, *where, *program]
        # Which takes seconds, since all of them import PyTorch.
        click.echo(f"starting {counted(ranks, 'rank')} by {starter}", err=True)
        sys.exit(run(launch))

    return started


def on_this_machine(ranks: int) -> NoReturn:
    """Start this command again on ranks of this machine, over loopback, and exit as they do.

    The machine's own name need not resolve.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    program = [sys.executable, "-m", "hvd_gradcomp", *sys.argv[1:]]
    click.echo(f"starting {counted(ranks, 'rank')} by torchrun", err=True)
    sys.exit(run(_torchrun(ranks, program, "--local-addr", "127.0.0.1")))


def _by_torchrun(ranks: int, hosts: list[Host], words: str, program: list[str]) -> list[str]:
    """Return the command that starts ranks on this machine by torchrun.

    Raises:
        click.UsageError: they are to be on other hosts, or started with options of horovodrun.
        click.ClickException: there is no PyTorch.
    """
    if hosts:
        raise click.UsageError(
            "torchrun starts the ranks of one host: type on each of the "
            f"{len(hosts)} hosts, with {program[3]}'s own options behind\n  "
            f"torchrun --nnodes {len(hosts)} --nproc-per-node {max(ranks // len(hosts), 1)} "
            f"--rdzv-backend c10d --rdzv-endpoint {hosts[0].name}:{_PORT} -m hvd_gradcomp "
            f"{program[3]} ..."
        )
    if words != _OPTIONS:
        raise click.UsageError(
            f"--horovodrun {words!r} has options of horovodrun, and torchrun starts these ranks"
        )
    if find_spec("torch") is None:
        raise click.ClickException("ranks are started by PyTorch, which is not installed")
    return _torchrun(ranks, program)


def _torchrun(ranks: int, program: list[str], *options: str) -> list[str]:
    torchrun = [program[0], "-m", "torch.distributed.run", "--standalone", "--tee", "3", *options]
    return [*torchrun, "--nproc-per-node", str(ranks), *program[1:]]


def _checked_hosts(ctx: click.Context, parameter: click.Parameter, text: str | None) -> str | None:
    if text is not None:
        parse(text)
    return text


def _checked_words(ctx: click.Context, parameter: click.Parameter, text: str) -> str:
    try:
        shlex.split(text)
    except ValueError as error:
        raise click.BadParameter(f"{text!r}: {error}".lower()) from error
    return text


def run(command: list[str]) -> int:
    """Run a launcher of ranks, show rank 0's output, and return the exit status."""
    environment = dict(os.environ)
    if sys.stderr.isatty():
        environment[TERMINAL] = str(os.get_terminal_size(sys.stderr.fileno()).columns)
    job = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    printed: list[tuple[str | None, str]] = []  # (rank, line); None for the launcher's own lines
    rank0 = io.StringIO()  # stdout, shown after all of stderr: they are two pipes
    streams = ((job.stdout, rank0), (job.stderr, sys.stderr))
    threads = [Thread(target=_follow, args=(*pair, printed)) for pair in streams]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    code = job.wait()
    click.echo(rank0.getvalue(), nl=False)
    if code:
        _explain(printed)
    return code


def _follow(source: IO[bytes], target: IO[str], printed: list[tuple[str | None, str]]) -> None:
    for line in _lines(source):
        prefix = _PREFIX.match(line)
        rank, text = (prefix[1], line[prefix.end() :]) if prefix else (None, line)
        if text == _ENDED:
            continue
        printed.append((rank, text))
        if rank == "0":
            target.write(text)
            target.flush()


def _lines(source: IO[bytes]) -> Iterator[str]:
    """Yield lines with their ends; a carriage return, as of a progress bar, ends one too."""
    rest = b""
    while read := os.read(source.fileno(), 4096):
        *whole, rest = re.split(rb"(?<=[\r\n])", rest + read)
        yield from (line.decode(errors="replace") for line in whole)
    if rest:
        yield rest.decode(errors="replace")


def _explain(printed: list[tuple[str | None, str]]) -> None:
    """Print the lines of other ranks; without an error of a rank, also the launcher's reason."""
    first = {line for rank, line in printed if rank == "0"}
    for rank, line in printed:
        if rank not in ("0", None) and line not in first:
            click.echo(f"[{rank}] {line}", err=True, nl=False)
    by_ranks = [line for rank, line in printed if rank is not None]
    if not any(re.search(r"Error:|Traceback", line) for line in by_ranks):
        text = "".join(line for rank, line in printed if rank is None)
        click.echo(_reason(text, started=bool(by_ranks)), err=True, nl=False)


def _reason(text: str, *, started: bool) -> str:
    """Return a launcher's own lines; of its traceback or usage only what is wrong, in a line.

    Lines of ranks may be among them, where a launcher's options change or omit the prefix: a
    traceback without files of a launcher is a rank's, and all lines are returned.
    """
    usage = re.search(r"^launch\.py: error: (.+)$", text, re.MULTILINE)
    error = usage and usage[1]
    _, *tracebacks = text.split("Traceback (most recent call last):")
    if tracebacks and all(map(_LAUNCHER.search, tracebacks)):
        last = tracebacks[-1]
        raised = re.search(r"^(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:: |$)", last, re.MULTILINE)
        if raised:
            error = " ".join(last[raised.end() :].split()) or raised[0]
    unreached = re.findall(r"^ssh not successful for host (\S+):\n(.+)$", text, re.MULTILINE)
    if unreached:
        error = "; ".join(f"ssh does not reach host {host}: {why}" for host, why in unreached)
    what = "the ranks have failed" if started else "the ranks cannot be started"
    return f"Error: {what}: {error}\n" if error else text
