"""What `pip install .` ships, and that it runs without any other package."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

from hvd_gradcomp.ops import building

ROOT = Path(__file__).parents[2]
PACKAGING = ("setup.py", "pyproject.toml", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built offline from a copy: a build leaves files in its source tree."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in PACKAGING:
        shutil.copy(ROOT / name, source)
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(ROOT / "hvd_gradcomp", source / "hvd_gradcomp", ignore=ignored)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-index", "--no-deps"]
    command += ["--no-build-isolation", "--wheel-dir", str(target), str(source)]
    subprocess.run(command, check=True)
    (built,) = target.glob("*.whl")
    return built


def _metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def test_ships_every_module_and_its_types_and_nothing_else(wheel: Path) -> None:
    expected = {p.relative_to(ROOT).as_posix() for p in (ROOT / "hvd_gradcomp").rglob("*.py")}
    with zipfile.ZipFile(wheel) as archive:
        shipped = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert len(expected) > 1
    sources = (*building.NATIVE, *building.HEADERS, building.OPERATIONS)
    sources = {f"hvd_gradcomp/ops/{name}" for name in sources}
    native = {name for name in shipped if name.startswith("hvd_gradcomp/ops/_native.")}
    operations = {name for name in shipped if name.startswith("hvd_gradcomp/ops/_tensorflow-")}
    tensorflow = importlib.util.find_spec("tensorflow") is not None
    assert len(native) <= 1, "one library, where there is a compiler"
    assert len(operations) == (building.compiles() and tensorflow), "and one where TensorFlow is"
    assert shipped - native - operations == expected | sources | {"hvd_gradcomp/py.typed"}


def test_requires_little_outside_the_extras(wheel: Path) -> None:
    metadata = _metadata(wheel)
    requirements = metadata.get_all("Requires-Dist") or []
    always = [r for r in requirements if "extra ==" not in r]
    assert always == ["click>=8.1", "rich", "safetensors", "tabulate"]
    assert {"torch", "tensorflow", "test", "examples"} <= set(metadata.get_all("Provides-Extra"))
    # Horovod as released does not build against today's frameworks, so pip must not try.
    assert [r for r in requirements if r.startswith("horovod")] == []


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
