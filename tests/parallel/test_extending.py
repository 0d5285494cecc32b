"""Methods of another package: on real ranks; and installed, in the command line and in files."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.methods import BALANCED, INT32, ONE_OF_TODAY, OUTSIDE, PRODUCTS, ROBUST, ROUNDED, TODAY
from tests.parallel.launch import ROOT, environment, horovodrun, launch, python

pytestmark = pytest.mark.parallel
PROGRAM = (sys.executable, "-m", "hvd_gradcomp")
MODEL = "tests.parallel.workers.trained"
NAMES = ("power-iteration", "random-stretch", "PowerIterationCompressor(rank=1)")
BROKEN = """
[build-system]
requires = ["setuptools>=64"]
build-backend = "setuptools.build_meta"
[project]
name = "broken-methods"
version = "0.3"
[project.entry-points."hvd_gradcomp.compressors"]
absent = "no_such_module:Compressor"
clashing = "clashing:StromCompressor"
dgc = "clashing_not:JUST_A_NUMBER"
other = "clashing_not:JUST_A_NUMBER"
power-iteration = "elsewhere:PowerIterationCompressor"
[tool.setuptools]
py-modules = ["clashing", "clashing_not"]
"""
CLASHING = """
from hvd_gradcomp import QSGDCompressor
class StromCompressor(QSGDCompressor): pass
"""
SAVED = """
import sys
import numpy as np, keras
import hvd_gradcomp.tensorflow.keras as hvd
hvd.init()
if sys.argv[1] == "save":
    from power_iteration import PowerIterationCompressor
    from hvd_gradcomp import after, partition
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(40), keras.layers.Dense(4)])
    rules = partition({"*kernel*": after(1, None, PowerIterationCompressor(rank=1)), "*": None})
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=rules)
    model.compile(optimizer, "mse")
else:
    model = keras.models.load_model("model.keras")
    assert "PowerIterationCompressor" in str(model.optimizer.get_config()), model.optimizer
x = np.ones((16, 8), "f4")
model.fit(x, x[:, :4], epochs=2, verbose=0)
model.save("model.keras")
assert hvd.compression_stats(model.optimizer).bytes_sent > 0
"""


def install(source: Path, target: Path) -> None:
    """With pip, offline, without what is in its metadata as required."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    command += ["--no-build-isolation", "--target", str(target), str(source)]
    subprocess.run(command, check=True)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process that finds the package of docs/extending.md."""
    folder = tmp_path_factory.mktemp("outside")
    source = shutil.copytree(ROOT / "examples" / "extending", folder / "source")
    install(source, folder / "target")
    return environment(PYTHONPATH=os.pathsep.join([str(ROOT), str(folder / "target")]))


@pytest.fixture(scope="module")
def broken(installed: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Beside it another package, of which nothing can be used."""
    source = tmp_path_factory.mktemp("broken")
    (source / "pyproject.toml").write_text(BROKEN)
    (source / "clashing.py").write_text(CLASHING)
    (source / "clashing_not.py").write_text("JUST_A_NUMBER = 3\n")
    install(source, source / "target")
    return {**installed, "PYTHONPATH": f"{installed['PYTHONPATH']}{os.pathsep}{source / 'target'}"}


def run_command(
    environment: dict[str, str], *command: str, **options
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, **options
    )


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.sweep)])
def test_replicas_on_pytorch(ranks, tmp_path):
    """Methods outside of the package, and those of today."""
    first, *others = launch("torch_replicas", ranks, "gloo", tmp_path, "50", "outside")
    assert all(other == first for other in others)
    methods = OUTSIDE + TODAY + ROUNDED + INT32 + PRODUCTS + ROBUST + BALANCED
    assert len({digest for digest, _ in first.values()}) == len(methods) == len(first)


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        ("graph", 2),
        pytest.param("fit", 2, marks=pytest.mark.sweep),
        pytest.param("graph", 4, marks=pytest.mark.sweep),
        pytest.param("fit", 4, marks=pytest.mark.sweep),
    ],
)
def test_replicas_on_tensorflow(kind, ranks, tmp_path):
    words = "tensorflow_replicas", ranks, "gloo", tmp_path, kind, "20", "outside"
    first, *others = launch(*words)
    assert all(other == first for other in others)
    methods = OUTSIDE + ONE_OF_TODAY + ROUNDED[::2] + INT32 + PRODUCTS + ROBUST + BALANCED[1::2]
    assert len({digest for digest, _ in first.values()}) == len(methods) == len(first)


@pytest.mark.parametrize("command", ["bench", "advise"])
def test_installed_in_the_command_line(command, installed, tmp_path):
    chosen = [word for name in NAMES for word in ("-c", name)]
    files = ("--json", str(tmp_path / "x.json"))
    start = python("horovod.torch", installed)
    arguments = (
        "-m",
        "hvd_gradcomp",
        command,
        "-m",
        f"{MODEL}:factory",
        "-r",
        "5",
        *chosen,
        *files,
    )
    done = run_command(installed, *horovodrun(installed), *start, *arguments, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    ways = [row["method"] for row in json.loads((tmp_path / "x.json").read_text())["rows"]]
    assert ways[1:] == ["PowerIteration()", "RandomStretch()", "PowerIteration(rank=1)"]


def test_compare_with_it(installed, tmp_path):
    files = ("--json", str(tmp_path / "x.json"))
    arguments = ("compare", f"{MODEL}:train", "--steps", "6", "-c", "power-iteration", *files)
    start = python("horovod.torch", installed)
    done = run_command(installed, *start, *PROGRAM[1:], *arguments, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "x.json").read_text())["rows"][1]["element_ratio"] > 2


def test_help_lists_it_and_imports_nothing(broken):
    done = run_command(broken, *PROGRAM, "bench", "--help")
    assert done.returncode == 0 and "Error" not in done.stderr
    # A line may end behind a hyphen.
    assert ",power-iteration,random-stretch" in "".join(done.stdout.split())


def test_a_saved_model_finds_it(installed, tmp_path):
    start = python("horovod.tensorflow", installed)
    for what in ("save", "load"):
        done = run_command(installed, *start, "-c", SAVED, what, cwd=tmp_path)
        assert done.returncode == 0, done.stderr


def test_what_cannot_be_used_is_one_line(broken):
    program = (
        "from hvd_gradcomp.cli import options;"
        "print(*(each.compressor for each in options.chosen([])), sep='\\n')"
    )
    done = run_command(broken, sys.executable, "-c", program)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == [
        "PowerIterationCompressor()",
        "RandomStretchCompressor()",
    ]
    lines = sorted(done.stderr.splitlines())
    assert [line.split(": ")[:3] for line in lines] == [
        ["broken-methods 0.3", f"its method {name!r} is left out", why]
        for name, why in [
            ("absent", "ModuleNotFoundError"),
            ("clashing", "TypeError"),
            ("dgc", "hvd_gradcomp has one by that name"),
            ("other", "TypeError"),
            ("power-iteration", "gradcomp-examples 1.0 declares another one by that name"),
        ]
    ]
    assert "clashing.StromCompressor cannot be defined beside hvd_gradcomp" in lines[1]
    done = run_command(broken, *PROGRAM, "bench", "-c", "absent")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "'absent' cannot be used" in done.stderr and "No module named" in done.stderr


def test_a_transport_of_their_own_in_every_host(tmp_path):
    """DDP, FSDP2, local steps and momenta over MPI: the page's example of a transport."""
    first, second = launch("mpi_transport", 2, "mpi", tmp_path)
    assert first == second
    assert {"ddp", "fsdp"} < set(first), first
    assert all(first.values())
