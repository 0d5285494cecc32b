"""Trainings of `make worth`, on ranks of this machine: which are left, and what comes out."""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.worth.methods import DENSE, METHODS
from benchmarks.worth.recipes import RECIPES, SMALL, Recipe
from benchmarks.worth.results import LENGTHS, Results, Run, Setting, usual

MARK = "WORTH "  # begins a worker's line with a result
WORKER = "benchmarks.worth.worker"
SEEDS = (2, 3)
TRIALS = 5  # of rates, at most
TUNED = (usual(SMALL), usual("resnet-20"))  # by rates of a ladder, not by those of another model


class Chosen(NamedTuple):
    """Settings to try in the place of the usual ones; None for those.

    Attributes:
        rates: of learning, in trainings of usual length.
        lengths: of trainings, in usual ones, the first that is not there yet.
        first: length of those that are tuned.
    """

    rates: Sequence[float] | None = None
    lengths: Sequence[float] | None = None
    first: float = 1.0


RunAll = Callable[[list[Run], Path | None], Iterator[tuple[Run, dict[str, Any]]]]


def job_of(runs: list[Run], timed: bool, folder: Path | None) -> str:
    """Return the job of a worker: trainings, or the time of some steps of each."""
    data = str(folder) if folder else None
    return json.dumps({"runs": [r._asdict() for r in runs], "timed": timed, "data": data})


def rows_of(lines: Iterable[str]) -> Iterator[tuple[Run, dict[str, Any]]]:
    """Yield what a worker prints, as it does."""
    for line in lines:
        _, mark, text = line.partition(MARK)
        if mark:
            row = json.loads(text)
            yield Run(**{name: row.pop(name) for name in Run._fields}), row


def trained(runs: list[Run], folder: Path | None) -> Iterator[tuple[Run, dict[str, Any]]]:
    """Train on ranks of this machine; yield the rows as they come.

    Raises:
        SystemExit: the ranks have failed.
    """
    with tempfile.TemporaryDirectory() as scratch:
        path, errors = Path(scratch, "job.json"), Path(scratch, "errors")
        path.write_text(job_of(runs, False, folder))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(runs[0].hosts), "-m", WORKER, str(path)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with errors.open("w") as stream:
            ranks = subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=stream, text=True
            )
            try:
                assert ranks.stdout is not None
                yield from rows_of(ranks.stdout)
                ranks.wait()
            finally:
                ranks.terminate()  # where nobody wants more rows
                ranks.wait()
        if ranks.returncode != 0:
            raise SystemExit(errors.read_text()[-3000:])


def trials(recipe: Recipe, results: Results, setting: Setting, method: str) -> list[float]:
    """Return the rates to try next: the middle three, then one beyond where the best is an end."""
    tried = {run.rate for run in results.losses(setting, method=method, length=1.0, seed=1)}
    middle = len(recipe.rates) // 2
    first = recipe.rates[middle - 1 : middle + 2]
    if not tried.issuperset(first):
        return [rate for rate in first if rate not in tried]
    best = results.best_rate(setting, method)
    assert best is not None
    place = min(range(len(recipe.rates)), key=lambda at: abs(recipe.rates[at] - best))
    next_to = recipe.rates[max(0, place - 1) : place + 2]
    return [rate for rate in next_to if rate not in tried][: TRIALS - len(tried)]


def planned(
    results: Results, part: str, setting: Setting, methods: list[str], chosen: Chosen
) -> list[Run]:
    """Return the next trainings of a part that are not in the file.

    Args:
        results: those there are.
        part: "tune", "seeds" or "lengths".
        setting: what is trained.
        methods: to train it.
        chosen: to try.
    """
    runs = []
    lowest = min(results.at_best(setting, DENSE), default=None)
    for method in methods:
        best = results.best_rate(setting, method)
        now: Sequence[float] = []
        lengths, seeds = [chosen.first], [1]
        if part == "tune" and chosen.rates:
            now = chosen.rates
        elif part == "tune" and setting in TUNED:
            now = trials(RECIPES[setting.recipe], results, setting, method)
        elif part == "tune":
            carried = results.carried_rate(setting, method)
            now = [carried] if carried is not None else []
        elif best is not None and part == "seeds" and METHODS[method].sure:
            now, seeds = [best], list(SEEDS)
        elif (
            best is not None
            and part == "lengths"
            and results.needed(setting, method, lowest) is None
        ):
            lengths_to_try = chosen.lengths or LENGTHS
            longer = [x for x in lengths_to_try if not results.at_best(setting, method, x)]
            now, lengths = [best], longer[:1]
        for length, rate, seed in itertools.product(lengths, now, seeds):
            run = Run(setting.recipe, method, setting.hosts, setting.batch, length, rate, seed)
            if run not in results.trained:
                runs.append(run)
    return runs


def without_rate(
    results: Results, part: str, setting: Setting, methods: list[str], chosen: Chosen
) -> list[str]:
    """Return the methods of a larger model that were not tuned on the small one; see `planned`."""
    if part != "tune" or chosen.rates or setting in TUNED:
        return []
    return [method for method in methods if results.carried_rate(setting, method) is None]


def train(
    results: Results,
    setting: Setting,
    part: str,
    methods: list[str],
    chosen: Chosen,
    folder: Path | None,
    run_all: RunAll,
    deadline: float = math.inf,
) -> None:
    """Train what a part asks for, and show how long it takes.

    A larger model's method that has no rate is left out, and named.

    Args:
        results: to add to.
        setting, methods, chosen: of `planned`.
        part: of `planned`.
        folder: in the place of Debian's packages.
        run_all: trains, and yields a row for each training as it ends.
        deadline: of `time.monotonic()`; no training begins that would end later.
    """
    pace = 0.0  # seconds a step
    if none := without_rate(results, part, setting, methods, chosen):
        print(f"  left out, as {SMALL} has no rate in {results.path} for {', '.join(none)}")
    while runs := planned(results, part, setting, methods, chosen):
        left = sum(steps_of(run) for run in runs)
        known = f", about {pace * left / 60:.0f} minutes" if pace else ""
        print(f"{setting.recipe}, {part}: {len(runs)} trainings{known}", flush=True)
        begin = time.monotonic()
        after, ended = dict(zip(runs, runs[1:])), []
        for run, row in run_all(runs, folder):
            results.add(run, row)
            ended.append(run)
            now = time.monotonic()
            pace, begin = (now - begin) / steps_of(run), now
            left -= steps_of(run)
            print(
                f"  {run.method}, rate {run.rate:g}, length {run.length:g}, seed {run.seed}: "
                f"{row['loss']:.3f}; {pace * left / 60:.1f} minutes left",
                flush=True,
            )
            if run in after and now + pace * steps_of(after[run]) > deadline:
                break
        if late := [run.method for run in runs if run not in ended]:
            print(f"  left out, as they would take too long: {', '.join(late)}", flush=True)
            return


def steps_of(run: Run) -> int:
    """Return how many steps a training has."""
    return round(run.length * RECIPES[run.recipe].steps)
