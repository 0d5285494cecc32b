"""`make test` runs in each stage what ARGS choose, and is no success where that is no test."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NONE = 5  # with which pytest ends where it has no test
PYTHON = """#!/bin/sh
case "$*" in
*find_spec*) exit 0 ;;
*tests/single*) code={} ;;
*tests/parallel*) code={} ;;
*tests/triton*) code={} ;;
esac
echo "$*" >>{}
exit $code
"""
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")


def made(folder: Path, arguments: str, single: int = 0, ranks: int = 0, triton: int = 0):
    """Return make's exit status, and the lines that pytest was started with, by a stand-in."""
    python, log = folder / "python", folder / "log"
    python.write_text(PYTHON.format(single, ranks, triton, log))
    python.chmod(0o755)
    settings = {"SETUP": "0", "PYTHON": python, "ARGS": arguments, "tested": folder / "made/tested"}
    command = ["make", "test", *(f"{name}={value}" for name, value in settings.items())]
    # This test is run by make, whose options and variables are in the environment.
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
    done = subprocess.run(command, cwd=ROOT, env=inherited, capture_output=True, text=True)
    lines = log.read_text().splitlines() if log.exists() else []
    return done.returncode, sorted(line.partition("-m pytest ")[2] for line in lines)


def test_everything(tmp_path):
    code, lines = made(tmp_path, "")
    assert code == 0
    assert lines == sorted(
        [
            "-n auto --doctest-modules hvd_gradcomp tests/single",
            "-n 2 --dist worksteal -m not sweep tests/parallel",
            "-q -n auto tests/triton",
            "-q tests/triton/test_compiled.py",
        ]
    )


@pytest.mark.parametrize("arguments", ["-k ddp", "-k 'ddp or fsdp' -x"])
def test_options_are_for_each_stage(arguments, tmp_path):
    code, lines = made(tmp_path, arguments, single=NONE, triton=NONE)
    assert code == 0 and len(lines) == 4
    assert all(line.endswith(f" {arguments.replace(chr(39), '')}") for line in lines)


@pytest.mark.parametrize(
    ("arguments", "folders"),
    [
        ("tests/parallel/test_ddp.py", ["tests/parallel/test_ddp.py"]),
        ("tests/single/test_laws.py::test_a -x", ["tests/single/test_laws.py::test_a"]),
        ("-x tests/single/test_a.py tests/parallel", ["tests/parallel", "tests/single/test_a.py"]),
        ("hvd_gradcomp/core", ["hvd_gradcomp/core"]),
        ("tests/triton/test_words.py", ["tests/triton/test_words.py"]),
        ("tests/triton/test_compiled.py", ["tests/triton/test_compiled.py"] * 2),
    ],
)
def test_paths_are_for_the_stage_that_has_them(arguments, folders, tmp_path):
    code, lines = made(tmp_path, arguments)
    assert code == 0
    words = [word for line in lines for word in line.split()]
    assert sorted(w for w in words if w.startswith(("tests/", "hvd_"))) == folders
    assert words.count("-x") == len(folders) * ("-x" in arguments)


def test_no_test_at_all_is_a_failure(tmp_path):
    assert made(tmp_path, "-k nothing", NONE, NONE, NONE)[0] != 0
    assert made(tmp_path, "tests/no_such_folder")[0] != 0
    for stage in range(3):  # without ARGS each stage has tests
        assert made(tmp_path, "", *(NONE * (stage == each) for each in range(3)))[0] != 0


@pytest.mark.parametrize("arguments", ["", "-k ddp"])
def test_a_failure_of_a_stage_is_one_of_all(arguments, tmp_path):
    for stage in range(3):
        assert made(tmp_path, arguments, *(int(stage == each) for each in range(3)))[0] != 0
