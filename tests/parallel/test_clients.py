"""Libraries that train, as they are on PyPI: `p.grad` is to them what it is in plain PyTorch."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.parallel.forkserver import interpreter
from tests.parallel.launch import ROOT, environment, launch, python, says

pytestmark = pytest.mark.parallel

CLIENTS = {  # what each needs, and what its ranks are started with
    "trainer": ("transformers", "gloo"),
    "accelerate": ("accelerate", "mpi"),
    "lightning": ("lightning", "mpi"),
    "timm": ("timm", "gloo"),
    "skorch": ("skorch", "gloo"),
    "compile": ("torch", "gloo"),
}
WRAPPING = {"trainer": "transformers", "lightning": "lightning", "accelerate": "accelerate"}
ROUNDED = {"float16": 1e-4, "bfloat16": 1e-3}  # halves of a batch are rounded otherwise
NOT_CLIPPED = ("plain",)
BOUND = 0.05 * 0.1  # of an update: the norm that gradients are clipped to, and the learning rate
MESSAGES = {
    "odd": "Call optimizer.synchronize() before gradients are clipped",
    "told more": "fewer than backward_passes_per_step passes have come",
    "not synchronized": "Call optimizer.synchronize() before gradients are clipped",
    "not told": "Increase backward_passes_per_step",
}
REFUSED = {
    "one replica": "so it has a single replica, and nothing travels that could be compressed",
    "both dimensions": "call fully_shard with the second dimension alone",
    "a head outside": "0 and 1.weight, 1.bias are trained apart: call fully_shard once more",
    "other replicas": "layers.0.bias",
    "no mesh": "the trainer has no mesh of replicas and shards",
}


@pytest.mark.parametrize("client", CLIENTS)
def test_updates_are_those_of_plain_pytorch(client, tmp_path):
    package, backend = CLIENTS[client]
    pytest.importorskip(package)
    results = launch(f"with_{client}", 2, backend, tmp_path, package="tests.clients")
    for result in results:
        for name, case in result["cases"].items():
            assert case["off"] < ROUNDED.get(name, 1e-6), f"{name} differs by {case['off']}"
            clips = name not in NOT_CLIPPED
            assert (case["effect"] > 0.01) == clips, f"{name}: clipping counts for nothing"
        for name, method in result["methods"].items():
            assert max(method["norms"]) < 1.0001 * BOUND, f"{name} is not clipped"
            assert method["losses"][1] < method["losses"][0], name
        says(result["errors"], {name: MESSAGES[name] for name in result["errors"]})
        for kind in ("cases", "methods"):  # with digests of all parameters
            assert result[kind] == results[0][kind]


def torchrun(folder, *arguments, timeout=400):
    """Run torchrun and its ranks as children of a server that has imported these libraries."""
    variables = interpreter(folder / "bin", "trainers", environment())
    start = (*python("trainers", variables), "-m", "torch.distributed.run")
    passes(
        *("--standalone", "--nproc-per-node=2", *arguments),
        timeout=timeout,
        start=start,
        env=variables,
    )


def passes(*arguments, timeout=400, start=(sys.executable,), env=None):
    """Run a program, which is to end without an error."""
    done = subprocess.run(
        [*start, *arguments],
        cwd=ROOT,
        env=env or environment(),
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_libraries_that_wrap_the_model_themselves(tmp_path):
    """Under torchrun, with `ddp.compress`; the recipes of docs/tutorial/libraries.md."""
    installed = [name for name, package in WRAPPING.items() if importlib.util.find_spec(package)]
    if not installed:
        pytest.skip("none of them is installed")
    torchrun(tmp_path, "-m", "tests.clients.with_ddp", str(tmp_path), *installed)
    results = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert list(results[0]) == installed
    for library, result in results[0].items():
        others = results[1][library]["methods"]
        for name, outcome in result["methods"].items():
            assert outcome == others[name] or name.startswith("Variance"), name
            assert outcome["digest"] == others[name]["digest"], "replicas differ"
            assert outcome["steps"] == 4, (library, name, outcome)
            assert 0 < outcome["moved"] < 1.0001 * 4 * BOUND, f"{library}: {name} is not clipped"
            if name == "NoneCompressor()":
                assert outcome["off"] < 1e-6, (library, outcome)
            else:
                assert outcome["off"] > 0 and outcome["ratio"] > 1.2, (library, name, outcome)
                assert outcome["losses"][1] < outcome["losses"][0], (library, name, outcome)
        assert result.get("tokens", 0.0) < 1e-6, "losses are divided by the tokens of all ranks"
        straight, again = result["resumed"]
        assert straight == again == results[1][library]["resumed"][0], "it does not resume"
        assert result["steps"] == ([4, 4] if library == "trainer" else [8, 8]), library
        if library != "lightning":
            for each in results:
                assert "has no compressor state of rank 1" in each[library]["missing"]
        ratios = [row["compression/ratio"] for row in result["logged"]]
        assert len(ratios) >= 3 and min(ratios) > 2, result["logged"]


@pytest.mark.timeout(900)  # for the machine that runs other tests beside it
def test_libraries_whose_ranks_step_alone(tmp_path):
    """Under torchrun, with `trainers.local_steps`: docs/tutorial/trainers.md."""
    installed = [name for name, package in WRAPPING.items() if importlib.util.find_spec(package)]
    if not installed:
        pytest.skip("none of them is installed")
    trains = "-m", "tests.clients.with_local_steps", str(tmp_path), *installed
    torchrun(tmp_path, *trains, timeout=800)
    results = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert list(results[0]) == installed
    for library, result in results[0].items():
        others = results[1][library]["methods"]
        for name, outcome in result["methods"].items():
            assert outcome["off"] < 1e-6 < outcome["moved"], (library, name, outcome)
            assert outcome["digest"] == others[name]["digest"], "replicas differ"
            assert outcome["is_exchanged"] and outcome["steps"] == 8, (library, name, outcome)
            assert len(outcome["evaluated"]) >= 2, "nothing was evaluated"
            assert outcome["evaluated"] == others[name]["evaluated"], "between exchanges"
            # Dense steps, and rounds of fragments between evaluations, save nothing here.
            assert outcome["ratio"] > 1.2 or name == "streamed", (library, name, outcome)
            assert len(outcome["logged"]) >= 4, outcome["logged"]
        straight, again, broken = result["resumed"]
        assert straight == again == results[1][library]["resumed"][0], "it does not resume"
        assert straight == broken, "it does not resume after it was interrupted"
        scaled = result["scaled"]
        assert scaled["off"] < 1e-6 and scaled["steps"] == 8, (library, scaled)
        assert scaled == results[1][library]["scaled"], library
        if library != "lightning":
            for each in results:
                assert "no state of local steps of rank 1" in each[library]["missing"]
    if "trainer" in results[0]:
        loaded, best = results[0]["trainer"]["best"]
        assert loaded == best, "the best model is not what was evaluated"
        first, second = results[0]["trainer"]["twice"]
        assert first == second, "a second training goes on from the first one"


def test_libraries_that_shard_the_model_themselves(tmp_path):
    """FSDP2 inside of two replicas of two shards; the recipes of docs/tutorial/libraries.md."""
    installed = [name for name, package in WRAPPING.items() if importlib.util.find_spec(package)]
    if not installed:
        pytest.skip("none of them is installed")
    variables = environment()
    start = python("trainers", variables)
    passes(
        "-m", "tests.clients.with_sharded", str(tmp_path), *installed, start=start, env=variables
    )
    results = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
    for result in results:
        says(result.pop("refused"), REFUSED)
    assert list(results[0]) == installed
    for library, result in results[0].items():
        for name, outcome in result["methods"].items():
            assert all(each[library]["methods"][name] == outcome for each in results), name
            assert outcome["steps"] == 4, (library, name, outcome)
            if name == "NoneCompressor()":
                assert outcome["off"] < 1e-6, (library, outcome)
            else:
                assert outcome["off"] > 0 and outcome["ratio"] > 1.2, (library, name, outcome)
                assert outcome["losses"][1] < outcome["losses"][0], (library, name, outcome)
        straight, again = result["resumed"]
        assert straight == again == results[3][library]["resumed"][0], "it does not resume"
        assert result["steps"] == [4, 4], library


def test_ray_train(tmp_path):
    """The recipe of docs/tutorial/ray.md; `make clients-ray` installs Ray and runs this."""
    spec = importlib.util.find_spec("ray")
    if spec is None or spec.origin is None:
        pytest.skip("Ray is not installed: make clients-ray")
    path = os.pathsep.join([str(ROOT), str(Path(spec.origin).parents[1])])
    more = {"PYTHONPATH": path, "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    passes("-m", "tests.clients.with_ray", str(tmp_path), timeout=600, env=environment(**more))
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    for name, outcome in first["methods"].items():
        assert outcome["digest"] == second["methods"][name]["digest"], "replicas differ"
        if name == "NoneCompressor()":
            assert outcome["off"] == 0, outcome
        else:
            assert outcome["off"] > 0 and outcome["ratio"] > 1.2, (name, outcome)
            assert outcome["losses"][1] < outcome["losses"][0], (name, outcome)
    assert first["again"] and second["again"], "nobody was started again"
    assert first["straight"] == first["resumed"] == second["resumed"], "it does not resume"
