"""Which module may import what; runs without any framework, by reading the source."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import hvd_gradcomp

ROOT = Path(hvd_gradcomp.__file__).parent
MODULES = sorted(p.relative_to(ROOT).as_posix() for p in ROOT.rglob("*.py"))

PYTORCH = ("torch/", "ops/blocks.py", "ops/torch.py", "ops/passes.py", "models.py", "learned.py")
KERNELS = ("ops/triton/",)
TENSORFLOW = ("tensorflow/", "ops/tensorflow.py", "ops/tensorflow_passes.py")

# From the bottom up: a module imports only from its own layer or those before it.
LAYERS = [
    {
        "bands.py",
        "failures.py",
        "validate.py",
        "schedule.py",
        "stats.py",
        "collectives.py",
        "layers.py",
        "membership.py",
        "messages.py",
        "names.py",
        "cost.py",
    },
    {"ops/building.py", "ops/composites.py", "ops/native.py", "ops/rules.py"},
    {"ops/__init__.py"},
    {"layout.py"},
    {"wire.py", "ladder.py", "reports.py", "timeline.py"},
    {"aggregator.py"},
    {"exchanges.py", "checkpoint.py", "verify.py"},
    {"hierarchy.py"},
    {
        "codecs/__init__.py",
        "codecs/indices.py",
        "codecs/autoencoder.py",
        "codecs/linear.py",
        "codecs/pca.py",
        "codecs/quantized.py",
        "codecs/selection.py",
        "codecs/sums.py",
    },
    {"codecs/quantizers.py", "codecs/sparse.py"},
    {"codecs/words.py", "codecs/largest.py"},
    {"codecs/momentum.py"},
    {
        "algorithms/__init__.py",
        "algorithms/dense.py",
        "algorithms/dgc.py",
        "algorithms/egc.py",
        "algorithms/onebit.py",
        "algorithms/qsgd.py",
        "algorithms/sparse_gd.py",
        "algorithms/strom.py",
        "algorithms/terngrad.py",
        "algorithms/variance.py",
    },
    {"algorithms/gradient_dropping.py", "algorithms/hybrid.py", "algorithms/scalecom.py"},
    {"wrappers.py"},
    {
        "algorithms/gradiveq.py",
        "algorithms/lgc/__init__.py",
        "algorithms/lgc/compressor.py",
        "algorithms/lgc/ring.py",
        "algorithms/lgc/server.py",
        "algorithms/lgc/settings.py",
        "algorithms/lgc/training.py",
        "algorithms/lgc/vectors.py",
    },
    {"assignment.py"},
    {"configuration.py", "description.py", "worth.py"},
    {"__init__.py", "handshake.py", "installation.py", "probe.py", "testing.py"},
    {"cli/__init__.py"},
    {"cli/options.py", "cli/inspection.py", "cli/selftest.py", "cli/usercode.py"},
    {"cli/doctor.py", "cli/build.py", "cli/bench.py"},
    {"cli/advise.py", "cli/compare.py"},
    {"__main__.py"},
]


def imported(module: str) -> set[str]:
    """Modules imported when this one is, not those behind TYPE_CHECKING or inside functions."""
    found: set[str] = set()

    def visit(body):
        for node in body:
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                found.add(node.module or "")
                found.update(f"{node.module}.{alias.name}" for alias in node.names)
            elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
                visit(node.orelse)
            elif isinstance(node, (ast.If, ast.Try)):
                visit(node.body)

    visit(ast.parse((ROOT / module).read_text()).body)
    return found


def roots(module: str) -> set[str]:
    return {name.partition(".")[0] for name in imported(module)}


def test_every_core_module_has_a_layer():
    core = {m for m in MODULES if not m.startswith((*PYTORCH, *KERNELS, *TENSORFLOW))}
    assert core == set().union(*LAYERS)


@pytest.mark.skipif(sys.version_info < (3, 10), reason="needs sys.stdlib_module_names")
@pytest.mark.parametrize("module", MODULES)
def test_only_frontends_import_frameworks(module):
    foreign = roots(module) - set(sys.stdlib_module_names) - {"hvd_gradcomp", ""}
    allowed: set[str] = set()
    if module == "description.py":
        allowed = {"tabulate"}
    elif module in PYTORCH:
        allowed = {"torch"}
    elif module.startswith(KERNELS):
        allowed = {"torch", "triton"}
    elif module in TENSORFLOW:
        allowed = {"tensorflow"}
    elif module.startswith("cli/"):
        allowed = {"click", "tabulate"}
    elif module.startswith("torch/"):
        allowed = {"torch", "horovod"}
        if module == "torch/handout.py":
            allowed.add("cloudpickle")  # by which Horovod broadcasts objects
        if module == "torch/files.py":
            allowed.add("safetensors")
    elif module.startswith("tensorflow/"):
        allowed = {"tensorflow", "horovod", "keras"}
        if module == "tensorflow/checkpoint.py":
            allowed |= {"numpy", "safetensors"}  # arrays, and the files they are in
    assert foreign <= allowed


@pytest.mark.parametrize("module", sorted(set().union(*LAYERS)))
def test_imports_point_one_way(module):
    mine = next(i for i, layer in enumerate(LAYERS) if module in layer)
    below = set().union(*LAYERS[: mine + 1])
    for name in imported(module):
        if not name.startswith("hvd_gradcomp."):
            continue
        path = name.split(".")[1:]
        candidates = {"/".join(path) + ".py", "/".join([*path, "__init__.py"])}
        target = candidates & set(MODULES)
        assert target <= below, f"{module} imports {name}, which lies above it"


def test_the_package_imports_without_any_framework():
    code = (
        "import sys, hvd_gradcomp, hvd_gradcomp.testing, hvd_gradcomp.handshake;"
        "heavy = {'torch', 'tensorflow', 'keras', 'horovod', 'numpy'} & set(sys.modules);"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
