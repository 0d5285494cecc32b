"""Training between two hosts with sshd behind shaped links, and that nothing of them stays."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.rig import Hosts, JobError, refusal
from tests.parallel.launch import ROOT

REASON = refusal()
pytestmark = [
    pytest.mark.parallel,
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
]
ENVIRONMENT = {"PYTHONPATH": str(ROOT)}
NAP = (
    f"sleep 1000.{os.getpid()}"  # sshd passes no environment on; this is told from others' by name
)


def traces(mark: str) -> list[str]:
    """Processes that have a word in their environment, or nap."""
    marked = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            has_mark = f"MARK={mark}".encode() in (folder / "environ").read_bytes().split(b"\0")
            if has_mark or NAP in command:
                marked.append(command)
        except OSError:  # it has ended meanwhile
            continue
    return marked


def named(name: str) -> list[Path]:
    """Processes of a name, those that are ending too."""
    left = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if (folder / "comm").read_text().strip() == name:
                left.append(folder)
        except OSError:  # it has ended meanwhile
            continue
    return left


def surroundings() -> list[str]:
    """What a rig might have changed outside: links, and names in these folders."""
    folders = [Path(name) for name in ("/run/netns", "/etc/netns", "~/.ssh", "/etc/ssh")]
    names = [str(p) for f in folders if f.expanduser().is_dir() for p in f.expanduser().iterdir()]
    links = os.listdir("/sys/class/net")
    return sorted([*names, *links, Path("/etc/hosts").read_text()])


@pytest.fixture
def mark(tmp_path, monkeypatch):
    """In the environment of all that a test starts; at its end nothing of that may be left."""
    before = surroundings()
    with monkeypatch.context() as patch:
        patch.setenv("MARK", str(tmp_path))
        yield
    deadline = time.monotonic() + 10
    while (left := traces(str(tmp_path))) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left
    assert surroundings() == before


def test_trains_over_ssh_and_ends_with_what_fails(tmp_path, mark):
    with Hosts(2, "100mbit") as hosts:
        for backend in ("gloo", "mpi"):
            folder = tmp_path / backend
            folder.mkdir()
            command = ["python", "-m", "tests.parallel.workers.torch_hosts", str(folder)]
            output = hosts.horovodrun(command, backend=backend, env=ENVIRONMENT, timeout=100)
            ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
            assert [r["host"] for r in ranks] == ["host1", "host2"], output
            assert [r["address"] for r in ranks] == ["10.77.0.1", "10.77.0.2"]
            assert ranks[0]["end"] == ranks[1]["end"] != ranks[0]["begin"]
        # What a failing job leaves on another host, off the terminal and deaf, ends with it.
        deaf = f"ssh host2 \"trap '' HUP TERM; setsid {NAP} >&- 2>&- &\"; echo began; exit 3"
        with pytest.raises(JobError, match=r"exit status 3\nbegan"):
            hosts.run(["sh", "-c", deaf], env=os.environ, timeout=60)
        assert not [command for command in traces(str(tmp_path)) if command.startswith("sleep")]
        start = time.monotonic()
        with pytest.raises(JobError, match="killed after 1 s"):
            hosts.run(["ssh", "host2", NAP], env=os.environ, timeout=1)
        assert time.monotonic() - start < 20
        assert hosts.run(["ssh", "host2", "hostname"], env=os.environ, timeout=60) == "host2\n"


def test_returns_when_all_it_started_has_ended(tmp_path, mark):
    # The kernel takes its time to end a process that holds much memory.
    name = f"hog.{os.getpid()}"
    hog = f"""
import pathlib, time
pathlib.Path("/proc/self/comm").write_text("{name}")
held = bytearray(b"1") * 10**9
print("ready", flush=True)
time.sleep(1000)
"""
    job = [
        "bash",
        "-c",
        'read line < <(exec "$0" -c "$1" 2>/dev/null); exit 3',
        sys.executable,
        hog,
    ]
    with Hosts(1) as hosts:
        for _ in range(3):
            with pytest.raises(JobError, match="exit status 3"):
                hosts.run(job, env=os.environ, timeout=60)
            assert not named(name)


@pytest.mark.parametrize("how", ["SIGKILL", "SIGTERM", "SIGINT"])
def test_ends_with_its_process(how, tmp_path, mark):
    program = f"""
import os, signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
from benchmarks.rig import Hosts
with Hosts(2) as hosts:
    command = ["ssh", "host2", "echo began; {NAP} & wait"]
    hosts.run(command, env=os.environ, timeout=60, stream=True)
"""
    job = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert job.stdout.readline() == "began\n"
    deadline = time.monotonic() + 10  # the nap comes after the word, and on another host
    while not any(command.startswith("sleep") for command in traces(str(tmp_path))):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    job.send_signal(getattr(signal, how))
    job.communicate(timeout=30)


def test_other_rates_shape_the_link(mark):
    """A megabyte takes 80 ms at 100 Mb/s: what may pass at once is small."""
    program = """
import socket, sys, time
if sys.argv[1] == "host2":
    server = socket.create_server(("0.0.0.0", 5000))
    with server.accept()[0] as link:
        left = 1_000_000
        while left:
            left -= len(link.recv(left))
        link.sendall(b"x")
else:
    for _ in range(500):
        try:
            link = socket.create_connection(("host2", 5000))
            break
        except ConnectionRefusedError:
            time.sleep(0.02)
    start = time.perf_counter()
    link.sendall(bytes(1_000_000))
    link.recv(1)
    print(time.perf_counter() - start)
"""
    both = f"ssh host2 {sys.executable} - host2 <$0 & {sys.executable} $0 host1; wait"
    path = Path("/dev/shm/never")
    with Hosts(2, "100mbit") as hosts:
        took = {}
        for rate in ("100mbit", "1gbit"):
            hosts.set_rate(rate)
            write = f"cat >{path} <<'END'\n{program}\nEND\n"
            script = write + both.replace("$0", str(path))
            took[rate] = float(hosts.run(["sh", "-c", script], env=os.environ, timeout=60))
    assert 0.07 < took["100mbit"] < 1
    assert 0.006 < took["1gbit"] < took["100mbit"]
    assert not path.exists()
