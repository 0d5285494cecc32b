"""Horovod's own tests and examples on two ranks, stock beside this package, over gloo and MPI.

    make compat COMPAT_SOURCE=/path/to/horovod       # a git checkout; the first time
    make compat ARGS="--frontends torch --backends gloo -k optimizer"
    make compat ARGS="--files test_torch.py pytorch_mnist.py"

Each test runs with stock Horovod and with this package in its place, and has to do so in `--limit`
seconds. What passes with stock alone is repeated on both sides, twice, and then has to be in
`tests/compat/refused.py` with its reason. Exit status 1 if something passes with stock alone and
is not listed there, or is listed and passes; 2 if there is no copy of Horovod's tests. What fails
with stock too (it is older than today's frameworks) is counted, no more. Results go to `--json`.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tabulate import tabulate

from tests.compat import source
from tests.compat.job import ALONE, Result, run_recipe, run_tests
from tests.compat.refused import REFUSED

SIDES = ("stock", "ours")
BACKENDS = ("gloo", "mpi")
STUCK = ("hangs", "dies")
LEFT_OUT = ("spark", "ray", "mxnet", "lightning")  # need what is not installed here

# Horovod's examples, as far as their data can be made up and a CPU is enough, and what makes them
# short, on both sides.
RECIPES: dict[str, tuple[str, ...]] = {
    "pytorch/pytorch_mnist.py": (
        "--epochs 1",
        "--epochs 1 --fp16-allreduce",
        "--epochs 1 --gradient-predivide-factor 2",
        "--epochs 1 --use-adasum",
    ),
    "pytorch/pytorch_synthetic_benchmark.py": ("--batch-size 2 --num-iters 2",),
    "elastic/pytorch/pytorch_mnist_elastic.py": ("--epochs 1",),
    "elastic/pytorch/pytorch_synthetic_benchmark_elastic.py": ("--batch-size 2 --num-iters 2",),
    "adasum/adasum_small_model.py": ("",),
    "tensorflow2/tensorflow2_mnist.py": ("",),
    "tensorflow2/tensorflow2_keras_mnist.py": ("",),
    "tensorflow2/tensorflow2_synthetic_benchmark.py": (
        "--batch-size 1 --num-iters 1 --num-warmup-batches 1 --num-batches-per-iter 1 "
        "--model MobileNet --no-cuda",
    ),
    "tensorflow2/tensorflow2_keras_synthetic_benchmark.py": (
        "--batch-size 1 --num-iters 1 --num-batches-per-iter 1 --model MobileNet --no-cuda",
    ),
    "elastic/tensorflow2/tensorflow2_mnist_elastic.py": ("",),
    "elastic/tensorflow2/tensorflow2_keras_mnist_elastic.py": ("",),
    "tensorflow/tensorflow_keras_mnist.py": ("",),
    "keras/keras_mnist.py": ("",),
    "keras/keras_mnist_advanced.py": ("--epochs 1",),
}
SHORTER = (
    (r"\b10000 // hvd", "20 // hvd"),
    (r"\b500 // hvd", "20 // hvd"),
    (r"\bepochs=24\b", "epochs=2"),
)


class Pair(NamedTuple):
    """What came of a test on both sides."""

    stock: Result
    ours: Result

    @property
    def kind(self) -> str:
        passed = self.stock.outcome == "passed", self.ours.outcome == "passed"
        if not any(passed) and self.stock.outcome == self.ours.outcome == "skipped":
            return "skipped"
        names = {(True, True): "both", (True, False): "stock alone", (False, True): "ours alone"}
        return names.get(passed, "neither")


KINDS = ("both", "stock alone", "ours alone", "neither", "skipped")
MISSING = Result("missing", "not collected")
Results = dict[str, dict[str, dict[str, Pair]]]
Found = dict[str, Result]
Runner = Callable[..., Found]  # (side, only=None, skip=())


def frontend(file: str) -> str:
    name = Path(file).name
    if (
        "torch" in name
        or "adasum_small" in name
        or name in ("test_timeline.py", "test_interactiverun.py")
    ):
        return "torch"
    return "keras" if "keras" in file else "tensorflow"


class Kept:
    """Stock's results, kept beside its tests: they change with the text and with the versions."""

    def __init__(self, folder: Path, options_: argparse.Namespace) -> None:
        names = ("torch", "keras", "numpy", "horovod")
        versions = "-".join(importlib.metadata.version(name) for name in names)
        self.path = folder / f"stock-{versions}-{options_.ranks}.json"
        self.part = options_.expression
        kept = self.path.exists() and not options_.fresh
        self.results = json.loads(self.path.read_text()) if kept else {}

    def results(self, file: str, backend: str, text: str, run: Runner) -> Found:
        text = repr((text, RECIPES.get(file.partition("/")[2])))
        name = f"{Path(file).name}, {backend}, {hashlib.sha256(text.encode()).hexdigest()[:8]}"
        if name not in self.results:
            results = stock_results(run)
            if self.part:
                return results
            self.results[name] = results
            self.path.write_text(json.dumps(self.results))
        return {test: Result(*result) for test, result in self.results[name].items()}


def stock_results(run: Runner) -> Found:
    """What stock comes to, at best: a test can fail for what one before it left behind."""
    results = run("stock")
    failed = [test for test, result in results.items() if result.outcome == "failed"]
    stuck = [test for test, result in results.items() if result.outcome in STUCK]
    again = run("stock", only=failed[::-1]) if failed else {}
    for test in stuck:
        again.update(run("stock", only=[test]))
    return {**results, **{test: again[test] for test in again if again[test].outcome == "passed"}}


def compare(run: Runner, stock: Found, *, part: bool) -> tuple[dict[str, Pair], list[str]]:
    """All tests of a file on both sides, and which of them came to one result and then another.

    What passes with stock alone is repeated on both sides, all such tests together, and what does
    so then each by itself.

    Args:
        part: whether our side runs a part of them only.
    """
    stuck = [test for test, result in stock.items() if result.outcome in STUCK]
    ours = {**run("ours", skip=stuck), **dict.fromkeys(stuck, Result("not run", "nor with stock"))}
    tests = dict.fromkeys([*(() if part else stock), *ours])
    pairs = {test: Pair(stock.get(test, MISSING), ours.get(test, MISSING)) for test in tests}
    first = dict(pairs)

    def repeat(tests: list[str]) -> list[str]:
        """Runs these again on both sides, and names those that still pass with stock alone."""
        if tests:
            again = {side: run(side, only=tests) for side in SIDES}
            pairs.update(
                (test, Pair(*(again[side].get(test, MISSING) for side in SIDES))) for test in tests
            )
        return [test for test in tests if pairs[test].kind == "stock alone"]

    for test in repeat([test for test in tests if pairs[test].kind == "stock alone"]):
        repeat([test])
    return pairs, [test for test in tests if pairs[test].kind != first[test].kind]


def options() -> argparse.Namespace:
    summary, _, _ = __doc__.partition("\n")
    parser = argparse.ArgumentParser(prog="python -m tests.compat", description=summary)
    parser.add_argument("--source", default=os.environ.get("COMPAT_SOURCE") or None)
    parser.add_argument("--files", nargs="*", help="names of files, of tests or examples")
    parser.add_argument("--backends", nargs="*", choices=BACKENDS, default=BACKENDS)
    parser.add_argument("--frontends", nargs="*", choices=("torch", "tensorflow", "keras"))
    parser.add_argument("-k", dest="expression", default="", help="as pytest has it; no examples")
    parser.add_argument("--fresh", action="store_true", help="run stock again, kept or not")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--limit", type=int, default=60, help="seconds for a test")
    parser.add_argument("--json", type=Path, default=Path("results/compat.json"))
    return parser.parse_args()


def main() -> int:
    options_ = options()
    cache = Path(os.environ.get("HVD_GRADCOMP_CACHE") or Path.home() / ".cache/hvd_gradcomp")
    try:
        horovod = source.obtain(options_.source, cache)
    except source.SourceError as error:
        print(error, file=sys.stderr)
        return 2
    results: Results = {}
    wavering: list[str] = []
    with tempfile.TemporaryDirectory() as place:
        folders = {side: Path(place) / side for side in SIDES}
        for side, folder in folders.items():
            source.copy(horovod, folder, ours=side == "ours", shorter=SHORTER)
        stock = Kept(horovod, options_)
        for file, backend, run in jobs(options_, horovod, folders):
            begin = time.monotonic()
            part = "" if file.startswith("examples/") else "test"
            text = (folders["stock"] / part / file).read_text()
            of_stock = stock.results(file, backend, text, run)
            pairs, unsteady = compare(run, of_stock, part=bool(options_.expression))
            results.setdefault(file, {})[backend] = pairs
            wavering += [f"{test} ({backend})" for test in unsteady]
            counts = Counter(pair.kind for pair in pairs.values())
            counted = ", ".join(f"{counts[kind]} {kind}" for kind in KINDS if counts[kind])
            print(
                f"{file}, {backend}: {counted or 'nothing'} ({time.monotonic() - begin:.0f} s)",
                flush=True,
            )
            write(options_.json, results, wavering)
    print(table(results))
    return judge(results, wavering)


def jobs(
    options_: argparse.Namespace, horovod: Path, folders: Mapping[str, Path]
) -> Iterator[tuple[str, str, Runner]]:
    """Each file on each backend, and how one side of it is run."""

    def chosen(file: str) -> bool:
        if any(word in file for word in LEFT_OUT) or (
            options_.files and Path(file).name not in options_.files
        ):
            return False
        return not options_.frontends or frontend(file) in options_.frontends

    # A part of it that imports nothing of what we stand in for would be the same run twice.
    tests = [
        path
        for folder in ("parallel", "single", "integration")
        for path in sorted((horovod / "test" / folder).glob("test_*.py"))
    ]
    named = {path: str(path.relative_to(horovod / "test")) for path in tests}
    for path, file in named.items():
        alone = not file.startswith("parallel/")
        elastic = "elastic_" in file  # starts a script beside it
        if not chosen(file) or not (source.differs(path) or (elastic and "integration" in file)):
            continue
        for backend in (ALONE,) if alone else options_.backends:
            yield file, backend, partial(tests_of, options_, folders, file, backend)
    for file in RECIPES if not options_.expression else ():
        if not chosen(file):
            continue
        for backend in options_.backends:
            yield f"examples/{file}", backend, partial(recipes_of, options_, folders, file, backend)


def tests_of(
    options_: argparse.Namespace,
    folders: Mapping[str, Path],
    file: str,
    backend: str,
    side: str,
    only: Sequence[str] | None = None,
    skip: Sequence[str] = (),
) -> Found:
    return run_tests(
        folders[side] / "test",
        file,
        backend,
        ranks=1 if backend == ALONE else options_.ranks,
        limit=options_.limit,
        only=only,
        skip=skip,
        expression=options_.expression,
    )


def recipes_of(
    options_: argparse.Namespace,
    folders: Mapping[str, Path],
    file: str,
    backend: str,
    side: str,
    only: Sequence[str] | None = None,
    skip: Sequence[str] = (),
) -> Found:
    results = {}
    for line in RECIPES[file]:
        name = f"examples/{file} {line}".rstrip()
        if name not in skip and (only is None or name in only):
            results[name] = run_recipe(
                folders[side] / "examples",
                file,
                line.split(),
                backend,
                ranks=options_.ranks,
                limit=2 * options_.limit,
            )
    return results


def table(results: Results) -> str:
    rows = []
    for file, backends in results.items():
        for backend, pairs in backends.items():
            counts = Counter(pair.kind for pair in pairs.values())
            rows.append([file, backend, *(counts[kind] or "" for kind in KINDS)])
    total = [sum(int(row[index] or 0) for row in rows) for index in range(2, 2 + len(KINDS))]
    heads = ["passed by", "", *KINDS[:-1], "skipped by both"]
    return tabulate([*rows, ["all", "", *total]], heads, tablefmt="github")


def judge(results: Results, wavering: list[str]) -> int:
    """Prints what stands against the list, and says whether anything does."""
    kinds: dict[str, set[str]] = {}
    by_test: dict[str, Result] = {}
    for backends in results.values():
        for pairs in backends.values():
            for test, pair in pairs.items():
                kinds.setdefault(test, set()).add(pair.kind)
                if pair.kind == "stock alone":
                    by_test[test] = pair.ours
    for test in wavering:
        print(f"came out differently when repeated: {test}")
    unlisted = [test for test in by_test if test not in REFUSED]
    stale = [test for test in REFUSED if kinds.get(test, set()) & {"both", "ours alone"}]
    for test in by_test:
        if test in REFUSED:
            print(f"refused: {test}: {REFUSED[test]}")
    for test in unlisted:
        result = by_test[test]
        print(
            f"passes with stock alone, and is not listed: {test} {result.outcome}\n{result.message}"
        )
    for test in stale:
        print(f"passes, and is listed as refused: {test}")
    return int(bool(unlisted or stale))


def write(path: Path, results: Results, wavering: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    arguments = {
        file: {
            backend: {
                test: {"kind": pair.kind, "stock": pair.stock, "ours": pair.ours}
                for test, pair in pairs.items()
            }
            for backend, pairs in backends.items()
        }
        for file, backends in results.items()
    }
    path.write_text(json.dumps({"results": arguments, "wavering": wavering}, indent=1))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that jobs are ended
    sys.exit(main())
