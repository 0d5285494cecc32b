"""Names say what a thing is; runs without any framework, by reading the source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TREES = ("hvd_gradcomp", "benchmarks", "docs", "examples", "tests")

# Participles, pronouns and the like, which fit every value of a function equally well.
RIDDLES = {
    "asked",
    "found",
    "given",
    "heard",
    "held",
    "mine",
    "most",
    "own",
    "room",
    "said",
    "there",
    "told",
    "way",
}
# Files and folders that have such names still. Nothing may be added.
NOT_YET = (
    "hvd_gradcomp/algorithms",
    "hvd_gradcomp/checkpoint",
    "hvd_gradcomp/codecs",
    "hvd_gradcomp/core",
    "hvd_gradcomp/ops",
    "hvd_gradcomp/planning",
    "hvd_gradcomp/runtime",
    "hvd_gradcomp/tensorflow/checkpoint.py",
    "hvd_gradcomp/tensorflow/reduce/counters.py",
    "hvd_gradcomp/tensorflow/exchange_check.py",
    "hvd_gradcomp/tensorflow/keras/local_steps.py",
    "hvd_gradcomp/tensorflow/keras/momentum_exchange.py",
    "hvd_gradcomp/tensorflow/local_steps.py",
    "hvd_gradcomp/tensorflow/outer_loop.py",
    "hvd_gradcomp/tensorflow/reduce/reducer.py",
    "hvd_gradcomp/tensorflow/reduce/registry.py",
    "hvd_gradcomp/tensorflow/comm/round_clock.py",
    "hvd_gradcomp/tensorflow/comm/stall_inspector.py",
    "hvd_gradcomp/tensorflow/reduce/step_sync.py",
    "hvd_gradcomp/testing.py",
    "hvd_gradcomp/torch/drop_in/autograd_hooks.py",
    "hvd_gradcomp/torch/reduce/bucket.py",
    "hvd_gradcomp/torch/reduce/bucketing.py",
    "hvd_gradcomp/torch/drop_in/checkpoint.py",
    "hvd_gradcomp/torch/reduce/checksums.py",
    "hvd_gradcomp/torch/comm",
    "hvd_gradcomp/torch/ddp.py",
    "hvd_gradcomp/torch/membership/ddp_elastic.py",
    "hvd_gradcomp/torch/elastic.py",
    "hvd_gradcomp/torch/local/fixed_variance.py",
    "hvd_gradcomp/torch/fsdp.py",
    "hvd_gradcomp/torch/hooks/fsdp_exchange.py",
    "hvd_gradcomp/torch/hooks/fsdp_units.py",
    "hvd_gradcomp/torch/drop_in/grad_synchronizer.py",
    "hvd_gradcomp/torch/drop_in/late_grads.py",
    "hvd_gradcomp/torch/local",
    "hvd_gradcomp/torch/reduce/momentum.py",
    "hvd_gradcomp/torch/local/momentum_exchange.py",
    "hvd_gradcomp/torch/drop_in/optimizer.py",
    "hvd_gradcomp/torch/drop_in/optimizer_mixin.py",
    "hvd_gradcomp/torch/rank_state.py",
    "hvd_gradcomp/torch/reduce/reducer.py",
    "hvd_gradcomp/torch/reduce/step_sync.py",
    "hvd_gradcomp/torch/local/tensor_exchange.py",
    "hvd_gradcomp/torch/local/wrapped_optimizer.py",
    "tests/chaos/files.py",
    "tests/chaos/numbers.py",
    "tests/chaos/workers/fsdp_trials.py",
    "tests/parallel/test_checkpoint.py",
    "tests/parallel/test_faults.py",
    "tests/parallel/test_hierarchy.py",
    "tests/parallel/workers/ddp_hierarchy.py",
    "tests/parallel/workers/ddp_training.py",
    "tests/parallel/workers/fsdp_training.py",
    "tests/parallel/workers/tensorflow_hierarchy.py",
    "tests/parallel/workers/torch_checkpoint.py",
    "tests/parallel/workers/torch_errors.py",
    "tests/parallel/workers/torch_features.py",
    "tests/parallel/workers/torch_hierarchy.py",
    "tests/single/test_backends_agree.py",
    "tests/single/test_balanced.py",
    "tests/single/test_break_even.py",
    "tests/single/test_checkpoint_barrier.py",
    "tests/single/test_chunk_kernels.py",
    "tests/single/test_clipping.py",
    "tests/single/test_device.py",
    "tests/single/test_factor_kernels.py",
    "tests/single/test_index_coding.py",
    "tests/single/test_largest.py",
    "tests/single/test_laws.py",
    "tests/single/test_local_steps.py",
    "tests/single/test_local_steps_tensorflow.py",
    "tests/single/test_momentum_exchange.py",
    "tests/single/test_momentum_exchange_tensorflow.py",
    "tests/single/test_narrow_kernels.py",
    "tests/single/test_nonfinite.py",
    "tests/single/test_operations.py",
    "tests/single/test_oracles.py",
    "tests/single/test_power_kernels.py",
    "tests/single/test_quantized.py",
    "tests/single/test_ratios.py",
    "tests/single/test_reports.py",
    "tests/single/test_round_clock.py",
    "tests/single/test_stall_inspector.py",
    "tests/single/test_step_sync.py",
    "tests/single/test_threshold_kernels.py",
    "tests/single/test_tile_kernels.py",
    "tests/single/test_topk_kernels.py",
    "tests/single/test_values.py",
    "tests/single/test_verify.py",
    "tests/single/test_vote_kernels.py",
    "tests/single/test_wrappers.py",
    "tests/triton",
)


def bindings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and name of all that is defined.

    That is functions, classes, arguments, variables of any kind, attributes that are set, and the
    names that imports give.
    """
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr
        elif isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)) and node.name:
            yield node.lineno, node.name
        elif isinstance(node, ast.alias) and node.asname:
            yield node.lineno, node.asname


def riddles(source: str) -> list[str]:
    """List the names to replace, with their lines; underscores around them do not help."""
    return [
        f"{line}: {name}"
        for line, name in bindings(ast.parse(source))
        if name.strip("_") in RIDDLES
    ]


def files() -> list[str]:
    paths = [path.relative_to(ROOT) for tree in TREES for path in ROOT.joinpath(tree).rglob("*.py")]
    return sorted(path.as_posix() for path in paths)


def is_left(file: str) -> bool:
    return any(file == place or file.startswith(f"{place}/") for place in NOT_YET)


def test_all_kinds_of_names_are_seen():
    source = """
import this as told
def way(given, *most, key=0, **own): pass
class Room:
    held: int = 0
    def __init__(self): self._found = [mine for mine in ()]
with open(path) as said: there, other = 1, 2
lambda heard: (asked := 1)
"""
    names = [name.strip("_") for _, name in bindings(ast.parse(source))]
    assert {name.lower() for name in names} >= RIDDLES
    assert riddles("class Found:\n    room: int") == ["2: room"], "a class is a noun"


@pytest.mark.parametrize("file", [file for file in files() if not is_left(file)])
def test_names_say_what_a_thing_is(file):
    assert not riddles((ROOT / file).read_text()), "call it what it is, see CONTRIBUTING's Habits"


def test_what_is_left_is_left():
    """A place without such names has to be removed from the list."""
    for place in NOT_YET:
        inside = [file for file in files() if file == place or file.startswith(f"{place}/")]
        assert any(riddles((ROOT / file).read_text()) for file in inside), place
