"""The examples run; what they reach is the demo's matter."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys

import numpy as np
import pytest

from examples import cifar10
from tests.parallel.forkserver import interpreter
from tests.parallel.launch import environment, horovodrun, imports, python

pytestmark = pytest.mark.parallel


def run(*command: str) -> str:
    variables = environment()
    start = python(imports(command[0]), variables)
    full = [*horovodrun(variables), *start, "-m", *command]
    done = subprocess.run(full, env=variables, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


def test_the_demo_s_first_table(tmp_path):
    variables = interpreter(tmp_path / "bin", "torch", environment())
    start = python("torch", variables)
    command = [*start, "-m", "examples.demo", "--no-horovod", "--epochs", "1"]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    assert "QSGD, 4 bits" in done.stdout and "Horovod" not in done.stdout


def test_character_lstm():
    out = run(
        "examples.pytorch.char_lstm", "--steps", "6", "--width", "16", "--characters", "90000"
    )
    assert "perplexity" in out


def test_cifar10(tmp_path):
    """On a few random images in the format of the data set."""
    random = np.random.default_rng(1)
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        images = random.integers(0, 256, (16, 3072), dtype=np.uint8)
        batch = {b"data": images, b"labels": random.integers(0, 10, 16).tolist()}
        (tmp_path / name).write_bytes(pickle.dumps(batch))
    arguments = [str(tmp_path), "--epochs", "1", "--batch-size", "8"]
    assert "accuracy" in run("examples.pytorch.cifar10", *arguments)
    arguments = ["--cifar10", *arguments, "--methods", "gradiveq", "--full-steps", "1"]
    arguments += ["--sample-steps", "2"]
    assert "parameters, 2 ranks" in run("examples.pytorch.learned", *arguments)
    empty = tmp_path / "empty"
    empty.mkdir()
    command = [sys.executable, "-m", "examples.pytorch.cifar10", str(empty)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode != 0 and "unpack the python version of CIFAR-10" in done.stderr
    (tmp_path / "test_batch").write_bytes(pickle.dumps(print))
    with pytest.raises(pickle.UnpicklingError, match=r"builtins.print has no place in CIFAR-10"):
        cifar10.load(tmp_path)


def test_elastic():
    assert "accuracy" in run("examples.pytorch.elastic", "--epochs", "2")


def test_custom_loop():
    assert "accuracy" in run("examples.tensorflow2.custom_loop", "--epochs", "1")


@pytest.mark.parametrize(
    "arguments",
    [
        ("examples.pytorch.compare", "--width", "32"),
        pytest.param(
            ("examples.pytorch.compare", "--width", "32", "--task", "chars"),
            marks=pytest.mark.sweep,
        ),
        ("examples.keras.compare", "--width", "32"),
    ],
    ids=lambda arguments: " ".join(arguments),
)
def test_comparisons(arguments):
    out = run(*arguments, "--epochs", "2", "--warmup", "1", "--methods", "none,dgc,terngrad")
    assert "DGC(warmup_steps=" in out and "TernGrad()" in out and "difference" in out


@pytest.mark.parametrize("framework", ["pytorch", pytest.param("keras", marks=pytest.mark.sweep)])
def test_methods_that_learn(framework, tmp_path):
    short = ("--full-steps", "4", "--train-steps", "8", "--sample-steps", "8", "--epochs", "2")
    methods = "none,gradiveq,lgc-ring"  # TensorFlow takes long to trace the parameter server
    methods += ",lgc-server" if framework == "pytorch" else ""
    files = ("--png", str(tmp_path / "curves.png"), "--json", str(tmp_path / "curves.json"))
    out = run(f"examples.{framework}.learned", "--methods", methods, *short, *files)
    assert "lgc-ring" in out and "byte ratio by rank" in out
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    rows = json.loads((tmp_path / "curves.json").read_text())
    assert [row["method"] for row in rows] == methods.split(",")
    assert "autoencoder" in rows[2]["curves"][-1] and "basis" in rows[1]["curves"][-1]
