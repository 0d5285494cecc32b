"""Trainings by recipes that people use: the loss at the end, by method.

    python -m benchmarks.worth                               # says first how long it takes
    python -m benchmarks.worth --recipe gpt-3 --parts tune lengths
    python -m benchmarks.worth --parts time                  # as root, between hosts
    python -m benchmarks.worth --show docs/measured/worth.json

1. `tune`: each method at three to five rates, one seed; it is compared at its best. On more hosts,
   and of larger models, one training at the rate of the small model on two hosts, divided by the
   square of how many times wider the model is, and multiplied by the root of how many times larger
   the batch is.
2. `seeds`: two seeds more of methods that are recommended or refuted.
3. `lengths`: trainings of 1.25, 1.5 and 2 times the usual length, each with a schedule of its own,
   of methods that have not reached the loss of dense gradients in a shorter one.
4. `time`: the milliseconds of a step over links at which a dense exchange takes 0.3 to 30 steps.
5. `advise`: what `hvd-gradcomp advise` recommends on these links, beside the best that was timed.

What is in the file already is not run again; a run that was stopped goes on. Ranks are processes of
this machine over gloo, a thread each; with `--lockstep` they are replicas of one process, on a GPU
if there is one. The batch of all ranks together is the recipe's, whatever their number; with
`--grow` it grows with them.
"""

from __future__ import annotations

import argparse
import math
import signal
import sys
import time
from functools import partial
from pathlib import Path

from benchmarks.papers import data
from benchmarks.rig import HostsError, JobError
from benchmarks.worth import advised, lockstep, tables, timings, trainings
from benchmarks.worth.methods import MAIN, METHODS
from benchmarks.worth.recipes import RECIPES, SHAPES
from benchmarks.worth.results import LENGTHS, Results, Setting, usual

RATIOS = (0.3, 1.0, 3.0, 10.0, 30.0)


def title(setting: Setting) -> str:
    recipe = RECIPES[setting.recipe]
    return f"{recipe.title}, {setting.hosts} hosts, {setting.batch} samples a step"


def show(results: Results, folder: Path) -> None:
    """Print all tables, and draw the figures."""
    from benchmarks.worth import figures  # not where a GPU is: it needs matplotlib

    for setting in results.settings():
        print(f"\n## {title(setting)}\n\n{tables.losses(results, setting)}")
        print(f"\n{tables.times(results, setting)}")
        if len(results.ratios(setting)) > 1:
            path = folder / f"worth-{setting.recipe}-{setting.hosts}.png"
            figures.draw_sooner(results, setting, title(setting), path)
    texts = {RECIPES[key].title: usual(key) for key in SHAPES}
    texts = {name: setting for name, setting in texts.items() if results.methods(setting)}
    if texts:
        figures.draw_bytes(results, texts, folder / "worth-bytes.png")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.worth", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--recipe", choices=RECIPES, default="gpt-0.8")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--grow", action="store_true", help="the batch, with the hosts")
    parser.add_argument(
        "--methods", nargs="+", choices=METHODS, help="all by default, or the main ones"
    )
    parser.add_argument("--rates", nargs="+", type=float, help="in the place of the recipe's")
    parser.add_argument(
        "--lengths", nargs="+", type=float, choices=LENGTHS[1:], help="all by default, in turn"
    )
    parser.add_argument("--steps", type=int, help="of each training that is tuned; for a trial")
    parser.add_argument("--ratios", type=float, nargs="+", default=RATIOS)
    parser.add_argument("--turns", type=int, default=timings.TURNS, help="whose median counts")
    parts = ("tune", "seeds", "lengths", "time", "advise")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts[:3])
    parser.add_argument("--data", type=Path, help="a folder in the place of Debian's packages")
    parser.add_argument("--json", type=Path, default=Path("results/worth.json"))
    parser.add_argument("--lockstep", action="store_true", help="in one process, on a GPU if any")
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="no training goes on that ends later"
    )
    parser.add_argument("--show", type=Path, metavar="JSON", help="runs nothing")
    options = parser.parse_args()
    deadline = time.monotonic() + 60 * options.minutes
    if options.show:
        show(Results(options.show), options.show.parent)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    setting = usual(options.recipe, options.hosts, options.grow)
    recipe = RECIPES[options.recipe]
    length = options.steps / recipe.steps if options.steps else 1.0
    methods = options.methods or list(METHODS if setting == usual("gpt-0.8") else MAIN)
    try:
        files = (data.TEXT,) if options.recipe in SHAPES else data.FILES
        data.install(options.data, files)
        results = Results(options.json)
        for part in options.parts:
            if part == "time":
                timings.measure(
                    results, setting, methods, options.ratios, options.data, options.turns
                )
            elif part == "advise":
                advised.measure(results, setting, options.ratios, options.data)
            else:
                how, latest = trainings.trained, deadline
                if options.lockstep:  # which looks at the clock in each training
                    how, latest = partial(lockstep.trained, deadline=deadline), math.inf
                chosen = trainings.Chosen(options.rates, options.lengths, length)
                trainings.train(results, setting, part, methods, chosen, options.data, how, latest)
    except (HostsError, data.DataError) as error:
        print(error, file=sys.stderr)
        return 2
    except JobError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    if options.lockstep:
        print(tables.lockstep(results, setting, length))
    else:
        print(tables.losses(results, setting))
    return 0


if __name__ == "__main__":
    sys.exit(main())
