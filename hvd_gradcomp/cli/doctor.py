"""Command `hvd-gradcomp doctor`: each check is a function that yields findings in print order.

Checks import frameworks only in a separate process; see `inspection`.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import ipaddress
import os
import re
import shutil
import socket
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import click

import hvd_gradcomp
from hvd_gradcomp.cli import output
from hvd_gradcomp.cli.hosts import configured, parse
from hvd_gradcomp.cli.inspection import Facts, inspect, run
from hvd_gradcomp.cli.output import counted
from hvd_gradcomp.cli.usercode import faults, sources
from hvd_gradcomp.core.installation import HOROVOD, build, cure
from hvd_gradcomp.core.suggestions import did_you_mean
from hvd_gradcomp.ops import building, native

_READY = "ready"  # what the last finding is about
_VARIABLES = ("HVD_GRADCOMP_CACHE", "HVD_GRADCOMP_NATIVE")  # that users set
_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red", "skip": "bright_black"}
_LINES = 16  # shown of a failed self-test's output
_GRACE = 15  # seconds for ranks of a self-test to print where they hang
_AS_ROOT = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")


@dataclass(frozen=True)
class Finding:
    """Result of a check.

    Attributes:
        mark: "ok", "warn" (something may not work), "fail" (it does not work), or "skip".
        what: the subject.
        fact: the result: a version, a path, an error.
        remedy: for a warning or a failure: commands to type, or text for the commented file.
    """

    mark: str
    what: str
    fact: str
    remedy: str = ""


@dataclass(frozen=True)
class _Framework:
    name: str
    title: str
    oldest: tuple[int, int]
    requirement: str
    built: str  # its name in Horovod's metadata.json


_FRAMEWORKS = (
    _Framework("torch", "PyTorch", (2, 0), "'torch>=2.0'", "pytorch"),
    _Framework("tensorflow", "TensorFlow", (2, 13), "'tensorflow>=2.16' 'keras>=3'", "tensorflow"),
)


@click.command("doctor", short_help="Check whether hvd_gradcomp runs here.")
@click.argument("paths", nargs=-1, type=click.Path(exists=True))
@click.option(
    "--framework",
    "frameworks",
    multiple=True,
    type=click.Choice([f.name for f in _FRAMEWORKS]),
    help="Check this framework only, and fail if it is missing. Default: all that are installed.",
)
@click.option(
    "--backend",
    "backends",
    multiple=True,
    type=click.Choice(["gloo", "mpi"]),
    help="Self-test over this backend only. Default: all that Horovod was built with.",
)
@click.option(
    "--hosts",
    metavar="[USER@]HOST[:SLOTS],...",
    default="",
    help="Check these hosts too, as given to horovodrun -H or to ssh: their names, and ssh.",
)
@click.option("--ssh-port", type=click.IntRange(1, 65535), default=22, show_default=True)
@click.option("--no-self-test", is_flag=True, help="Start no ranks.")
@click.option(
    "--timeout",
    metavar="SECONDS",
    type=click.FloatRange(min=1),
    default=120,
    show_default=True,
    help="Time limit of each import and each self-test, after which it is ended.",
)
@output.with_json
def command(
    paths: Sequence[str],
    frameworks: Sequence[str],
    backends: Sequence[str],
    hosts: str,
    ssh_port: int,
    no_self_test: bool,
    timeout: float,
    json_path: Path | None,
) -> None:
    """Check whether hvd_gradcomp runs here, and say what to do if not.

    Looks at Python, the frameworks, Horovod's build, the commands that start ranks and this host's
    name, and lets two ranks train a few compressed steps on this host, without a GPU. With PATHS,
    Python files or folders, it also looks there for stock Horovod where that does not work; nothing
    in them is run.

    \b
      hvd-gradcomp doctor                          all of it: a minute
      hvd-gradcomp doctor --no-self-test           without starting ranks: seconds
      hvd-gradcomp doctor train.py models/         and my training code
      hvd-gradcomp doctor --hosts node1,node2      and the hosts that I want to train on

    Each line is a finding: ok, warn (part of it may not work), fail (it does not work) or skip.
    Below a warning or a failure is what to do about it. At the end is what it is ready to train
    with. The exit code is 0 if nothing fails, 1 if
    something does, 2 if the command line is wrong.
    """
    chosen = [f for f in _FRAMEWORKS if not frameworks or f.name in frameworks]
    coming = _findings(
        chosen,
        demanded=bool(frameworks),
        backends=backends or ("gloo", "mpi"),
        hosts=[host.name for host in parse(hosts, counted=False)] if hosts else [],
        ssh_port=ssh_port,
        paths=paths,
        self_test=not no_self_test,
        timeout=timeout,
    )
    findings = []
    shown = not output.is_screen(json_path)
    while True:
        with output.status("looking"):
            finding = next(coming, None)
        if finding is None:
            break
        findings.append(finding)
        if shown and finding.what != _READY:
            click.echo(_shown(finding))
    fails, warnings = (sum(f.mark == mark for f in findings) for mark in ("fail", "warn"))
    output.report(
        json_path,
        [dataclasses.asdict(f) for f in findings],
        f"\n{counted(fails, 'failure')}, {counted(warnings, 'warning')}\n\n{findings[-1].fact}",
    )
    sys.exit(1 if fails else 0)


def _shown(finding: Finding) -> str:
    mark = click.style(f"{finding.mark:4}", fg=_COLOURS[finding.mark], bold=finding.mark == "fail")
    first, *rest = finding.fact.splitlines() or [""]
    below = [*rest, *(click.style(line, bold=True) for line in finding.remedy.splitlines())]
    return "\n".join(
        [f"{mark}  {finding.what:22}  {first}", *(f"        {line}" for line in below)]
    )


def _findings(
    frameworks: Sequence[_Framework],
    *,
    demanded: bool,
    backends: Sequence[str],
    hosts: Sequence[str],
    ssh_port: int,
    paths: Sequence[str],
    self_test: bool,
    timeout: float,
) -> Iterator[Finding]:
    yield from _python()
    yield from _package()
    yield from _variables()
    with ThreadPoolExecutor() as pool:
        subjects = ["horovod", *(f.name for f in frameworks)]
        horovod, *answers = pool.map(lambda subject: inspect(subject, timeout), subjects)
    facts = {f: answer for f, answer in zip(frameworks, answers)}
    needed = demanded or not any(answers)
    for framework in frameworks:
        yield from _framework(framework, facts[framework], needed)
    yield from _operations(facts)
    yield from _keras(facts)
    yield from _horovod(horovod, needed=not _facts_of("torch", facts).get("ddp"))
    if "built" in horovod:
        for framework in frameworks:
            yield from _horovod_for(framework, facts, horovod)
        yield from _backends(facts)
        for framework in frameworks:
            yield from _seam(framework, facts)
    yield from _launchers(horovod, facts, several=bool(hosts))
    yield from _hostname(several=bool(hosts), timeout=timeout)
    yield from _hosts(hosts, ssh_port, timeout)
    yield from _code(paths, facts)
    failed = []
    for finding in _self_tests(facts, backends, timeout) if self_test else ():
        failed += [finding.what] if finding.mark == "fail" else []
        yield finding
    if not self_test:
        yield Finding("skip", "self-test", "left out by --no-self-test")
    ready = list(_readiness(facts, horovod, failed))
    mark = "ok" if any(text.endswith(": ready.") for text in ready) else "skip"
    yield Finding(mark, _READY, " ".join(ready))


def _readiness(
    answers: dict[_Framework, Facts], horovod: Facts, failed: Sequence[str]
) -> Iterator[str]:
    """Yield a sentence for each library that trains, and for Horovod what needs it.

    Args:
        answers: what is known of the frameworks.
        horovod: what is known of it.
        failed: self-tests that have failed.
    """
    for framework, facts in answers.items():
        if framework.name == "torch":
            works = facts.get("ddp") and "DistributedDataParallel" not in failed
            instead = "not ready, see above" if facts else "needs PyTorch"
            if "error" in facts:  # of a fact that was not reached, which no other finding shows
                instead = f"not ready: {_error(facts)}"
            yield f"DDP: {'ready' if works else instead}."
            if facts.get("fsdp") is False and facts["ddp"]:
                instead = f"not with this PyTorch, {facts['version']}"
            yield f"FSDP2: {'ready' if facts.get('fsdp') else instead}."
    if not horovod:
        yield (
            "Horovod: not installed (needed for hvd_gradcomp.torch.DistributedOptimizer, "
            "TensorFlow and Keras)."
        )
        return
    for framework, facts in answers.items():
        broken = any(what.startswith(f"{framework.title} over") for what in failed)
        if facts:
            ready = "seam" in facts and not broken
            yield f"Horovod for {framework.title}: {'ready' if ready else 'not ready, see above'}."


def _self_tests(
    facts: dict[_Framework, Facts], backends: Sequence[str], timeout: float
) -> Iterator[Finding]:
    for backend in backends:
        for framework in facts:
            yield from _self_test(framework, facts[framework], backend, timeout)
    if _facts_of("torch", facts).get("ddp"):
        program = [sys.executable, "-m", "hvd_gradcomp.cli.selftest", "ddp"]
        remedy = f"{' '.join(program)}  # shows all of it"
        yield _tested("DistributedDataParallel", program, {}, timeout, remedy)


def _python() -> Iterator[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    yield Finding("ok", "Python", f"{version}, {sys.executable}")


def _package() -> Iterator[Finding]:
    place = Path(hvd_gradcomp.__file__).parent
    yield Finding("ok", "hvd_gradcomp", f"{hvd_gradcomp.__version__}, {place}")
    if os.environ.get(native.VARIABLE) == "0":
        fact = "left out by HVD_GRADCOMP_NATIVE=0: compression on a CPU is slower"
        yield Finding("warn", "its C library", fact, "unset HVD_GRADCOMP_NATIVE")
        return
    try:
        loaded = native.library() is not None
        fact = "loaded" if loaded else "not built: compression on a CPU is slower"
    except (OSError, AttributeError, ValueError) as error:
        loaded, fact = False, f"does not load, compression on a CPU fails: {error}"
    remedy = "hvd-gradcomp build" if fact.startswith("not built") else "hvd-gradcomp build --anew"
    if not building.compiles():
        remedy = f"apt-get install build-essential  # as root\n{remedy}"
    mark = "ok" if loaded else "warn" if fact.startswith("not built") else "fail"
    yield Finding(mark, "its C library", fact, "" if loaded else remedy)


def _variables() -> Iterator[Finding]:
    """Warn about variables of the environment that begin like ours and mean nothing."""
    for name in sorted(os.environ):
        if name.startswith("HVD_GRADCOMP_") and name not in _VARIABLES:
            nearest = did_you_mean(name, _VARIABLES) or f"; there are {', '.join(_VARIABLES)}"
            yield Finding("warn", "environment", f"{name} means nothing{nearest}", f"unset {name}")


def _framework(framework: _Framework, facts: Facts, needed: bool) -> Iterator[Finding]:
    install = f"{sys.executable} -m pip install {framework.requirement}"
    if not facts:
        fact = "not installed"
        yield Finding(
            "fail" if needed else "skip", framework.title, fact, install if needed else ""
        )
    elif "gpu" not in facts:
        remedy = f"{install} --force-reinstall"
        yield Finding("fail", framework.title, f"does not import: {_error(facts)}", remedy)
    elif _release(facts["version"]) < framework.oldest:
        oldest = ".".join(map(str, framework.oldest))
        fact = f"{facts['version']} is too old, it takes {oldest} or newer"
        yield Finding("fail", framework.title, fact, f"{install} --upgrade")
    else:
        gpu = ", with a GPU" if facts["gpu"] else ""
        yield Finding("ok", framework.title, f"{facts['version']}, {facts['path']}{gpu}")


def _operations(answers: dict[_Framework, Facts]) -> Iterator[Finding]:
    """Check the C operations for TensorFlow; skipped if the C library is disabled."""
    facts, what = _facts_of("tensorflow", answers), "its TensorFlow library"
    if "operations" not in facts or os.environ.get("HVD_GRADCOMP_NATIVE") == "0":
        return
    version = facts["version"]
    if facts["operations"]:
        yield Finding("ok", what, f"built for {version}")
        return
    costs = "on a CPU compression is slower on TensorFlow, quantizers ten times"
    others = building.others(version)
    name = building.operations(version)
    if (building.HERE / name).exists():
        fact, remedy = f"{name} does not load: {costs}", "hvd-gradcomp build --anew"
    elif others:
        fact = f"built for {', '.join(others)}, installed is {version}: {costs}"
        remedy = "hvd-gradcomp build"
    else:
        fact, remedy = f"not built: {costs}", "hvd-gradcomp build"
    if not building.compiles():
        remedy = f"apt-get install build-essential  # as root\n{remedy}"
    yield Finding("warn", what, fact, remedy)


def _keras(answers: dict[_Framework, Facts]) -> Iterator[Finding]:
    facts = _facts_of("tensorflow", answers)
    if "gpu" not in facts:
        return
    install = f"{sys.executable} -m pip install --upgrade 'tensorflow>=2.16' 'keras>=3'"
    if "keras" not in facts:
        yield Finding("fail", "Keras", f"does not import: {_error(facts)}", install)
    elif _release(facts["keras"] or "0") >= (3, 0):
        yield Finding("ok", "Keras", facts["keras"])
    else:
        fact = f"{facts['keras'] or 'not installed'}: tapes work, model.fit needs Keras 3"
        yield Finding("warn", "Keras", fact, install)


def _horovod(horovod: Facts, *, needed: bool) -> Iterator[Finding]:
    """Check Horovod; it is optional if `DistributedDataParallel` can compress instead."""
    if not horovod and needed:
        yield Finding("fail", "Horovod", "not installed", _build())
    elif not horovod:
        fact = (
            "not installed: hvd_gradcomp.torch.ddp compresses for DistributedDataParallel without "
            "it; to use it with PyTorch or TensorFlow:"
        )
        yield Finding("warn", "Horovod", fact, _build())
    elif "built" not in horovod:
        reason = _error(horovod)
        yield Finding("fail", "Horovod", f"does not import: {reason}", _cure(reason))
    elif horovod["version"] != HOROVOD:
        fact = f"{horovod['version']} is not supported, {HOROVOD} is; {horovod['path']}"
        yield Finding("fail", "Horovod", fact, _build())
    else:
        yield Finding("ok", "Horovod", f"{horovod['version']}, {horovod['path']}")


def _horovod_for(
    framework: _Framework, answers: dict[_Framework, Facts], horovod: Facts
) -> Iterator[Finding]:
    what, facts = f"Horovod for {framework.title}", answers[framework]
    if not facts:
        yield Finding("skip", what, f"{framework.title} is not installed")
    if "gpu" not in facts:
        return
    built = horovod["built"].get(framework.built)
    other = f"built for {framework.title} {built}, installed is {facts['version']}"
    differs = built not in (None, facts["version"])
    if "gloo" in facts:
        fact = other if differs else f"built for {built or 'it'}"
        yield Finding("warn" if differs else "ok", what, fact, _build() if differs else "")
    elif "error" in facts and (framework.name != "tensorflow" or "keras" in facts):
        reason = _error(facts)
        fact = f"{other}: {reason}" if differs else reason
        yield Finding("fail", what, fact, _cure(reason))


def _backends(answers: dict[_Framework, Facts]) -> Iterator[Finding]:
    built = {f: facts for f, facts in answers.items() if "gloo" in facts}
    if not built:
        return
    mpi = all(facts["mpi"] for facts in built.values()) and shutil.which("mpirun")
    gpu = any(facts["gpu"] for facts in built.values())
    for backend, title in (("gloo", "gloo"), ("mpi", "MPI"), ("nccl", "NCCL")):
        titles = [f.title for f, facts in built.items() if facts[backend]]
        lacking = " and ".join(f.title for f, facts in built.items() if not facts[backend])
        fact = f"not built for {lacking}"
        if not lacking:
            yield Finding("ok", title, f"built for {' and '.join(titles)}")
        elif backend == "gloo":
            fact += ": start with horovodrun --mpi" if mpi else ", and without it ranks cannot meet"
            yield Finding("warn" if mpi else "fail", title, fact, _build())
        elif backend == "nccl" and gpu:
            fact += ": gradients of a GPU go through this host's memory"
            remedy = f"export HOROVOD_GPU_OPERATIONS=NCCL\n{_build()}"
            yield Finding("warn", title, fact, remedy)
        else:
            why = "there is no GPU here" if backend == "nccl" else "gloo is enough"
            yield Finding("skip", title, f"{fact}: {why}")


def _seam(framework: _Framework, answers: dict[_Framework, Facts]) -> Iterator[Finding]:
    what, facts = f"exchange of {framework.title}", answers[framework]
    if "seam" in facts:
        yield Finding("ok", what, f"{facts['seam']} can take its place")
    elif "gloo" in facts:
        reason = _error(facts)
        yield Finding("fail", what, reason, _cure(reason))


def _launchers(
    horovod: Facts, answers: dict[_Framework, Facts], *, several: bool
) -> Iterator[Finding]:
    if horovod:
        yield from _horovodrun()
    mpirun = shutil.which("mpirun")
    refuses = os.geteuid() == 0 and not all(os.environ.get(name) for name in _AS_ROOT)
    if not any(facts.get("mpi") for facts in answers.values()):
        yield Finding("skip", "mpirun", f"{mpirun or 'not on the PATH'}: no Horovod with MPI")
    elif mpirun is None:
        remedy = "apt-get install openmpi-bin  # as root"
        yield Finding("warn", "mpirun", "not on the PATH: horovodrun --mpi cannot start", remedy)
    elif refuses:
        remedy = f"export {' '.join(f'{name}=1' for name in _AS_ROOT)}"
        yield Finding("warn", "mpirun", f"{mpirun} refuses to be run by root", remedy)
    else:
        yield Finding("ok", "mpirun", mpirun)
    ssh = shutil.which("ssh")
    if ssh:
        yield Finding("ok", "ssh", ssh)
    else:
        remedy = "apt-get install openssh-client  # as root"
        fact = "not on the PATH: several hosts need it"
        yield Finding("fail" if several else "warn", "ssh", fact, remedy)


def _horovodrun() -> Iterator[Finding]:
    folders = [sysconfig.get_path("scripts"), sysconfig.get_path("scripts", "posix_user")]
    program = shutil.which("horovodrun")
    if program and str(Path(program).parent) in folders:
        yield Finding("ok", "horovodrun", program)
        return
    fact = f"{program} is not that of {sys.executable}" if program else "not on the PATH"
    folder = next((f for f in folders if Path(f, "horovodrun").exists()), folders[0])
    yield Finding("warn", "horovodrun", fact, f'export PATH="{folder}:$PATH"')


def _hostname(*, several: bool, timeout: float) -> Iterator[Finding]:
    name = socket.gethostname()
    addresses = inspect("addresses", timeout, name).get(name, [])
    if _reachable(addresses):
        yield Finding("ok", "hostname", f"{name} is {addresses[0]}")
        return
    place = f"resolves to {addresses[0]}" if addresses else "does not resolve"
    fact = f"{name} {place}: other hosts cannot reach this one"
    yield Finding("fail" if several else "warn", "hostname", fact, _line(name, _own_address()))


def _hosts(hosts: Sequence[str], port: int, timeout: float) -> Iterator[Finding]:
    split = [host.rpartition("@") for host in hosts]
    names = inspect("addresses", timeout, *(name for *_, name in split)) if hosts else {}
    for host, (user, _, name) in zip(hosts, split):
        addresses = names.get(name, [])
        if not addresses and configured(host):
            yield _remote(host, "", port, timeout)
        elif not _reachable(addresses):
            place = f"resolves to {addresses[0]} here" if addresses else "does not resolve here"
            yield Finding("fail", f"host {host}", place, _line(name, "ADDRESS"))
        elif _is_here(addresses[0]):
            yield Finding("ok", f"host {host}", f"{addresses[0]}, this one")
        else:
            yield _remote(host, addresses[0], port, timeout)
        if user:
            fact = f"horovodrun takes hosts without a user: write {name} there"
            remedy = f"# in ~/.ssh/config, which horovodrun's ssh reads:\nHost {name}\nUser {user}"
            yield Finding("warn", f"user of {name}", fact, remedy)


def _remote(host: str, address: str, port: int, timeout: float) -> Finding:
    """Check over ssh that a host resolves its own name to a reachable address.

    Args:
        host, port, timeout: for ssh.
        address: of the host; empty if only ssh's configuration leads to it.
    """
    options = ["BatchMode=yes", "ConnectTimeout=10", "LogLevel=ERROR"]
    options += ["StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null"]  # nothing is remembered
    ask = 'n=$(hostname); echo "@ $n $(getent ahosts $n | sed "s/ .*//;q")"'
    ssh = ["ssh", "-p", str(port), *(f"-o{option}" for option in options), host]
    code, output = run([*ssh, ask], timeout) if shutil.which("ssh") else (255, "there is no ssh")
    answer = re.search(r"^@ (\S+) ?(\S*)$", output, re.MULTILINE)
    if code != 0 or answer is None:
        fact = f"ssh does not get there without a password: {_short(output.strip())}"
        remedy = f"ssh -v -p {port} {host}  # says why; sshd has to run there, on this port"
        if "Permission denied" in output:
            remedy = f"ssh-keygen -t ed25519  # unless you have a key\nssh-copy-id -p {port} {host}"
        return Finding("fail", f"host {host}", fact, remedy)
    name, own_address = answer.groups()
    if not _reachable([own_address] if own_address else []):
        resolves = f"resolves to {own_address}" if own_address else "does not resolve"
        fact = f"its own name {name} {resolves} there"
        remedy = _line(name, address or "ADDRESS", f"of {host}")
        return Finding("fail", f"host {host}", fact, remedy)
    known = address or "only ssh knows its address"
    return Finding("ok", f"host {host}", f"{known}, ssh gets there; there {name} is {own_address}")


def _code(paths: Sequence[str], answers: dict[_Framework, Facts]) -> Iterator[Finding]:
    keras3 = _release(_installed("keras")) >= (3, 0)
    if not paths:
        if keras3 and "gloo" in _facts_of("tensorflow", answers):
            fact = (
                "with Keras 3 the optimizer of stock horovod.tensorflow.keras reduces nothing, and "
                "raises no error"
            )
            remedy = "hvd-gradcomp doctor train.py  # says whether your code has it"
            yield Finding("warn", "your code", fact, remedy)
        return
    files = sources(paths)
    clean = 0
    for file in files:
        try:
            ordered = sorted(faults(file, keras3=keras3), key=lambda fault: fault.line)
        except (SyntaxError, ValueError, OSError) as error:
            remedy = f"{sys.executable} -m py_compile {file}"
            yield Finding("warn", "your code", f"{file} cannot be read: {error}", remedy)
            continue
        clean += not ordered
        for fault in ordered:
            place = f"{fault.path}:{fault.line}: {fault.what}"
            yield Finding("fail", "your code", place, fault.remedy)
    if clean:
        yield Finding("ok", "your code", f"nothing to object to in {counted(clean, 'file')}")
    if not files:
        yield Finding("skip", "your code", f"no Python files in {', '.join(paths)}")


def _self_test(
    framework: _Framework, facts: Facts, backend: str, timeout: float
) -> Iterator[Finding]:
    what = f"{framework.title} over {backend}"
    if not facts:
        return
    if "seam" not in facts or not facts[backend]:
        lacking = "does not run here" if "seam" not in facts else f"has no {backend}"
        yield Finding("skip", what, f"no self-test: Horovod for {framework.title} {lacking}")
        return
    if backend == "mpi" and not shutil.which("mpirun"):
        yield Finding("skip", what, "no self-test: there is no mpirun")
        return
    program = [sys.executable, "-m", "hvd_gradcomp.cli.selftest", framework.name]
    launch = ["-m", "horovod.runner.launch", f"--{backend}", "-np", "2", *program]
    environment = {}
    # Allow two ranks on one core, and root, which is the usual user in a container.
    environment["OMPI_MCA_rmaps_base_oversubscribe"] = "1"
    environment["OMPI_MCA_mpi_yield_when_idle"] = "1"
    environment.update({name: "1" for name in _AS_ROOT} if os.geteuid() == 0 else {})
    remedy = f"{' '.join(['horovodrun', *launch[2:]])}  # shows all of it"
    yield _tested(what, [sys.executable, *launch], environment, timeout, remedy)


def _tested(
    what: str, command: Sequence[str], settings: dict[str, str], timeout: float, remedy: str
) -> Finding:
    """Run a self-test of two ranks; a rank that hangs prints where, and exits."""
    environment = {"TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1", **settings}
    environment["CUDA_VISIBLE_DEVICES"] = "-1"  # two ranks on one GPU are an error to NCCL
    began = time.time()
    code, output = run([*command, str(began + timeout)], timeout + _GRACE, environment)
    if code == 0 and "2 equal replicas" in output:
        fact = f"self-test: two ranks trained, replicas are equal ({time.time() - began:.0f} s)"
        return Finding("ok", what, fact)
    hangs = code is None or "Timeout (" in output  # a rank's faulthandler prints this
    how = f"hangs: not done after {timeout:g} s" if hangs else f"fails with {code}"
    lines = output.strip().splitlines()
    of_ranks = [line for line in lines if re.match(r"\[[\d,]+\]<", line)]  # not the launcher's
    last = "\n".join(f"| {line}" for line in (of_ranks or lines)[-_LINES:])
    return Finding("fail", what, f"self-test {how}; the end of what it printed:\n{last}", remedy)


def _build() -> str:
    """Return the commands that build a fitting Horovod."""
    return build(*_missing())


def _cure(error: str) -> str:
    """Return the remedy for an error while importing Horovod."""
    return cure(error, *_missing())


def _missing() -> tuple[list[str], bool]:
    """Return the requirements to install first, and True to build for PyTorch alone."""
    missing = [f for f in _FRAMEWORKS if not importlib.util.find_spec(f.name)]
    if [f.name for f in missing] == ["tensorflow"]:
        return [], True
    return [f.requirement for f in missing], False


def _line(name: str, address: str, where: str = "") -> str:
    where = f" {where}" if where else ""
    return (
        f"# in /etc/hosts{where}, instead of any line that gives {name} another address:\n"
        f"{address} {name}"
    )


def _reachable(addresses: Sequence[str]) -> bool:
    """Return True if the first address, which is the one used, is not a loopback."""
    return bool(addresses) and not ipaddress.ip_address(addresses[0].partition("%")[0]).is_loopback


def _is_here(address: str) -> bool:
    """Return True if the address is this host's: a socket can bind to no other."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def _own_address() -> str:
    """Return this host's address for packets to other hosts; "ADDRESS" without a route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing; address reserved for documentation
            local_address: str = probe.getsockname()[0]
        except OSError:
            return "ADDRESS"
    return local_address


def _facts_of(name: str, answers: dict[_Framework, Facts]) -> Facts:
    return next((facts for f, facts in answers.items() if f.name == name), {})


def _installed(name: str) -> str:
    """Return the version of a package, without importing it; "0" if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "0"


def _release(version: str) -> tuple[int, int]:
    major, minor = [*re.findall(r"\d+", version), "0", "0"][:2]
    return int(major), int(minor)


def _error(facts: Facts) -> str:
    return _short(str(facts.get("error", "it ended without an answer")))


def _short(text: str) -> str:
    return text if len(text) <= 500 else f"{text[:500]} ..."
