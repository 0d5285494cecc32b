"""What is shipped, as source and built, and that it runs without any other package."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Callable
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

import hvd_gradcomp
from hvd_gradcomp.ops import building, native

ROOT = Path(__file__).parents[2]
SCRIPT = "hvd_gradcomp/cli/build-horovod.sh"
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
OFFLINE = ("--quiet", "--no-index", "--no-deps")
ENCODE = """
import torch
import hvd_gradcomp
from hvd_gradcomp import QSGDCompressor
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.ops import native
from hvd_gradcomp.ops.torch import TorchOps
from hvd_gradcomp.testing import World
world = World(QSGDCompressor(bits=8), TorchOps(), Layout(("w",), ((1000,),)), size=2)
gradients = [world.flat([torch.ones(1000)]) for _ in range(2)]
print(hvd_gradcomp.__file__)
print(native.library() and native.library()._name)
print(float(world.step(gradients)[0][:1000].min()))
"""


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[Path], None]], Path]:
    """Fills a folder by that name once for all workers of xdist; the others wait for it."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def made(name: str, fill: Callable[[Path], None]) -> Path:
        folder, done = base / f"packaging-{name}", base / f"packaging-{name}.done"
        with (base / f"packaging-{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                shutil.rmtree(folder, ignore_errors=True)  # of one that failed
                folder.mkdir()
                fill(folder)
                done.touch()
        return folder

    return made


@pytest.fixture(scope="module")
def sdist(once, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built offline from a copy: a build leaves files in its source tree."""

    def build(target: Path) -> None:
        source = tmp_path_factory.mktemp("copy") / "tree"
        left_out = (".git", ".venv*", ".*_cache", "__pycache__", "build", "dist", "results")
        shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(*left_out, "_build"))
        program = f"from setuptools import build_meta; build_meta.build_sdist({str(target)!r})"
        subprocess.run([sys.executable, "-c", program], cwd=source, check=True, capture_output=True)

    (built,) = once("sdist", build).iterdir()
    return built


@pytest.fixture(scope="module")
def wheel(once, sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the sdist, as pip does where there is no wheel.

    Nothing is optimized: it takes most of a build, and the libraries of this tree have been.
    """

    def build(target: Path) -> None:
        command = [*PIP, "wheel", *OFFLINE, "--no-build-isolation", "--wheel-dir", str(target)]
        tools = tmp_path_factory.mktemp("tools")
        variables = {}
        for compiler in (("CC", "gcc", "cc"), ("CXX", "g++", "c++")) if building.compiles() else ():
            script = tools / compiler[1]
            script.write_text(f'#!/bin/sh\nexec {building._compiler(*compiler)} "$@" -O0\n')
            script.chmod(stat.S_IRWXU)
            variables[compiler[0]] = str(script)
        subprocess.run([*command, str(sdist)], check=True, env={**os.environ, **variables})

    (built,) = once("wheel", build).glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(once, wheel: Path) -> Path:
    """The programs of a new environment with the wheel; other packages are those of this one."""

    def build(target: Path) -> None:
        folder = target / "env"
        venv.create(folder, symlinks=True, with_pip=False)
        python = folder / "bin" / "python"
        subprocess.run([*PIP, "--python", str(python), "install", *OFFLINE, str(wheel)], check=True)
        (site,) = folder.glob("lib/python3*/site-packages")
        # What it names is searched as it is: an editable install there is not seen.
        (site / "others.pth").write_text(sysconfig.get_path("purelib"))

    return once("clean", build) / "env" / "bin"


def run_program(program: Path, *arguments: str, folder: Path, code: int = 0) -> str:
    """In a folder elsewhere, so that no checkout is found."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [program, *arguments], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def _metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def test_the_sdist_has_what_make_check_test_needs(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert sdist.name == f"hvd_gradcomp-{hvd_gradcomp.__version__}.tar.gz"
    expected = {"CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile", "README.md", SCRIPT}
    expected |= {"pyproject.toml", "setup.py", ".ci/run", "docker/constraints.txt"}
    expected |= {"CITATION.cff", "SECURITY.md", ".github/workflows/ci.yml"}
    for folder in ("benchmarks", "docs", "examples", "hvd_gradcomp", "tests"):
        expected |= {path.relative_to(ROOT).as_posix() for path in (ROOT / folder).rglob("*.py")}
    expected |= {path.relative_to(ROOT).as_posix() for path in ROOT.glob("tests/golden/*.json")}
    assert expected <= names
    assert not [name for name in names if name.endswith((".so", ".pyc"))]


def test_ships_every_module_and_its_types_and_nothing_else(wheel: Path) -> None:
    expected = {p.relative_to(ROOT).as_posix() for p in (ROOT / "hvd_gradcomp").rglob("*.py")}
    with zipfile.ZipFile(wheel) as archive:
        shipped = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert len(expected) > 1
    sources = (*building.NATIVE, *building.HEADERS, building.OPERATIONS)
    sources = {f"hvd_gradcomp/ops/{name}" for name in sources}
    native = shipped & {f"hvd_gradcomp/ops/{building.LIBRARY}"}
    operations = {name for name in shipped if name.startswith("hvd_gradcomp/ops/_tensorflow-")}
    tensorflow = importlib.util.find_spec("tensorflow") is not None
    assert len(native) == building.compiles(), "one library, where there is a compiler"
    assert len(operations) == (building.compiles() and tensorflow), "and one where TensorFlow is"
    assert shipped - native - operations == expected | sources | {"hvd_gradcomp/py.typed", SCRIPT}


def test_one_wheel_fits_any_python_of_a_platform(wheel: Path) -> None:
    tags = wheel.stem.split("-")[2:]
    assert tags == ["py3", "none", sysconfig.get_platform().replace("-", "_").replace(".", "_")]


def test_requires_little_outside_the_extras(wheel: Path) -> None:
    metadata = _metadata(wheel)
    requirements = metadata.get_all("Requires-Dist") or []
    always = [r for r in requirements if "extra ==" not in r]
    assert always == ["click>=8.1", "rich", "safetensors", "tabulate"]
    assert {"torch", "tensorflow", "test", "examples"} <= set(metadata.get_all("Provides-Extra"))
    # Horovod as released does not build against today's frameworks, so pip must not try.
    assert [r for r in requirements if r.startswith("horovod")] == []


def test_the_extra_of_horovod_is_what_its_build_installs(wheel: Path) -> None:
    """The extra cannot build Horovod; it saves the build's script the Python packages."""
    script = (ROOT / SCRIPT).read_text()
    installs = re.findall(r'^ *"\$python" -m pip install --quiet ([^-\n]+)$', script, re.MULTILINE)
    assert len(installs) == 2
    words = {word for line in installs for word in shlex.split(line)}
    extra = [
        r.partition(";")[0].strip()
        for r in _metadata(wheel).get_all("Requires-Dist") or []
        if r.partition(";")[2].replace("'", '"').strip() == 'extra == "horovod"'
    ]
    assert {*extra} == words


def test_says_who_made_it_and_under_which_licence(wheel: Path) -> None:
    metadata = _metadata(wheel)
    assert metadata["Version"] == hvd_gradcomp.__version__
    assert metadata["Author"] == "The hvd_gradcomp authors"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata.get_payload().startswith("# ")
    assert len(metadata.get_all("Classifier")) > 10


def test_works_with_no_other_package_on_the_path(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    program = "import hvd_gradcomp; print(hvd_gradcomp.__version__, hvd_gradcomp.__file__)"
    # -S leaves out site-packages: no framework, no NumPy.
    result = subprocess.run(
        [sys.executable, "-S", "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        check=True,
        capture_output=True,
        text=True,
    )
    version, file = result.stdout.split()
    assert version == _metadata(wheel)["Version"]
    assert Path(file).is_relative_to(tmp_path)


def test_a_library_that_cannot_be_loaded_is_left_out(tmp_path: Path, monkeypatch, caplog) -> None:
    """Plain ops go on, as where a wheel finds no libgomp, and the log says why."""
    (tmp_path / building.LIBRARY).write_bytes(b"no library")
    monkeypatch.setattr(native, "__file__", str(tmp_path / "native.py"))
    monkeypatch.delenv("HVD_GRADCOMP_NATIVE", raising=False)
    assert native.library.__wrapped__() is None
    assert "the C library cannot be loaded" in caplog.text


def test_installed_it_has_a_command_line_and_compresses(installed: Path, tmp_path: Path) -> None:
    assert "build-horovod" in run_program(installed / "hvd-gradcomp", "--help", folder=tmp_path)
    lines = run_program(installed / "python", "-c", ENCODE, folder=tmp_path).splitlines()
    assert Path(lines[0]).is_relative_to(installed.parent)
    if building.compiles():
        assert Path(lines[1]) == Path(lines[0]).with_name("ops") / building.LIBRARY
    assert float(lines[2]) == 1.0


def test_installed_it_builds_horovod(installed: Path, tmp_path: Path, monkeypatch) -> None:
    """The script is there, is run by bash with this Python, and its exit code comes back."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("bash", "env", "dirname"):
        (tools / name).symlink_to(shutil.which(name))
    monkeypatch.setenv("PATH", str(tools))
    lacks = run_program(installed / "hvd-gradcomp", "build-horovod", folder=tmp_path, code=2)
    assert "building Horovod needs 'cmake'; on Debian:" in lacks
    for name in ("cmake", "make", "g++", "mpicxx", "mpirun"):
        (tools / name).write_text("#!/bin/sh\necho 4.1.0\n")
        (tools / name).chmod(stat.S_IRWXU)
    other = run_program(
        installed / "hvd-gradcomp", "build-horovod", "nowhere", folder=tmp_path, code=2
    )
    assert "nowhere is no Python that runs" in other


def test_a_build_with_cuda_names_the_packages_that_lack(
    installed: Path, tmp_path: Path, monkeypatch
) -> None:
    """NVIDIA's packages are found where Python finds them, and taken before the system's."""
    nvcc = tmp_path / "site" / "nvidia" / "cu13" / "bin" / "nvcc"
    headers = nvcc.parents[1] / "include" / "crt" / "host_config.h"
    for file in (nvcc, headers):
        file.parent.mkdir(parents=True)
        file.touch(mode=stat.S_IRWXU)
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("cmake", "make", "g++", "mpicxx", "mpirun"):
        (tools / name).symlink_to("/bin/true")
    for name in ("bash", "env", "dirname", "sort", "tail"):
        (tools / name).symlink_to(shutil.which(name))
    monkeypatch.setenv("PATH", str(tools))
    monkeypatch.setenv("HOROVOD_GPU_OPERATIONS", "NCCL")
    build = ("build-horovod", "python3")
    (tools / "python3").write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    (tools / "python3").chmod(stat.S_IRWXU)
    monkeypatch.setenv("HOROVOD_CUDA_HOME", str(tmp_path))  # a system may have its own elsewhere
    none = run_program(installed / "hvd-gradcomp", *build, folder=tmp_path, code=2)
    assert "Here is no nvidia-cuda-nvcc;" in none
    assert "python3 -m pip install torch 'cuda-toolkit[cccl,nvcc]'" in none
    monkeypatch.delenv("HOROVOD_CUDA_HOME")
    (tools / "python3").write_text(
        f'#!/bin/sh\nPYTHONPATH={tmp_path / "site"} exec {sys.executable} -S "$@"\n'
    )
    some = run_program(installed / "hvd-gradcomp", *build, folder=tmp_path, code=2)
    assert "Here is no nvidia-nvvm nvidia-cuda-cccl nvidia-cuda-runtime;" in some
