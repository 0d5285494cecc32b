"""The probe over real Horovod: the same readings on all ranks, and the same training as without."""

from __future__ import annotations

import json
import subprocess

import pytest
import torch

from benchmarks.papers import information
from hvd_gradcomp.ops.torch import TorchOps
from tests.parallel.launch import environment, horovodrun, launch, python

pytestmark = pytest.mark.parallel


def agreed(results):
    """What all ranks have read, by case; training is the same with and without."""
    for result in results:
        for name, (plain, probed) in result["pairs"].items():
            assert plain == probed, name
    for result in results[1:]:
        assert result["readings"] == results[0]["readings"]
    return results[0]["readings"]


def test_torch(tmp_path):
    results = launch("torch_probe", 2, "gloo", tmp_path)
    readings = agreed(results)
    for of_layer in readings.values():
        assert [r["step"] for r in of_layer] == [s for s in range(0, 24, 2) for _ in range(4)]
        last = of_layer[-4]
        assert last["layer"] == "0.weight" and 0 < last["entropy"] < 5
    # What compresses trains otherwise, and what zeroes the gradients in place does not.
    assert readings["none, False"] == readings["none, True"]
    assert readings["none, False"] != readings["variance, False"]
    assert results[0]["hooks"] == [4, 0, 0, 4, 0, 0, 4]
    reads_local_gradients(results, tmp_path)


def reads_local_gradients(results, folder):
    """Compare with copies that hooks made, where Horovod reduces in place during backward."""
    ops, local, strides = TorchOps(), [r["local"] for r in results], results[0]["strides"]
    assert len(local[0]) == 12
    for reading in results[0]["checked"]:
        step = reading["step"] // 2
        x, y = (torch.tensor(one[step][reading["layer"]]).reshape(-1) for one in local)
        x, y = (z[:: strides[reading["layer"]]] for z in (x, y))
        assert not torch.equal(x, y)
        assert reading["entropy"] == pytest.approx(information.entropy(ops, y, 32, True), abs=1e-9)
        shared = information.mutual_information(ops, x, y, 32, True)
        assert reading["mutual_information"] == pytest.approx(shared, abs=1e-9)
    for rank in range(2):
        lines = (folder / f"readings of {rank}").read_text().splitlines()
        assert [json.loads(line) for line in lines] == results[0]["checked"]
        assert "pair must be two different ranks in [0, 1]" in results[rank]["errors"]["pair"]
        assert "every must be a whole number" in results[rank]["errors"]["every"]
    first, _, *rest = results[0]["otherwise"]
    assert results[1]["otherwise"] == results[0]["otherwise"]
    assert first["density_variance"] == pytest.approx(71 / 72)  # 1 > 2 * 0.25, but for the zero
    assert all(r["density_variance"] == r["entropy"] == 0 for r in rest)
    alone = results[1]["alone"]
    assert results[0]["alone"] == [] and alone[0]["mutual_information"] is None


def test_tensorflow(tmp_path):
    results = launch("tensorflow_probe", 2, "gloo", tmp_path)
    readings = agreed(results)
    for name, of_layer in readings.items():
        layers = 6 if name == "fit" else 3
        steps = 15 if name == "fit" else 20
        expected = [s for s in range(0, steps, 2) for _ in range(layers)]
        assert [r["step"] for r in of_layer] == expected
        last = of_layer[-layers]
        assert 0 < last["entropy"] < 5
    for name in ("none", "strom"):
        eager, graph = readings[f"{name}, False"], readings[f"{name}, True"]
        for a, b in zip(eager, graph):
            assert a["layer"] == b["layer"]
            assert a["entropy"] == pytest.approx(b["entropy"], abs=0.1)
    # Twice `q = g*g` is the same as none given.
    densities = [
        [r["density_variance"] for r in readings[name]] for name in ("moments", "none, True")
    ]
    assert densities[0] == densities[1] and max(densities[0]) > 0
    for result in results:
        table, idle = result["embedding"]
        assert table["entropy"] > 0 and idle["entropy"] == 0
        assert "1 gradients for 3 variables" in result["errors"]["count"]
        assert "pair must be two different ranks in [0, 1]" in result["errors"]["pair"]


def test_example(tmp_path):
    pytest.importorskip("matplotlib")
    variables = environment()
    start = python("horovod.torch", variables)
    command = [*horovodrun(variables), *start, "-m", "examples.probing"]
    command += ["--epochs", "1", "--every", "1", "--png", str(tmp_path)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert "Variance" in done.stdout
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {
        "information.png",
        "densities.png",
        "readings.jsonl",
    }
