"""Several hosts on one machine: network namespaces with sshd behind links of a chosen rate.

    with Hosts(2, "1gbit") as hosts:
        print(hosts.horovodrun(["python", "-m", "examples.pytorch.digits"], backend="mpi"))

Everything lives in namespaces of one `unshare`: a switch (a bridge), a network namespace for each
host, the mounts (/run, /etc/hosts, ssh's configuration, shared memory) and all processes. Its first
process waits for the end of a pipe that this process holds. So when this process ends, in whatever
way, the kernel kills what runs there and takes the links, keys and mounts away; nothing of it was
ever in /run/netns, /etc or ~/.ssh of the machine.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

COMMANDS = {
    "unshare": "util-linux",
    "ip": "iproute2",
    "ss": "iproute2",
    "tc": "iproute2",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "sshd": "openssh-server",
}
SUBNET = "10.77.0."
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
UNSHARE = ["unshare", "--mount", "--pid", "--net", "--uts", "--fork", "--kill-child"]

PROBE = """
ip link add link0 type veth peer name link1
ip link add switch type bridge
tc qdisc replace dev link0 root tbf rate 1gbit burst 128k latency 50ms
"""

# What the first process does before it waits. A ~/.ssh/config must not have a say, and without PAM
# sshd lets no account in whose password is locked.
FOUNDATION = """
mount -t tmpfs -o mode=755 hosts /run
mount -t tmpfs -o mode=1777 hosts /dev/shm
if [ -d ~root/.ssh ]; then mount -t tmpfs -o mode=700 hosts ~root/.ssh; fi
mkdir /run/sshd /run/hosts
mkdir -m 1777 /run/hosts/tmp
cd /run/hosts
ssh-keygen -q -t ed25519 -N '' -f key
printf '* %s\\n' "$(cat key.pub)" >known
printf '%s\\n' "$SSHD" >sshd_config
printf '%s\\n' "$SSH" >ssh_config
printf '%s\\n' "$NAMES" >names
(umask 077 && sed 's/^root:!/root:*/' /etc/shadow >shadow)
mount --bind names /etc/hosts
mount --bind ssh_config /etc/ssh/ssh_config
mount --bind shadow /etc/shadow
ip link add switch type bridge
ip link set switch up
for host in $HOSTS; do
    ip netns add $host
    ip link add $host type veth peer name eth0 netns $host
    ip link set $host master switch up
    ip -n $host address add $(awk -v h=$host '$2 == h { print $1 }' names)/24 dev eth0
    ip -n $host link set eth0 up
    ip -n $host link set lo up
done
cd /
exec "$PYTHON" -ISc 'import signal, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # orphans are left to this process, and reaped
print("ready", flush=True)
sys.stdin.read()'
"""

SSHD = """
HostKey /run/hosts/key
AuthorizedKeysFile /run/hosts/key.pub
PermitRootLogin prohibit-password
PasswordAuthentication no
UsePAM no
PidFile none
MaxStartups 100
"""

SSH = """
Host *
    IdentityFile /run/hosts/key
    IdentitiesOnly yes
    GlobalKnownHostsFile /run/hosts/known
    UserKnownHostsFile /dev/null
    LogLevel ERROR
"""

LISTEN = """
sshd=$(command -v sshd || echo /usr/sbin/sshd)
"$sshd" -f /run/hosts/sshd_config -E /run/hosts/sshd.log
for wait in $(seq 500); do
    if ss -ltnH "sport = 22" | grep -q .; then exit 0; fi
    sleep 0.02
done
cat /run/hosts/sshd.log >&2
exit 1
"""

# A signal is sent before it is obeyed: one more finds nobody when all have ended. It does not reach
# the first process, nor the shell that sends it; each shell waits 30 s at most.
SWEEP = """
for wait in $(seq 3000); do
    kill -KILL -1 || exit 0
    sleep 0.01
done
"""


class HostsError(RuntimeError):
    """Hosts cannot be made here; the message says why."""


class JobError(RuntimeError):
    """A command on the hosts failed or took too long; `output` is what it printed."""

    def __init__(self, message: str, output: str) -> None:
        super().__init__(f"{message}\n{output[-6000:]}".rstrip())
        self.output = output


def bits_per_second(rate: str) -> float:
    match = re.fullmatch(r"([0-9.]+)(kbit|mbit|gbit)", rate)
    if match is None:
        raise ValueError(f"a rate is a number of kbit, mbit or gbit, such as 100mbit, not {rate!r}")
    return float(match[1]) * UNITS[match[2]]


def refusal() -> str | None:
    """Why hosts cannot be made here, in a sentence; None if they can."""
    if os.geteuid() != 0:
        return "Hosts are network namespaces, and only root may make those: run it as root."
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    packages = sorted({p for c, p in COMMANDS.items() if shutil.which(c, path=path) is None})
    if packages:
        return f"Missing here, by the names of Debian's packages: {', '.join(packages)}."
    probe = subprocess.run(
        [*UNSHARE, "--mount-proc", "sh", "-eu", "-c", PROBE],
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": path},
    )
    if probe.returncode != 0:
        reason = " ".join(probe.stderr.split())
        return f"The kernel, or the container, allows no network namespaces of one's own: {reason}."
    return None


class Hosts:
    """Hosts named host1, host2, ... with one interface, eth0, on a subnet of their own.

    Args:
        count: how many.
        rate: of every link in each direction, as tc writes it ("1gbit", "100mbit"); None: unshaped.

    Raises:
        HostsError: on entry, if hosts cannot be made here.
    """

    def __init__(self, count: int, rate: str | None = None) -> None:
        if not 1 <= count <= 250:
            raise ValueError(f"1 to 250 hosts, not {count}")
        self.names = [f"host{place + 1}" for place in range(count)]
        self.rate = rate
        self._sweeping = threading.Lock()

    def __enter__(self) -> Hosts:
        reason = refusal()
        if reason is not None:
            raise HostsError(reason)
        self._path = os.pathsep.join(
            [str(Path(sys.executable).parent), os.environ["PATH"], "/usr/sbin", "/sbin"]
        )
        addresses = [f"{SUBNET}{place + 1} {name}" for place, name in enumerate(self.names)]
        environment = {
            **os.environ,
            "PATH": self._path,
            "PYTHON": sys.executable,
            "HOSTS": " ".join(self.names),
            "NAMES": "\n".join(["127.0.0.1 localhost", *addresses]),
            "SSH": SSH,
            # What ssh starts finds Open MPI's daemon where this process finds it.
            "SSHD": f'{SSHD}SetEnv "PATH={self._path}" TMPDIR=/run/hosts/tmp',
        }
        self._first = subprocess.Popen(
            [*UNSHARE, "--mount-proc", "sh", "-eu", "-c", FOUNDATION],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            if self._first.stdout.readline() != "ready\n":
                raise HostsError(f"Hosts do not start: {self._first.stderr.read().strip()}")
            self.set_rate(self.rate)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._end()

    def _end(self) -> None:
        """Returns when all that ran there has ended."""
        try:
            self._first.communicate(timeout=10)  # the first process sees its pipe's end
        except subprocess.TimeoutExpired:
            self._first.kill()  # and so the first process, by --kill-child
            self._first.communicate()

    def _inside(self, *command: str) -> list[str]:
        """A command in the rig, at the switch."""
        process = f"/proc/{self._first.pid}/ns"
        spaces = ["net", "mnt", "uts"]
        options = [f"--{'mount' if s == 'mnt' else s}={process}/{s}" for s in spaces]
        return ["nsenter", *options, f"--pid={process}/pid_for_children", *command]

    def _on(self, host: str, *command: str) -> list[str]:
        script = 'hostname "$0"; cd "$1"; shift; exec "$@"'
        in_namespace = ["unshare", "--uts", "sh", "-eu", "-c", script, host, os.getcwd()]
        return self._inside("ip", "netns", "exec", host, *in_namespace, *command)

    def _sh(self, command: list[str]) -> str:
        """Runs something short."""
        environment = {**os.environ, "PATH": self._path}
        job = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
        if job.returncode != 0:
            raise JobError(f"{' '.join(command)}: exit status {job.returncode}", job.stderr)
        return job.stdout

    def set_rate(self, rate: str | None) -> None:
        """Shapes all links anew, both ends, so that both directions have the rate."""
        queue = ["noqueue"]
        if rate is not None:
            # What may pass at once: a millisecond's worth. With the usual megabyte a small payload
            # would never meet the link.
            burst = max(16_000, round(bits_per_second(rate) / 8e3))
            queue = ["tbf", "rate", rate, "burst", f"{burst}b", "latency", "50ms"]
        for name in self.names:
            shape = ["tc", "qdisc", "replace", "dev", name, "root", *queue]
            self._sh(self._inside(*shape))
            shape[4] = "eth0"
            self._sh(self._inside("ip", "netns", "exec", name, *shape))
        self.rate = rate

    def set_link(self, host: str, up: bool) -> None:
        """Connects a host with the others, or cuts it off."""
        self._sh(self._inside("ip", "link", "set", host, "up" if up else "down"))

    def horovodrun(
        self,
        command: Sequence[str],
        *,
        ranks_per_host: int = 1,
        backend: str = "gloo",
        env: Mapping[str, str] = MappingProxyType({}),
        timeout: float = 600.0,
        stream: bool = False,
    ) -> str:
        """Runs a command on all hosts, started on host1 by horovodrun over ssh.

        Args:
            command: the program of each rank and its arguments.
            ranks_per_host: how many ranks a host has.
            backend: "gloo" or "mpi".
            env: variables beside those of this process.
            timeout: seconds; what runs longer is killed.
            stream: whether its output is also printed as it comes.

        Returns:
            What it printed.

        Raises:
            JobError: if its exit status is not 0, or time is over.
        """
        ranks = ranks_per_host * len(self.names)
        places = ",".join(f"{name}:{ranks_per_host}" for name in self.names)
        options = [f"--{backend}", "-np", str(ranks), "-H", places, "--network-interfaces", "eth0"]
        # Its cache would remember that ssh worked, on hosts of the same names, an hour ago.
        options += ["--disable-cache", "--start-timeout", "120"]
        launcher = str(Path(sys.executable).with_name("horovodrun"))
        variables = {
            "OMP_NUM_THREADS": "1",
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "HOROVOD_GLOO_TIMEOUT_SECONDS": "120",
            "OMPI_MCA_mpi_yield_when_idle": "1",  # hosts share the cores
            "OMPI_MCA_rmaps_base_oversubscribe": "1",
            **os.environ,
            "TMPDIR": "/run/hosts/tmp",
            **env,
        }
        return self.run(
            [launcher, *options, *command], env=variables, timeout=timeout, stream=stream
        )

    def run(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        timeout: float,
        stream: bool = False,
    ) -> str:
        """Runs a command on host1 while each host has an sshd; `env` is its whole environment."""
        over = threading.Event()

        def end() -> None:
            over.set()
            self._sweep()

        for name in self.names:
            self._sh(self._on(name, "sh", "-eu", "-c", LISTEN))
        job = subprocess.Popen(
            self._on("host1", *command),
            env={**env, "PATH": self._path},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        clock = threading.Timer(timeout, end)
        clock.start()
        lines = []
        try:
            for line in job.stdout:
                lines.append(line)
                if stream:
                    print(line, end="", flush=True)
            status = job.wait()
        finally:
            clock.cancel()
            self._sweep()
            job.wait()
        output, title = "".join(lines), " ".join(command)
        if over.is_set():
            raise JobError(f"{title}: killed after {timeout:g} s", output)
        if status != 0:
            raise JobError(f"{title}: exit status {status}", output)
        return output

    def _sweep(self) -> None:
        """Kills every process of the rig but the first: sshds, and ranks that have lost theirs.

        Returns when all of them have ended.
        """
        with self._sweeping:  # one would kill the other
            subprocess.run(self._inside("sh", "-c", SWEEP), capture_output=True)


if __name__ == "__main__":
    reason = refusal()
    if reason is not None:
        print(reason, file=sys.stderr)
        sys.exit(2)
