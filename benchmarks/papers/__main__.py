"""Trains what the papers claim, on data that Debian has, and writes the page that says so.

    make papers ARGS=--list                     # the parts: claims, settings, minutes
    make papers ARGS="--parts variance"         # one of them; what is there is not run again
    make papers ARGS="--parts bytes"            # bytes at the papers' sizes, which need no training
    python -m benchmarks.papers --seeds 3       # all that is missing of three seeds
    make papers ARGS="--long --parts variance"  # 16 times as many steps, on docs/papers-long.md
    python -m benchmarks.papers --show          # the page and the figures anew, no training

Each row is written when it is done, to a file a part in `--folder`, so a run that is stopped goes
on where it was. The page and the figures are made of those files. Rows of another length
(`--images`, `--epochs`) need another `--folder`. Accuracy and bytes do not depend on what else the
machine does; no times are published.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from benchmarks.papers import data, page
from benchmarks.papers.parts import AT_LENGTH, Measured, Part, Row, Scale
from benchmarks.papers.registry import PARTS
from benchmarks.papers.sizes import CASES, NAME, Sizes, measure

FOLDER, PAGE = Path("docs/measured/papers"), Path("docs/papers.md")
LONG_FOLDER, LONG_PAGE = Path("docs/measured/papers-long"), Path("docs/papers-long.md")


def main() -> int:
    options = arguments()
    parts = [PARTS[name] for name in options.parts if name in PARTS]
    if options.list:
        texts = [listed(part, options.folder) for part in parts]
        texts += [listed_sizes(options.folder)] if NAME in options.parts else []
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
        if NAME in options.parts:
            count_sizes(options)
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
    parser.add_argument("--ranks", default="2,4,8", help="only rows on so many ranks, with commas")
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
    known = [*PARTS, *([] if options.long else [NAME])]  # bytes have no length
    options.parts = options.parts.split(",") if options.parts else known
    unknown = [name for name in options.parts if name not in known]
    if unknown:
        parser.error(
            f"--parts: no part is called {', '.join(unknown)}; there are {', '.join(known)}"
        )
    keys = [row.key for name in options.parts if name in PARTS for row in PARTS[name].rows]
    keys += [case.key for case in CASES] if NAME in options.parts else []
    options.rows = options.rows.split(",") if options.rows else keys
    unknown = [key for key in options.rows if key not in keys]
    if unknown:
        parser.error(f"--rows: no {', '.join(unknown)} among the rows {', '.join(keys)}")
    try:
        options.ranks = [int(ranks) for ranks in options.ranks.split(",")]
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


def listed_sizes(folder: Path) -> str:
    """Describe the part that counts bytes, for the list."""
    sizes = Sizes(folder)
    done = sum(sizes[case.key] is not None for case in CASES)
    lines = [f"{NAME}: bytes of a step at the papers' sizes, without training"]
    lines.append(f"  {len(CASES)} rows, {done} of them counted; some minutes on two cores")
    lines += [
        f"  row: {case.key}, {case.ranks} ranks: {case.title}, {case.network}" for case in CASES
    ]
    return "\n".join(lines)


def count_sizes(options: argparse.Namespace) -> None:
    """Count what is missing, and write the file after each case."""
    sizes = Sizes(options.folder)
    for case in CASES:
        wanted = case.key in options.rows and case.ranks in options.ranks
        if wanted and (options.again or sizes[case.key] is None):
            sizes.add(case, measure(case))
            print(f"{NAME}: {case.key}", flush=True)


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
