"""`hvd-gradcomp doctor` finds faults that are really there: in environments made for it."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
import venv
from pathlib import Path

import pytest

from hvd_gradcomp.cli import doctor, hosts, inspection, usercode
from hvd_gradcomp.ops import native
from tests.conftest import STANDS_IN
from tests.processes import alive

ROOT = Path(__file__).resolve().parents[2]
SITE = Path(sysconfig.get_path("purelib"))
BUILD = "-m hvd_gradcomp build-horovod"

real = pytest.mark.skipif(STANDS_IN, reason="needs Horovod")


def diagnose(*options, python=sys.executable, path=(), under=(), code=1):
    """What the doctor finds there, by what was looked at; it has to end with this code."""
    command = [*under, str(python), "-m", "hvd_gradcomp", "doctor", "--no-self-test", "--json", "-"]
    done = subprocess.run(
        [*command, *options],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [*path, ROOT]))},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == code, done.stdout + done.stderr
    findings = [doctor.Finding(**finding) for finding in json.loads(done.stdout)]
    assert all(bool(f.remedy) == (f.mark in ("warn", "fail")) for f in findings), findings
    assert (code == 1) == any(f.mark == "fail" for f in findings)
    return {finding.what: finding for finding in findings}


def environment(folder, *packages, but=()):
    """A virtual environment with packages of this one: those named, or all but some."""
    venv.create(folder, symlinks=True, with_pip=False)
    (site,) = folder.glob("lib/python3*/site-packages")
    for entry in SITE.iterdir():
        name = entry.name.partition("-")[0]
        if (name in packages if packages else name not in but) and not (site / entry.name).exists():
            (site / entry.name).symlink_to(entry)
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    return environment(tmp_path_factory.mktemp("bare") / "env", "click", "tabulate")


def horovod(folder):
    """This Horovod once more, its sources as files that may be changed."""

    def copy(source, target):
        return (os.symlink if source.endswith(".so") else shutil.copy)(source, target)

    shutil.copytree(
        SITE / "horovod",
        folder / "horovod",
        copy_function=copy,
        ignore=shutil.ignore_patterns("__pycache__", "spark", "ray", "mxnet", "data"),
    )
    return folder / "horovod"


@real
def test_no_horovod(tmp_path):
    python = environment(tmp_path / "env", but=("horovod",))
    findings = diagnose("--framework", "torch", python=python, code=0)
    assert findings["PyTorch"].mark == "ok"
    assert findings["Horovod"].mark == "warn"
    assert "DistributedDataParallel without it" in findings["Horovod"].fact
    assert findings["Horovod"].remedy == f"{python} {BUILD}"
    assert findings["ready"] == doctor.Finding(
        "ok",
        "ready",
        "DDP: ready. FSDP2: ready. Horovod: not installed (needed for "
        "hvd_gradcomp.torch.DistributedOptimizer, TensorFlow and Keras).",
    )


def test_what_is_ready_is_said_at_the_end():
    """Of each library by itself, and with a self-test that fails."""
    pytorch, tensorflow = doctor._FRAMEWORKS
    torch = {"version": "2.1.0", "gpu": False, "ddp": True, "fsdp": False, "seam": "x"}
    answers, horovod = {pytorch: torch, tensorflow: {}}, {"version": "0.28.1"}
    assert list(doctor._readiness(answers, horovod, [])) == [
        "DDP: ready.",
        "FSDP2: not with this PyTorch, 2.1.0.",
        "Horovod for PyTorch: ready.",
    ]
    failed = ["DistributedDataParallel", "PyTorch over gloo"]
    ddp, _, hvd = doctor._readiness(answers, horovod, failed)
    assert "ready." not in ddp and hvd == "Horovod for PyTorch: not ready, see above."
    assert list(doctor._readiness({pytorch: {}}, {}, []))[:2] == [
        "DDP: needs PyTorch.",
        "FSDP2: needs PyTorch.",
    ]


@real
def test_no_horovod_and_no_tensorflow(tmp_path):
    """A user of PyTorch is not told to install TensorFlow."""
    python = environment(tmp_path / "env", but=("horovod", "tensorflow"))
    for chosen in ((), ("--framework", "torch")):
        finding = diagnose(*chosen, python=python, code=0)["Horovod"]
        assert finding.fact.startswith("not installed: hvd_gradcomp.torch.ddp")
        alone = f"HOROVOD_WITHOUT_TENSORFLOW=1 {python} {BUILD}  # for PyTorch alone"
        assert finding.remedy == alone


@real
def test_horovod_without_torch(tmp_path):
    (extension,) = (horovod(tmp_path) / "torch").glob("mpi_lib_v2*.so")
    extension.unlink()
    findings = diagnose("--framework", "torch", path=[tmp_path])
    assert findings["Horovod"].mark == "ok"
    assert findings["Horovod for PyTorch"].mark == "fail"
    assert "has not been built" in findings["Horovod for PyTorch"].fact
    assert findings["Horovod for PyTorch"].remedy == f"{sys.executable} {BUILD}"


@real
def test_without_gloo_and_another_version(tmp_path):
    """The compiled library is asked, so the answer is changed where it is asked."""
    package = horovod(tmp_path)
    asks = "bool(self.MPI_LIB_CTYPES.horovod_gloo_built())"
    replace(package / "common" / "basics.py", asks, "False")
    replace(package / "__init__.py", "0.28.1", "0.27.0")
    findings = diagnose("--framework", "torch", path=[tmp_path])
    assert findings["gloo"].mark == "warn"
    assert findings["gloo"].fact == "not built for PyTorch: start with horovodrun --mpi"
    assert findings["gloo"].remedy == f"{sys.executable} {BUILD}"
    assert findings["MPI"].mark == "ok"
    assert findings["Horovod"].mark == "fail"
    assert "0.27.0 is not supported, 0.28.1 is" in findings["Horovod"].fact
    assert findings["Horovod"].remedy == f"{sys.executable} {BUILD}"


def replace(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.skipif(STANDS_IN, reason="needs Keras 3")
def test_keras_3_with_the_stock_optimizer(tmp_path):
    python = environment(tmp_path / "env", "click", "tabulate", "keras")
    train = tmp_path / "train.py"
    train.write_text("import horovod.tensorflow.keras as hvd\nhvd.init()\n")
    assert diagnose(str(train), python=python)["your code"].mark == "ok"
    train.write_text(train.read_text() + "optimizer = hvd.DistributedOptimizer(sgd)\n")
    finding = diagnose(str(tmp_path), python=python)["your code"]
    assert finding.mark == "fail"
    assert f"{train}:3: horovod.tensorflow.keras.DistributedOptimizer" in finding.fact
    assert finding.remedy == "import hvd_gradcomp.tensorflow.keras as hvd"


HOSTNAME = """
hostname host9
printf '%s host9\\n127.0.0.1 localhost\\n' "$1" > "$2"
mount --bind "$2" /etc/hosts
shift 2
exec "$@"
"""


def test_hostname_that_resolves_to_loopback(bare, tmp_path):
    unshare = ["unshare", "-um" if os.geteuid() == 0 else "-Urum"]
    works = [*unshare, "mount", "--bind", "/etc/hosts", "/etc/hosts"]
    if not shutil.which("unshare") or subprocess.run(works, capture_output=True).returncode:
        pytest.skip("the kernel, or the container, allows no namespace of one's own")
    under = [*unshare, "sh", "-ec", HOSTNAME, "sh"]
    findings = diagnose(python=bare, under=[*under, "127.0.0.1", str(tmp_path / "hosts")])
    assert findings["hostname"].mark == "warn"
    assert findings["hostname"].fact.startswith("host9 resolves to 127.0.0.1")
    comment, line = findings["hostname"].remedy.splitlines()
    assert comment.startswith("# in /etc/hosts")
    address, name = line.split()
    assert not address.startswith("127.")
    assert name == "host9"
    findings = diagnose(python=bare, under=[*under, "10.9.8.7", str(tmp_path / "hosts")])
    assert findings["hostname"] == doctor.Finding("ok", "hostname", "host9 is 10.9.8.7")


def test_hostname_where_no_namespace_can_be_made(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    (finding,) = doctor._hostname(several=False, timeout=60)
    assert (finding.mark, finding.remedy.splitlines()[-1].split()[-1]) == ("warn", "localhost")
    (finding,) = doctor._hostname(several=True, timeout=60)
    assert finding.mark == "fail"


def test_hosts_that_others_cannot_reach(bare):
    findings = diagnose("--hosts", "localhost:2,nowhere.invalid", python=bare)
    assert findings["host localhost"].fact.startswith("resolves to ")
    assert findings["host localhost"].mark == findings["host nowhere.invalid"].mark == "fail"
    assert findings["host nowhere.invalid"].fact == "does not resolve here"


@pytest.mark.skipif(not shutil.which("ssh"), reason="needs ssh")
def test_a_host_without_sshd():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    finding = doctor._remote("127.0.0.1", "127.0.0.1", port, 20)
    assert finding.mark == "fail"
    assert f"ssh -v -p {port} 127.0.0.1" in finding.remedy


def test_a_host_that_only_ssh_knows_is_asked_as_its_user(tmp_path, monkeypatch):
    ssh = tmp_path / "ssh"
    ssh.write_text(
        "#!/bin/sh\n"
        'case "$*" in\n'
        '"-G -- me@inner.invalid") echo proxyjump bastion.invalid;;\n'
        '"-G "*) echo hostname "$3";;\n'
        '*" me@inner.invalid n="*) echo @ inner 192.0.2.1;;\n'
        "esac\n"
    )
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    names = [host.name for host in hosts.parse("me@inner.invalid:2,nosuch.invalid,", counted=False)]
    reached, user, unknown = doctor._hosts(names, 22, 60)
    assert reached.mark == "ok" and reached.what == "host me@inner.invalid"
    assert reached.fact == "only ssh knows its address, ssh gets there; there inner is 192.0.2.1"
    assert user.mark == "warn" and user.remedy.splitlines()[1:] == ["Host inner.invalid", "User me"]
    assert (unknown.mark, unknown.fact) == ("fail", "does not resolve here")


def test_a_user_of_a_host_is_not_part_of_its_name():
    here, user = doctor._hosts(["me@127.0.0.1"], 22, 60)
    assert here.fact == "resolves to 127.0.0.1 here"
    assert here.remedy.splitlines()[-1] == "ADDRESS 127.0.0.1"
    assert user.mark == "warn"


def test_nothing_installed(bare):
    findings = diagnose(python=bare)
    for what in ("PyTorch", "TensorFlow", "Horovod"):
        assert (findings[what].mark, findings[what].fact) == ("fail", "not installed")
    assert "pip install 'torch>=2.0'" in findings["PyTorch"].remedy


STANDS_FOR = {
    "torch": "from types import SimpleNamespace\n__version__ = '2.5.0'\n"
    "cuda = SimpleNamespace(is_available=lambda: True)\n",
    "horovod": "__version__ = '0.28.1'\n",
}
BACKENDS = "def init(): pass\ngloo_built = lambda: {}\nmpi_built = nccl_built = lambda: False\n"


@pytest.mark.parametrize(
    ("build", "what", "says", "cures"),
    [
        ("import os; os.abort()", "Horovod for PyTorch", "died of SIGABRT", BUILD),
        ("import time; time.sleep(600)", "Horovod for PyTorch", "no answer in 3 s", BUILD),
        (
            "raise ImportError('undefined symbol: _ZN5torch')",
            "Horovod for PyTorch",
            "built for PyTorch 2.4.0, installed is 2.5.0: ImportError: undefined symbol",
            BUILD,
        ),
        ("import yaml", "Horovod for PyTorch", "No module named 'yaml'", "pip install pyyaml"),
        (
            "raise ImportError('libmpi.so.40: cannot open shared object file')",
            "Horovod for PyTorch",
            "libmpi.so.40",
            "apt-get install openmpi-bin",
        ),
        (BACKENDS.format(False), "gloo", "ranks cannot meet", BUILD),
        (BACKENDS.format(True), "NCCL", "gradients of a GPU", "HOROVOD_GPU_OPERATIONS=NCCL"),
    ],
    ids=["aborts", "hangs", "other torch", "no yaml", "no libmpi", "no gloo", "no nccl"],
)
def test_broken_builds(build, what, says, cures, bare, tmp_path):
    for name, text in {**STANDS_FOR, "horovod/torch": build}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(text)
    (tmp_path / "horovod" / "metadata.json").write_text('{"pytorch": "2.4.0"}')
    began = time.monotonic()
    patience = "3" if "sleep" in build else "30"  # an import on a busy machine may take seconds
    findings = diagnose("--timeout", patience, python=bare, path=[tmp_path])
    assert time.monotonic() - began < 60
    assert says in findings[what].fact
    assert cures in findings[what].remedy


def test_a_rank_that_hangs_says_where(tmp_path):
    (tmp_path / "torch.py").write_text("import time\ntime.sleep(600)\n")
    command = [sys.executable, "-m", "hvd_gradcomp.cli.selftest", "torch", str(time.time())]
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "Timeout" in done.stderr
    assert f"{tmp_path}/torch.py" in done.stderr


def test_what_takes_too_long_is_ended_with_all_that_it_started(tmp_path):
    started = tmp_path / "pid"
    code, output = inspection.run(["sh", "-c", f"sleep 600 & echo $! | tee {started}; wait"], 1)
    assert code is None
    assert output.strip() == started.read_text().strip()
    time.sleep(0.2)
    assert not alive(int(output))


def test_a_variable_that_means_nothing_is_named_with_the_nearest(monkeypatch):
    monkeypatch.setenv("HVD_GRADCOMP_NATVE", "0")
    monkeypatch.setenv("HVD_GRADCOMP_NATIVE", "0")
    (finding,) = doctor._variables()
    assert finding.mark == "warn" and finding.remedy == "unset HVD_GRADCOMP_NATVE"
    assert finding.fact.endswith("means nothing; did you mean 'HVD_GRADCOMP_NATIVE'?")


def test_a_variable_with_a_wrong_value_is_an_error(monkeypatch):
    monkeypatch.setenv("HVD_GRADCOMP_NATIVE", "off")
    with pytest.raises(ValueError, match=r"HVD_GRADCOMP_NATIVE must be 0, .* or 1, got 'off'"):
        native.enabled()


def test_wrong_usage():
    command = [sys.executable, "-m", "hvd_gradcomp", "doctor", "--framework", "mxnet"]
    assert subprocess.run(command, cwd=ROOT, capture_output=True).returncode == 2


CODE = {
    "import horovod.keras as h\nh.DistributedOptimizer(o)": "horovod.keras",
    "import horovod.tensorflow.keras\nhorovod.tensorflow.keras.DistributedOptimizer(o)": (
        "horovod.tensorflow.keras"
    ),
    "from horovod.tensorflow import keras as h\nf(h.DistributedOptimizer)": (
        "horovod.tensorflow.keras"
    ),
    "from horovod.tensorflow.keras import *\nDistributedOptimizer(o)": "horovod.tensorflow.keras",
    "import horovod.tensorflow as h\nh.DistributedOptimizer(o)": "horovod.tensorflow",
    "import horovod.torch as h\nh.DistributedOptimizer(o)": None,
    "import hvd_gradcomp.tensorflow.keras as h\nh.DistributedOptimizer(o)": None,
    "import horovod.torch as h, hvd_gradcomp as g\nh.allreduce(x, g.StromCompressor(1))": (
        "StromCompressor"
    ),
    "import horovod.torch as h\nfrom hvd_gradcomp import DGCCompressor as D\nc = D()\n"
    "h.DistributedOptimizer(o, compression=c)": "DGCCompressor",
    "import horovod.torch as h\nfrom hvd_gradcomp import FP16Compressor as D\n"
    "h.DistributedOptimizer(o, compression=D())": None,
}


@pytest.mark.parametrize(("code", "names"), CODE.items(), ids=map(str, range(len(CODE))))
def test_finds_in_code_what_stock_horovod_does_wrongly(code, names, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(code)
    listed = list(usercode.faults(path, keras3=True))
    assert len(listed) == (names is not None)
    for fault in listed:
        assert fault.line == code.count("\n") + 1
        assert names in fault.what
        assert fault.remedy.startswith("import hvd_gradcomp.t")
    if names and "keras" in names:
        assert list(usercode.faults(path, keras3=False)) == []


def test_own_examples_are_sound_and_what_is_not_python_is_named(tmp_path, bare):
    for path in usercode.sources([str(ROOT / "examples")]):
        assert list(usercode.faults(path, keras3=True)) == []
    (tmp_path / "old.py").write_text("print 'no'\n")
    findings = diagnose(str(tmp_path), python=bare)
    assert findings["your code"].mark == "warn"
    assert "old.py" in findings["your code"].fact


@real
def test_the_seam_of_another_horovod_is_refused():
    pytest.importorskip("torch")
    from horovod.torch.optimizer import _DistributedOptimizer as Stock

    from hvd_gradcomp.torch.drop_in.optimizer import check_seam

    check_seam(Stock)
    body = {name: value for name, value in vars(Stock).items() if name != "_register_hooks"}
    with pytest.raises(RuntimeError, match="_register_hooks"):
        check_seam(type("Other", (), body))
