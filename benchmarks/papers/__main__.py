"""Trains what the papers claim, on data that Debian has, and writes the page that says so.

    make papers ARGS=--list                     # the parts: claims, settings, minutes
    make papers ARGS="--parts variance"         # one of them; what is there is not run again
    make papers ARGS="--parts bytes"            # bytes at the papers' sizes, which need no training
    make papers ARGS="--parts phases"           # seconds between hosts, as root; only by name
    python -m benchmarks.papers --seeds 3       # all that is missing of three seeds
    make papers ARGS="--long --parts variance"  # 16 times as many steps, on docs/papers-long.md
    python -m benchmarks.papers --show          # the page and the figures anew, no training

Each row is written when it is done, to a file a part in `--folder`, so a run that is stopped goes
on where it was. The page and the figures are made of those files. Rows of another length
(`--images`, `--epochs`) need another `--folder`. Accuracy and bytes do not depend on what else the
machine does; seconds do.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.papers import data, page, phases, sizes
from benchmarks.papers.parts import AT_LENGTH, Measured, Part, Row, Scale
from benchmarks.papers.recorded import Recorded
from benchmarks.papers.registry import PARTS
from benchmarks.rig import HostsError, JobError

FOLDER, PAGE = Path("docs/measured/papers"), Path("docs/papers.md")
LONG_FOLDER, LONG_PAGE = Path("docs/measured/papers-long"), Path("docs/papers-long.md")


class Untrained(NamedTuple):
    """Part without trainings, of cases that are measured once.

    Attributes:
        title: of the list.
        cases: in order.
        recorded: returns what is in a folder.
        measure: measures a case.
    """

    title: str
    cases: Sequence[Any]
    recorded: Callable[[Path], Recorded]
    measure: Callable[[Any], dict[str, Any]]


UNTRAINED = {
    sizes.NAME: Untrained(
        "bytes of a step at the papers' sizes; a minute", sizes.CASES, sizes.Sizes, sizes.measure
    ),
    phases.NAME: Untrained(
        "seconds of an exchange by phase, between hosts, as root; ten minutes",
        phases.CASES,
        phases.Phases,
        phases.measure,
    ),
}


def main() -> int:
    options = arguments()
    parts = [PARTS[name] for name in options.parts if name in PARTS]
    if options.list:
        texts = [listed(part, options.folder) for part in parts]
        texts += [listed_cases(n, options.folder) for n in options.parts if n in UNTRAINED]
        print("\n\n".join(texts))
        return 0
    code = 0
    if not options.show:
        try:
            if parts:
                data.install(options.data)
        except data.DataError as error:
            print(error, file=sys.stderr)
            return 2
        for part in parts:
            code |= train(part, options)
        try:
            for name in options.parts:
                if name in UNTRAINED:
                    measure_cases(name, options)
        except (HostsError, JobError) as error:
            print(error, file=sys.stderr)
            code = 2
    target = options.page or (PAGE if options.folder == FOLDER else options.folder / PAGE.name)
    page.write(PARTS.values(), options.folder, target)
    print(f"papers: {options.folder}, {target}")
    return code


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="what there is, and nothing else")
    parser.add_argument("--parts", help="names, with commas; all if not given")
    parser.add_argument("--rows", help="keys of rows, with commas; all of the parts if not given")
    parser.add_argument("--seeds", type=int, default=1, help="each row so many times")
    parser.add_argument("--ranks", help="only rows on so many ranks, with commas")
    parser.add_argument("--images", type=int, default=Scale().images, help="to train on")
    parser.add_argument("--epochs", type=int, default=Scale().epochs)
    parser.add_argument(
        "--long",
        action="store_true",
        help=f"{AT_LENGTH.images} images, {AT_LENGTH.epochs} epochs, in a folder and on a page of "
        "their own; hours",
    )
    parser.add_argument("--again", action="store_true", help="also rows that are there")
    parser.add_argument("--show", action="store_true", help="trains nothing, writes the page")
    parser.add_argument("--data", type=Path, help="a folder in the place of Debian's packages")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where rows are written")
    parser.add_argument(
        "--page", type=Path, help=f"{PAGE}, or in another --folder if that is given"
    )
    options = parser.parse_args()
    if options.long:
        options.images, options.epochs = AT_LENGTH.images, AT_LENGTH.epochs
        options.folder, options.page = LONG_FOLDER, LONG_PAGE
    known = [*PARTS, *([] if options.long else UNTRAINED)]  # which have no length
    usual = [name for name in known if name != phases.NAME]  # it needs root
    options.parts = options.parts.split(",") if options.parts else usual
    unknown = [name for name in options.parts if name not in known]
    if unknown:
        parser.error(
            f"--parts: no part is called {', '.join(unknown)}; there are {', '.join(known)}"
        )
    keys = [row.key for name in options.parts if name in PARTS for row in PARTS[name].rows]
    keys += [c.key for name in options.parts if name in UNTRAINED for c in UNTRAINED[name].cases]
    options.rows = options.rows.split(",") if options.rows else keys
    unknown = [key for key in options.rows if key not in keys]
    if unknown:
        parser.error(f"--rows: no {', '.join(unknown)} among the rows {', '.join(keys)}")
    try:
        options.ranks = [int(ranks) for ranks in (options.ranks or "2,4,6,8").split(",")]
    except ValueError:
        parser.error(f"--ranks must be whole numbers with commas, got {options.ranks}")
    if options.seeds < 1 or options.epochs < 1:
        parser.error("--seeds and --epochs must be at least 1")
    if not 640 <= options.images <= 50_000:
        parser.error(f"--images must be between 640 and 50000, got {options.images}")
    options.scale = Scale(options.images, options.epochs)
    for part in [] if options.list or options.show else options.parts:
        earlier = Measured(PARTS[part], options.folder).scale if part in PARTS else None
        if earlier not in (None, options.scale):
            parser.error(
                f"{options.folder / part}.json has rows of {earlier.images} images and "
                f"{earlier.epochs} epochs: give --images {earlier.images} "
                f"--epochs {earlier.epochs}, or another --folder"
            )
    return options


def listed(part: Part, folder: Path) -> str:
    """A part for the list."""
    measured = Measured(part, folder)
    cost = measured.cpu_minutes
    took = "not known before each row has run" if cost is None else f"about {cost:.0f}"
    done = sum(bool(measured[row.key]) for row in part.rows)
    lines = [f"{part.name}: {part.title}", f"  {part.settings}"]
    lines.append(
        f"  {len(part.rows)} rows, {done} of them run; minutes a seed on two cores: {took}"
    )
    lines += [f"  claim: {claim.text} ({claim.paper})" for claim in part.claims(measured)]
    lines += [f"  row: {row.key}, {row.ranks} ranks: {row.title}" for row in part.rows]
    return "\n".join(lines)


def listed_cases(name: str, folder: Path) -> str:
    """Describe a part without trainings, for the list."""
    part = UNTRAINED[name]
    recorded = part.recorded(folder)
    done = sum(recorded[case.key] is not None for case in part.cases)
    lines = [f"{name}: {part.title}", f"  {len(part.cases)} rows, {done} of them measured"]
    lines += [f"  row: {case.key}: {case.title}, {case.network}" for case in part.cases]
    return "\n".join(lines)


def measure_cases(name: str, options: argparse.Namespace) -> None:
    """Measure what is missing of a part without trainings.

    Raises:
        HostsError: there can be no hosts here, which the part needs.
        JobError: ranks have failed.
    """
    part = UNTRAINED[name]
    recorded = part.recorded(options.folder)
    for case in part.cases:
        if case.key not in options.rows or case.ranks not in options.ranks:
            continue
        if options.again or recorded[case.key] is None:
            recorded.add(case, part.measure(case))
            print(f"{name}: {case.key}", flush=True)


def pending(part: Part, options: argparse.Namespace) -> Iterator[tuple[Row, int]]:
    """List the runs: all rows of one seed before the next."""
    measured = Measured(part, options.folder)
    for seed in range(1, options.seeds + 1):
        for row in part.rows:
            done = seed in measured.seeds(row.key) and not options.again
            if row.key in options.rows and row.ranks in options.ranks and not done:
                yield row, seed


def train(part: Part, options: argparse.Namespace) -> int:
    """Runs the rows of a part, one job for each number of ranks; whether one failed."""
    runs = [*pending(part, options)]
    code = 0
    for ranks in sorted({row.ranks for row, _ in runs}):
        these = [(row.key, seed) for row, seed in runs if row.ranks == ranks]
        print(f"{part.name}: {len(these)} rows on {ranks} ranks", flush=True)
        code |= bool(start(part, these, ranks, options))
    return int(code)


def start(part: Part, runs: list[tuple[str, int]], ranks: int, options: argparse.Namespace) -> int:
    """The exit status of a job."""
    job = {
        "part": part.name,
        "scale": asdict(options.scale),
        "data": options.data and str(options.data.resolve()),
        "folder": str(options.folder.resolve()),
        "runs": runs,
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "job.json")
        path.write_text(json.dumps(job))
        launcher = str(Path(sys.executable).with_name("horovodrun"))
        worker = [sys.executable, "-m", "benchmarks.papers.worker", str(path)]
        # Ranks share the cores: whether something is to be sent is asked less often.
        idle = {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3", "HOROVOD_CYCLE_TIME": "3"}
        command = [launcher, "--gloo", "-np", str(ranks), *worker]
        return subprocess.run(command, env={**idle, **os.environ}).returncode


if __name__ == "__main__":
    sys.exit(main())
