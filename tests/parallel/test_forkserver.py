"""Fork server: a program that it runs is to its launcher what one started as usual is."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from tests.parallel.forkserver import CLIENT, EXECUTABLES, interpreter, python
from tests.parallel.launch import environment
from tests.processes import alive

PROGRAM = """
import os, random, sys
import tests.processes
print(sys.argv[1:], sys.stdin.read(), os.getcwd(), os.environ["ONE"], __name__, flush=True)
print(sorted({"TWO", "THREE"} & {*os.environ}), os.getpgrp() == os.getpid(), file=sys.stderr)
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def start(monkeypatch):
    monkeypatch.setenv("FORKSERVER", "1")
    return python("horovodrun", environment())


def test_arguments_streams_environment_folder_and_code(start, tmp_path):
    kinds = {"fork": start, "usual": [sys.executable]}
    variables = environment(ONE="1", HOROVOD_RANK="3")
    held_by = {
        kind: subprocess.run(
            [*command, "-c", PROGRAM, "7", "x y"],
            cwd=tmp_path,
            env=variables,
            input="typed",
            capture_output=True,
            text=True,
        )
        for kind, command in kinds.items()
    }
    for done in held_by.values():
        assert done.stdout == f"['7', 'x y'] typed {tmp_path} 1 __main__\n"
        assert done.returncode == 7
    assert held_by["fork"].stderr == "[] True\n"


def test_modules_and_errors(start):
    for command in (start, [sys.executable]):
        done = subprocess.run([*command, "-m", "calendar", "2026", "11"], capture_output=True)
        assert done.returncode == 0 and b"November 2026" in done.stdout
        done = subprocess.run([*command, "-c", "1 / 0"], capture_output=True, text=True)
        assert done.returncode == 1 and done.stderr.endswith(
            "ZeroDivisionError: division by zero\n"
        )
        done = subprocess.run([*command, "-m", "no_such_module"], capture_output=True, text=True)
        assert done.returncode == 1 and "No module named no_such_module" in done.stderr
        ends = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
        assert subprocess.run([*command, "-c", ends]).returncode == -signal.SIGKILL


FILE = """
import os, pickle, sys
import beside, elsewhere
class Thing: pass
assert type(pickle.loads(pickle.dumps(Thing()))) is Thing
print(sys.argv, __name__, __file__, beside.__file__, elsewhere.__file__, sys.path[:2], flush=True)
"""


def test_files_and_where_modules_are_looked_for(start, tmp_path):
    """Beside the file, and in the folders that its launcher names, also from where it stands."""
    for name in ("program/run.py", "program/beside.py", "modules/elsewhere.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(FILE if name.endswith("run.py") else "")
    variables = environment(PYTHONPATH=os.pathsep.join(["modules", str(tmp_path)]))
    printed = set()
    for command in (start, [*start, "-u"], [sys.executable]):
        done = subprocess.run(
            [*command, "program/run.py", "-m", "x y"],
            cwd=tmp_path,
            env=variables,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        printed.add(done.stdout)
    assert len(printed) == 1, printed


STARTS = """
import os, subprocess, sys
print(*sys.argv[1:], os.getpgrp() == os.getpid(), flush=True)
if len(sys.argv) == 2:
    subprocess.run([sys.executable, "-u", __file__, "its", "child"], check=True)
    subprocess.run([sys.executable, "-c", "import os; print(os.getpgrp() == os.getpid())"])
"""


def test_what_a_child_starts_is_forked_too(start, tmp_path):
    """A module or a file: a child leads a group of processes; else it is the interpreter's."""
    (tmp_path / "starts.py").write_text(STARTS)
    variables = interpreter(tmp_path / "bin", "horovodrun", environment())
    command = [variables[EXECUTABLES[0]], "starts.py", "first"]
    printed = subprocess.check_output(command, cwd=tmp_path, env=variables, text=True)
    assert printed.splitlines() == ["first True", "its child True", "False"]
    variables = interpreter(tmp_path, "torch", environment(FORKSERVER="0"))
    assert not {*EXECUTABLES} & {*variables}


def test_random_numbers_differ(start):
    seeds = "import random, secrets; print(random.random(), secrets.token_hex())"
    assert len({subprocess.check_output([*start, "-c", seeds]) for _ in range(3)}) == 3


SLEEPS = """
import os, signal, sys, time
if sys.argv[1] == "deaf":
    # Not by print: the signal may come while that of below is not over yet.
    signal.signal(signal.SIGTERM, lambda *_: os.write(1, b"heard\\n"))
print(os.getpid(), flush=True)
time.sleep(100)
"""


@pytest.mark.parametrize("how", ["SIGTERM", "SIGKILL"])
def test_it_ends_with_its_client(start, how):
    job = subprocess.Popen([*start, "-c", SLEEPS, "hears"], stdout=subprocess.PIPE, text=True)
    child = int(job.stdout.readline())
    job.send_signal(getattr(signal, how))
    assert job.wait(20) == -getattr(signal, how)
    ended(child)


def test_signals_are_passed_on(start):
    job = subprocess.Popen([*start, "-c", SLEEPS, "deaf"], stdout=subprocess.PIPE, text=True)
    child = int(job.stdout.readline())
    job.terminate()
    assert job.stdout.readline() == "heard\n" and alive(child)
    job.kill()
    job.wait(20)
    ended(child)


def test_a_signal_reaches_a_child_that_is_not_known_yet(tmp_path):
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        server.listen()
        words = [sys.executable, "-I", "-S", str(CLIENT), str(tmp_path / "socket")]
        job = subprocess.Popen([*words, "-c", "pass"])
        connection, _ = server.accept()
        with connection:
            connection.recv(1 << 20)
            job.terminate()
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
            connection.send(child.pid.to_bytes(4, "big"))
            assert child.wait(20) == -signal.SIGTERM
            connection.send((-signal.SIGTERM).to_bytes(4, "big", signed=True))
        assert job.wait(20) == -signal.SIGTERM


def test_server_and_children_end_with_the_tests():
    program = """
import subprocess, time, os
from tests.parallel.forkserver import _servers, python
start = python("horovodrun", dict(os.environ))
sleep = "import os, time; print(os.getpid(), flush=True); time.sleep(100)"
job = subprocess.Popen([*start, "-c", sleep], stdout=subprocess.PIPE, text=True)
(server,) = _servers.values()
print(job.stdout.readline().strip(), server._process.pid, flush=True)
time.sleep(100)
"""
    tests = subprocess.Popen(
        [sys.executable, "-c", program], env=environment(), stdout=subprocess.PIPE, text=True
    )
    child, server = map(int, tests.stdout.readline().split())
    tests.kill()
    tests.wait(20)
    ended(child)
    ended(server)


def ended(process: int) -> None:
    """Wait until a process has ended, not for long."""
    deadline = time.monotonic() + 20
    while alive(process):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_switched_off_it_is_the_interpreter():
    assert python("torch", {**os.environ, "FORKSERVER": "0"}) == [sys.executable]
