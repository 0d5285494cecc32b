"""Fork server: a process that has imported a framework and forks a child for each rank.

Importing PyTorch takes 3 seconds of a core and TensorFlow 9, several times what most cases with
ranks compute. A server imports once and initializes nothing: it calls no framework and has one
thread. Each rank stays a process of its own with the environment, folder, streams and exit code
that its launcher gave and sees; see `forkclient.py`. Ranks of one server share the seed of string
hashes, and nothing else that a test could miss: `FRESH` lists what is started as usual.

`interpreter` writes a program that stands in for `python`, for pages and commands that start others
themselves.

FORKSERVER=0 starts everything as usual.
"""

from __future__ import annotations

import array
import atexit
import gc
import importlib
import importlib.util
import marshal
import os
import runpy
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import types
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CLIENT = Path(__file__).with_name("forkclient.py")
# The first optimizer of a process imports `torch._dynamo`, which takes as long as PyTorch itself.
IMPORTS = {
    "horovodrun": ("horovod.runner.launch",),
    "torch": ("torch", "torch._dynamo", "torch.distributed.run"),
    "trainers": (
        *("torch", "torch._dynamo", "torch.distributed.run"),
        *("transformers.trainer", "accelerate", "lightning.pytorch"),
    ),
    "horovod.torch": ("torch", "torch._dynamo", "horovod.torch"),
    "horovod.tensorflow": ("tensorflow", "keras", "horovod.tensorflow.keras"),
}
# Set for single jobs by launchers, tests or pytest, and read by nothing that a server imports.
LATE = ("HOROVOD_", "HVD_GRADCOMP_", "OMPI_", "PMIX_", "PYTEST_", "NCCL_", "PYTHONPATH")
# Variables that name the interpreter with which a child starts others; the second is torchrun's.
EXECUTABLES = ("FORKSERVER_PYTHON", "PYTHON_EXEC")
LATE += EXECUTABLES
_servers: dict[tuple[object, ...], Server] = {}


def python(imports: str, environment: Mapping[str, str]) -> list[str]:
    """Return the start of a command that goes on with `-m MODULE` or `-c CODE`.

    Args:
        imports: the key in `IMPORTS` of what the program will import; empty: start it as usual.
        environment: what the launcher is started with.
    """
    if not imports or environment.get("FORKSERVER") == "0":
        return [sys.executable]
    early = {k: v for k, v in environment.items() if not k.startswith(LATE)}
    key = (imports, *sorted(early.items()))
    if key not in _servers or not _servers[key].alive():
        _servers[key] = Server(IMPORTS[imports], early)
    return [sys.executable, "-I", "-S", str(CLIENT), _servers[key].path]


def interpreter(folder: Path, imports: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Write `python` to a folder: modules and files it runs as children of a server.

    All else, such as `python -c` and pip, it leaves to the interpreter.

    Args:
        folder: where; it is made.
        imports: the key in `IMPORTS` of what programs will import.
        environment: what the first launcher is started with.

    Returns:
        The environment, and in it what makes the children start others in this way too.
    """
    if environment.get("FORKSERVER") == "0":
        return dict(environment)
    forks = shlex.join(python(imports, environment))
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / "python"
    script.write_text(INTERPRETER.format(python=sys.executable, forks=forks))
    script.chmod(0o755)
    return {**environment, **dict.fromkeys(EXECUTABLES, str(script))}


INTERPRETER = """#!/bin/sh
program=$1 module=$2
if [ "$1" = -u ]; then program=$2 module=$3; fi
case "$program" in
-m | *.py)
    case "$module" in
    pip | venv | horovod.runner.launch) ;;
    *) exec {forks} "$@" ;;
    esac ;;
esac
exec {python} "$@"
"""


class Server:
    """Handle of a server; it ends with this process, however that ends."""

    def __init__(self, modules: tuple[str, ...], environment: Mapping[str, str]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="forkserver-")
        self.path = os.path.join(self._folder.name, "socket")
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(self.path)
        listener.listen(64)  # clients wait in the queue while the server imports
        command = [sys.executable, "-m", "tests.parallel.forkserver", str(listener.fileno())]
        self._process = subprocess.Popen(
            [*command, *modules],
            cwd=ROOT,
            env={**environment, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=[listener.fileno()],
            start_new_session=True,
        )
        listener.close()
        atexit.register(self.close)

    def alive(self) -> bool:
        """Return True while the process runs."""
        return self._process.poll() is None

    def close(self) -> None:
        """End the server and what it has forked."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._folder.cleanup()


class Request:
    """Program that a client asks for."""

    def __init__(self, client: socket.socket) -> None:
        data, ancillary, *_ = client.recvmsg(4, socket.CMSG_SPACE(3 * 4))
        self.streams = array.array("i")
        self.streams.frombytes(ancillary[0][2])
        body = client.recv(int.from_bytes(data, "big"), socket.MSG_WAITALL)
        self.arguments, self.folder, self.environment = marshal.loads(body)
        self.unbuffered = self.arguments[0] == "-u" or "PYTHONUNBUFFERED" in self.environment
        self.arguments = self.arguments[self.arguments[0] == "-u" :]

    def enter(self) -> None:
        """Make this process look as if it had been started by the client."""
        for target, stream in enumerate(self.streams):
            os.dup2(stream, target)
            os.close(stream)
        os.chdir(self.folder)
        os.environ.clear()
        os.environ.update(self.environment)
        if self.unbuffered:
            sys.stdout.reconfigure(write_through=True)
        sys.executable = self.environment.get(EXECUTABLES[0], sys.executable)
        if "numpy" in sys.modules:  # Python does it for `random`
            sys.modules["numpy"].random.seed()
        searched = filter(None, self.environment.get("PYTHONPATH", "").split(os.pathsep))
        # Behind the folder of what is run: that of the server is the one that it was started with.
        sys.path[:2] = [self.folder, *(os.path.join(self.folder, path) for path in searched)]
        sys.modules["__main__"] = types.ModuleType("__main__")

    def run(self) -> None:
        """Run the program as `python` does."""
        kind, *rest = self.arguments
        main = vars(sys.modules["__main__"])
        sys.argv = [kind, *(rest[1:] if kind in ("-m", "-c") else rest)]
        if kind == "-m":
            sys.modules.pop(rest[0], None)  # one that the server has imported is run once more
            runpy._run_module_as_main(rest[0])
        elif kind == "-c":
            sys.path[0] = ""
            exec(compile(rest[0], "<string>", "exec"), main)
        else:
            main["__file__"] = file = os.path.abspath(kind)
            sys.path[0] = os.path.dirname(file)
            exec(compile(Path(file).read_bytes(), file, "exec"), main)


def serve(listener: socket.socket) -> Request:
    """Fork a child for each client; return in the child, never in the server."""
    waker, wakes = socket.socketpair()
    for end in (waker, wakes):
        end.setblocking(False)
    signal.set_wakeup_fd(wakes.fileno())
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    children: dict[int, socket.socket] = {}
    ready = selectors.DefaultSelector()
    for source in (0, listener, waker):
        ready.register(source, selectors.EVENT_READ)
    while True:
        for key, _ in ready.select():
            if key.fileobj == 0:  # the tests have ended
                for child in children:
                    kill(child)
                os._exit(0)
            elif key.fileobj is listener:
                client = listener.accept()[0]
                try:
                    request = Request(client)
                except (OSError, EOFError, IndexError):  # the client was killed
                    continue
                child = os.fork()
                if not child:
                    os.setsid()
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    ready.close()
                    for end in (waker, wakes, listener, client, *children.values()):
                        end.close()
                    return request
                for stream in request.streams:
                    os.close(stream)
                children[child] = client
                ready.register(client, selectors.EVENT_READ, child)
                with suppress(OSError):
                    client.sendall(child.to_bytes(4, "big"))
            elif key.fileobj is waker:
                waker.recv(4096)
                reap(children, ready)
            elif key.data in children:  # the client was killed
                ready.unregister(key.fileobj)
                kill(key.data)


def reap(children: dict[int, socket.socket], ready: selectors.BaseSelector) -> None:
    """Tell the clients of children that have ended."""
    while children:
        child, status = os.waitpid(-1, os.WNOHANG)
        if not child:
            return
        client = children.pop(child)
        if client in ready.get_map():
            ready.unregister(client)
            code = os.waitstatus_to_exitcode(status)
            with suppress(OSError):
                client.sendall(code.to_bytes(4, "big", signed=True))
        client.close()


def kill(child: int) -> None:
    """Kill a child and what it has started."""
    os.kill(child, signal.SIGKILL)  # a zombie at least
    with suppress(ProcessLookupError):  # before its setsid() there is no such group
        os.killpg(child, signal.SIGKILL)


if __name__ == "__main__":
    for name in sys.argv[2:]:
        if importlib.util.find_spec(name.partition(".")[0]):  # not all of them are anywhere
            importlib.import_module(name)
    gc.freeze()  # children would write to each object, and so copy its page, when they end
    gc.set_threshold(50_000, 20, 20)  # as in tests/conftest.py: graphs are many objects
    request = serve(socket.socket(fileno=int(sys.argv[1])))
    request.enter()
    request.run()
