"""A drop-in by every name that Horovod has, in any order of imports, and with Horovod's recipes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.parallel.launch import environment, launch, says

pytestmark = pytest.mark.parallel


def python(code, *arguments, **variables):
    """What a fresh Python prints, or how it ends."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment(**variables),
    )
    return done.stdout.strip() or done.stderr.strip().rpartition("\n\n")[2]


WALK = """
import importlib, sys
from types import ModuleType

stock = ["horovod.torch", "horovod.tensorflow", "horovod.tensorflow.keras"]
ours = [name.replace("horovod", "hvd_gradcomp") for name in stock]
for name in {"stock": stock + ours, "ours": ours + stock}[sys.argv[1]]:
    importlib.import_module(name)

# What differs on purpose: (module, name): why.
DELIBERATE = {
    ("horovod.tensorflow", "gradient_aggregation_eager"): "a module inside of Horovod's that comes "
    "with horovod.tensorflow.keras, which is imported later here",
    ("horovod.tensorflow.keras.callbacks", "is_version_greater_equal_than"): "not of Keras's: it "
    "looks whether TensorFlow is older than what runs here",
}
# What Horovod's modules import from elsewhere.
FOREIGN = {"keras", "tensorflow", "tf", "K", "ops", "os", "version", "warnings"}

def walk(theirs, mine):
    for name in sorted(vars(theirs)):
        value = getattr(theirs, name)
        place = f"{mine.__name__}.{name}"
        foreign = isinstance(value, ModuleType) and not value.__name__.startswith("horovod")
        if name.startswith("_") or foreign and name in FOREIGN:
            continue
        if (theirs.__name__, name) in DELIBERATE:
            continue
        if not hasattr(mine, name):
            print(place, "is missing")
            continue
        found = getattr(mine, name)
        if isinstance(value, ModuleType) != isinstance(found, ModuleType):
            print(place, "is", found, "and not", value)
        if callable(value) and not callable(found):
            print(place, "cannot be called")
        if isinstance(value, type) and not isinstance(found, type):
            print(place, "is no class")

for theirs, mine in zip(stock, ours):
    theirs, mine = sys.modules[theirs], sys.modules[mine]
    walk(theirs, mine)
    for name in ("elastic", "callbacks"):
        if hasattr(theirs, name):
            assert getattr(mine, name).__name__ == f"{mine.__name__}.{name}", getattr(mine, name)
            walk(getattr(theirs, name), getattr(mine, name))

import hvd_gradcomp.tensorflow as hvd, hvd_gradcomp.tensorflow.keras as hvd_keras
import hvd_gradcomp.torch as hvd_torch

assert hvd.keras is hvd_keras and hvd.DistributedOptimizer is hvd_keras.DistributedOptimizer
for name in ("TensorFlowState", "TensorFlowKerasState"):
    assert issubclass(getattr(hvd.elastic, name), getattr(sys.modules[stock[1]].elastic, name))
assert issubclass(hvd_keras.elastic.KerasState, sys.modules[stock[2]].elastic.KerasState)
assert issubclass(hvd_torch.elastic.TorchState, sys.modules[stock[0]].elastic.TorchState)
print("walked")
"""


@pytest.mark.parametrize("first", ["stock", "ours"])
def test_every_public_name_of_horovod_in_any_order_of_imports(first):
    assert python(WALK, first).splitlines() == ["walked"]


def test_without_horovod_it_says_how_to_build_it():
    blocked = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "horovod":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocker())
for frontend in ("torch", "tensorflow", "tensorflow.keras"):
    try:
        __import__(f"hvd_gradcomp.{frontend}")
        getattr(sys.modules[f"hvd_gradcomp.{frontend}"], "init")
    except ImportError as error:
        print(frontend, type(error).__name__, " ".join(str(error).split()))
"""
    lines = python(blocked).splitlines()
    assert [line.split()[:2] for line in lines] == [
        [frontend, "ImportError"] for frontend in ("torch", "tensorflow", "tensorflow.keras")
    ]
    for line in lines:
        assert "No module named 'horovod'. What helps:" in line
        assert f"{sys.executable} -m hvd_gradcomp build-horovod" in line
        assert "pip cannot build Horovod 0.28.1 unchanged" in line
        assert "hvd-gradcomp doctor" in line
    instead = "Without Horovod use hvd_gradcomp.torch.ddp, .fsdp or .trainers."
    assert [instead in line for line in lines] == [True, False, False]


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_keras_on_another_backend_is_one_error(backend):
    output = python("import hvd_gradcomp.tensorflow.keras", KERAS_BACKEND=backend)
    last = output.splitlines()[-1] if "needs Keras" in output.splitlines()[-1] else output
    assert "ImportError: hvd_gradcomp.tensorflow" in last
    assert "export KERAS_BACKEND=tensorflow, or take it out of ~/.keras/keras.json" in last
    assert backend == "jax" or "needs Keras on TensorFlow, this is Keras on torch" in last


MESSAGES = {
    "undistributed": "rank 0: Adam is not distributed; rank 1: Adam is not distributed. Compile",
    "undistributed on one rank": "without an exchange of gradients: rank 1: Adam is not dist",
    "averaged only": "without an exchange of gradients: rank 0: Adam is not distributed",
    "other variables": "MismatchError: the ranks cannot take each other's variables: variable 1 of",
    "other compressors": "compressor 0 of 1 is StromCompressor(tau=1.0) on rank 0, and of 1 Sparse",
    "schedule": "TypeError",
    "no steps": "LearningRateWarmupCallback: Keras does not know how many batches an epoch has",
    "no filepath": "BestModelCheckpoint has no filepath",
    "no layer": "local_layers= takes layers of Keras, got 'head'",
    "all local": "all that is trained is local, so there is nothing to exchange",
    "twice": "wraps an optimizer that is distributed already",
    "too early": "it was saved before it was built, so which of its layers are local is not",
    "before init": "this optimizer cannot train: call hvd.init() before hvd.DistributedOptimizer",
    "process set": "it was saved for the ranks [0, 1] alone: give hvd.load_model(..., process_set=",
    "consolidated": "head/kernel of model is trained on each rank for itself",
}


def test_keras_as_horovod_s_own_examples_use_it(tmp_path):
    results = launch("tensorflow_dropin", 2, "gloo", tmp_path, deadline=550)
    for result in results:
        for name, replicas in result["replicas"].items():
            assert replicas == results[0]["replicas"][name], name
        for name, (ours, expected) in result["pairs"].items():
            assert ours == expected, name
        says(result["errors"], MESSAGES)
    output = (tmp_path / "output").read_text()
    warning = "Only rank 0 has its residual again: rank 1 begins with an empty one"
    assert output.count(warning) == results[0]["resumed"]
