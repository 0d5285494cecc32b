"""Rounds of local steps: what they cost where the link costs nothing, and where the time goes.

    python -m benchmarks.rounds                                # 2 and 4 ranks of this machine
    python -m benchmarks.rounds --before OTHER --json docs/measured/rounds.json    # two checkouts
    python -m benchmarks.rounds --show docs/measured/rounds.json    # into docs/fewer-exchanges.md

A transformer of 0.8 million parameters with SGD, noise as data; ranks share the cores of this
machine, a thread each, over gloo. A round comes every 5 steps. Trainings take turns: steps alone,
steps with a barrier every 5, and rounds with each compressor. A round costs what 5 steps with it
take more than 5 alone, by the clock and of the time of a rank's cores, gloo's threads included;
medians. `for the slower rank` is the same for the barrier, which ranks have to wait at whoever
exchanges. Where ranks are more than cores, or other work runs, the clock says little: what a rank
does itself is in the time of cores.

Parts are cores' time of the functions that make a round, wrapped here, without the functions that
they call; `waiting` is what the collectives took beyond it, from a barrier on. Means over ranks of
medians over rounds. Collectives are counted where `torch.distributed` gets them.

With `--before` each training runs in another checkout too, in processes of its own, in turns, so
that what is compared was measured in the same minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.fsdp import BATCH, LENGTH, WIDTH, Row, Transformer
from hvd_gradcomp import ChunkedTopKCompressor, Int8Compressor, NoneCompressor
from hvd_gradcomp.torch import ddp
from hvd_gradcomp.torch.comm.c10d import C10dBackend
from hvd_gradcomp.torch.local.fragment import TensorFragment
from hvd_gradcomp.torch.local.tensor_exchange import RankSync, TensorExchange
from hvd_gradcomp.torch.reduce.reducer import BucketPrograms, Reducer

EVERY, RANKS = 5, (2, 4)
ALONE, BARRIER = "steps alone", "for the slower rank"
COMPRESSORS = {
    "no compression": lambda: NoneCompressor(),
    "8 bits": lambda: Int8Compressor(),
    "1 in 8, in 4 bits": lambda: ChunkedTopKCompressor(k=512, values="int4", decay=1),
}
Functions = Sequence[tuple[type, str]]  # methods of classes
PARTS: dict[str, Functions] = {
    "digest": [(TensorFragment, "digest")],
    "comparison": [(RankSync, "gather"), (RankSync, "start_gather")],
    "pseudogradients": [(TensorFragment, "send")],
    "into buckets, state kept": [(TensorExchange, "start")],
    "codec": [(BucketPrograms, "launch"), (BucketPrograms, "resume"), (BucketPrograms, "wait_all")],
    "posting and receiving": [
        *((C10dBackend, name) for name in ("allgather", "allreduce", "alltoall", "gather", "wait")),
    ],
    "commit, means": [(TensorExchange, "finish"), (Reducer, "commit_or_roll_back_among")],
    "outer step": [(TensorFragment, "step")],
    "write-back": [(TensorFragment, "hand_out")],
    "what the user has set": [(TensorFragment, "take_set")],
}
STARTS = "all_gather", "all_reduce", "all_to_all_single", "broadcast"  # of `torch.distributed`
COLLECTIVE, WAITING = ("comparison", "posting and receiving"), "waiting"
MARK = "ROWS "
PAGE = Path("docs/fewer-exchanges.md")  # from the root of a checkout
BEGIN, END = "<!-- tables of benchmarks.rounds -->", "<!-- end of these tables -->"


class Training:
    """Model of one rank, and what exchanges it.

    Args:
        method: a key of `COMPRESSORS`, `ALONE` or `BARRIER`.
    """

    def __init__(self, method: str) -> None:
        torch.manual_seed(1)
        self.model = Transformer(1)
        self._meets, self._made = method == BARRIER, 0
        self._optimizer: Any = torch.optim.SGD(self.model.parameters(), 1e-3)
        if method in COMPRESSORS:
            self._optimizer = ddp.LocalSteps(
                self._optimizer,
                self.model.named_parameters(),
                every=EVERY,
                compression=COMPRESSORS[method](),
            )
        self._generator = torch.Generator().manual_seed(dist.get_rank())

    def step(self, before: Callable[[], None] = lambda: None) -> None:
        """Make a step; `before` is called before the optimizer's."""
        x = torch.randn(BATCH, LENGTH, WIDTH, generator=self._generator)
        self._optimizer.zero_grad()
        self.model(x).square().mean().backward()
        before()
        self._optimizer.step()
        self._made += 1
        if self._meets and self._made % EVERY == 0:
            dist.barrier()

    @property
    def is_due(self) -> bool:
        """Return True if the next step ends a round."""
        return self._made % EVERY == EVERY - 1


class Parts:
    """Clock of functions, without the functions that they call.

    Attributes:
        seconds: of this thread's core, by part; and of the clock, what collectives took beyond.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inner = [(0.0, 0.0)]

    def wrapped(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._inner.append((0.0, 0.0))
            begin = time.thread_time(), time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                core, clock = time.thread_time() - begin[0], time.perf_counter() - begin[1]
                inner_core, inner_clock = self._inner.pop()
                self.seconds[part] += core - inner_core
                if part in COLLECTIVE:
                    self.seconds[WAITING] += clock - inner_clock - (core - inner_core)
                outer_core, outer_clock = self._inner[-1]
                self._inner[-1] = outer_core + core, outer_clock + clock

        return timed

    @contextmanager
    def watching(self, functions_of: Mapping[str, Functions] = PARTS) -> Iterator[None]:
        """Wrap the functions of each part; those that a checkout does not have are left out."""
        wrapped = [
            (owner, name, vars(owner)[name], part)
            for part, functions in functions_of.items()
            for owner, name in functions
            if name in vars(owner)
        ]
        for owner, name, function, part in wrapped:
            setattr(owner, name, self.wrapped(part, function))
        try:
            yield
        finally:
            for owner, name, function, _ in wrapped:
                setattr(owner, name, function)


@contextmanager
def counting(starts: list[str]) -> Iterator[None]:
    """Append the name of each collective that `torch.distributed` is asked for."""
    originals = {name: getattr(dist, name) for name in STARTS}

    def counted(name: str) -> Callable[..., Any]:
        def start(*args: Any, **kwargs: Any) -> Any:
            starts.append(name)
            return originals[name](*args, **kwargs)

        return start

    for name in STARTS:
        setattr(dist, name, counted(name))
    try:
        yield
    finally:
        for name, function in originals.items():
            setattr(dist, name, function)


def whole_steps(trainings: dict[str, Training], rounds: int) -> dict[str, list[list[float]]]:
    """Return the seconds of `EVERY` steps, by the clock and of cores; methods take turns."""
    seconds: dict[str, list[list[float]]] = {method: [] for method in trainings}
    for turn in range(rounds + 2):
        for method, training in trainings.items():
            dist.barrier()
            begin = time.perf_counter(), time.process_time()
            for _ in range(2 * EVERY):
                training.step()
            end = time.perf_counter(), time.process_time()
            if turn > 1:
                seconds[method].append([(b - a) / 2 for a, b in zip(begin, end)])
    return seconds


def parts_of(training: Training, rounds: int) -> tuple[list[dict[str, float]], int]:
    """Return the seconds of the parts of each round, and the number of collectives of one."""
    every, starts = [], []
    for _ in range(rounds):
        while not training.is_due:
            training.step()
        parts = Parts()
        with parts.watching(), counting(starts):
            training.step(before=lambda: (dist.barrier(), starts.clear()))
            count = len(starts)
            training.step()  # it takes over what was set
        every.append(parts.seconds)
    return every, count


def measured(rounds: int) -> dict[str, Any]:
    """Return what this rank has measured; all ranks call it."""
    torch.set_num_threads(1)
    trainings = {method: Training(method) for method in (ALONE, BARRIER, *COMPRESSORS)}
    seconds = whole_steps(trainings, rounds)
    parts, counts = {}, {}
    for method in COMPRESSORS:
        parts[method], counts[method] = parts_of(trainings[method], rounds)
    return {"seconds": seconds, "parts": parts, "collectives": counts}


def spawned(rank: int, folder: str, ranks: int, rounds: int) -> None:
    """Measure as one of the processes of this machine; each writes what it has."""
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=ranks)
    Path(folder, f"{rank}.json").write_text(json.dumps(measured(rounds)))
    dist.barrier()
    dist.destroy_process_group()


def in_this_checkout(ranks: int, rounds: int) -> list[dict[str, Any]]:
    """Return what each of so many ranks has measured."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(spawned, (folder, ranks, rounds), ranks)
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]


def in_checkout(folder: Path, ranks: int, rounds: int) -> list[dict[str, Any]]:
    """Return what each of so many ranks measures with the package of another checkout.

    Raises:
        CalledProcessError: they have failed.
    """
    command = [sys.executable, __file__, "--once", str(ranks), "--rounds", str(rounds)]
    environment = {**os.environ, "PYTHONPATH": str(folder.resolve())}
    output = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    (line,) = (line for line in output.stdout.splitlines() if line.startswith(MARK))
    result: list[dict[str, Any]] = json.loads(line.removeprefix(MARK))
    return result


def summary(runs: Sequence[list[dict[str, Any]]]) -> Row:
    """Return milliseconds of what some runs have measured, means over ranks of medians."""
    places = range(len(runs[0]))

    def over_ranks(value: Callable[[int], float]) -> float:
        return 1e3 * statistics.mean(map(value, places))

    def block(method: str, which: int) -> float:
        return over_ranks(
            lambda at: statistics.median(
                each[which] for run in runs for each in run[at]["seconds"][method]
            )
        )

    def of_round(method: str) -> list[float]:
        return [block(method, which) - block(ALONE, which) for which in (0, 1)]

    def part(method: str, name: str) -> float:
        return over_ranks(
            lambda at: statistics.median(
                each.get(name, 0.0) for run in runs for each in run[at]["parts"][method]
            )
        )

    return {
        "step": [block(ALONE, which) / EVERY for which in (0, 1)],
        "rounds": {method: of_round(method) for method in (BARRIER, *COMPRESSORS)},
        "parts": {m: {name: part(m, name) for name in (*PARTS, WAITING)} for m in COMPRESSORS},
        "collectives": runs[0][0]["collectives"],
    }


def measure(before: Path | None, rounds: int, repeats: int) -> dict[str, Any]:
    """Return the summary of each number of ranks, by checkout: before, and this one."""
    checkouts: dict[str, Callable[[int], list[dict[str, Any]]]] = {}
    if before is not None:
        checkouts["before"] = lambda ranks: in_checkout(before, ranks, rounds)
    here = Path(__file__).parent.parent
    checkouts["after"] = lambda ranks: in_checkout(here, ranks, rounds)
    result: dict[str, Any] = {}
    for ranks in RANKS:
        runs: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in checkouts}
        for _ in range(repeats):
            for name, run in checkouts.items():
                runs[name].append(run(ranks))
        result[str(ranks)] = {name: summary(every) for name, every in runs.items()}
    return result


def tables(result: dict[str, Any]) -> str:
    """Return the tables of a result: costs of a round, and its parts, in Markdown."""
    lines = ["Measured on {cores} cores, with a load of {load:.0f}.".format(**result), ""]
    for ranks, by_checkout in result["ranks"].items():
        names = [*by_checkout]
        lines += [
            "{} ranks, a step of {:.0f} ms, {:.0f} of a core:".format(
                ranks, *by_checkout[names[-1]]["step"]
            ),
            "",
            f"| a round, ms | {' | '.join(f'{name} | of cores' for name in names)} |",
            f"|---|{'--:|--:|' * len(names)}",
        ]
        for method in (BARRIER, *COMPRESSORS):
            cells = [f"{ms:.1f}" for name in names for ms in by_checkout[name]["rounds"][method]]
            lines.append(f"| {method} | {' | '.join(cells)} |")
        heads = [f"{method}: {name}" for method in COMPRESSORS for name in names]
        lines += ["", f"| part, ms | {' | '.join(heads)} |", f"|---|{'--:|' * len(heads)}"]
        columns = [(by_checkout[name], method) for method in COMPRESSORS for name in names]
        for part in (*PARTS, WAITING):
            cells = [f"{of['parts'][method][part]:.2f}" for of, method in columns]
            lines.append(f"| {part} | {' | '.join(cells)} |")
        cells = [str(of["collectives"][method]) for of, method in columns]
        lines += [f"| number of collectives | {' | '.join(cells)} |", ""]
    return "\n".join(lines)


def with_tables(page: str, result: dict[str, Any]) -> str:
    """Return the text of a page with the tables of a result between its marks."""
    head, _, rest = page.partition(BEGIN)
    return f"{head}{BEGIN}\n\n{tables(result)}\n{END}{rest.partition(END)[2]}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rounds", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--before", type=Path, help="another checkout, with its kernels built")
    parser.add_argument("--json", type=Path, help="where the result goes")
    parser.add_argument("--show", type=Path, help="write a result into the page, measure nothing")
    parser.add_argument("--rounds", type=int, default=5, help="that are measured in each process")
    parser.add_argument("--repeats", type=int, default=2, help="processes of each checkout")
    parser.add_argument("--once", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.once:
        print(MARK + json.dumps(in_this_checkout(options.once, options.rounds)))
        return
    if options.show:
        result = json.loads(options.show.read_text())
        PAGE.write_text(with_tables(PAGE.read_text(), result))
        print(tables(result))
        return
    ranks = measure(options.before, options.rounds, options.repeats)
    result = {"cores": os.cpu_count(), "load": os.getloadavg()[0], "ranks": ranks}
    print(tables(result))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
