"""Time of a step between hosts of the rig, by method."""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.rig import Hosts
from benchmarks.worth.recipes import RECIPES
from benchmarks.worth.results import Results, Run, Setting, setting_of
from benchmarks.worth.trainings import WORKER, job_of, rows_of

ALONE = "local"  # on a link that costs nothing: two rounds in 30 steps
TURNS = 3  # whose medians count


def dense_bits(parameters: int, hosts: int) -> float:
    """Return the bits that uncompressed gradients put on each link, in each direction."""
    return 64.0 * (hosts - 1) / hosts * parameters


def timed(
    hosts: Hosts,
    setting: Setting,
    methods: Sequence[str],
    folder: Path | None,
    *,
    turns: int = TURNS,
    limit: float = 3600.0,
) -> dict[str, tuple[float, int]]:
    """Return the milliseconds of a step by method, the median of some turns, and the parameters.

    Args:
        hosts: where, on links of their rate.
        setting: what is trained.
        methods: keys of `METHODS`.
        folder: in the place of Debian's packages.
        turns: of all methods.
        limit: seconds.

    Raises:
        JobError: the ranks have failed.
    """
    recipe = RECIPES[setting.recipe]
    rate = recipe.rates[len(recipe.rates) // 2]
    runs = [
        Run(setting.recipe, method, setting.hosts, setting.batch, 1.0, rate, 1)
        for _ in range(turns)
        for method in methods
    ]
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "job.json")
        path.write_text(job_of(runs, True, folder))
        # The ranks of DistributedDataParallel find each other by this interface.
        env = {"GLOO_SOCKET_IFNAME": "eth0", "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
        command = ["python", "-m", WORKER, str(path)]
        output = hosts.horovodrun(command, env=env, timeout=limit)
    ms: dict[str, list[float]] = {method: [] for method in methods}
    for run, row in rows_of(output.splitlines()):
        ms[run.method].append(row["ms"])
        parameters = row["parameters"]
    return {method: (statistics.median(each), parameters) for method, each in ms.items()}


def predicted(results: Results, setting: Setting, method: str, rate: float) -> float:
    """Return the milliseconds of a step at a rate in bits a second, between those that were timed.

    Linear in the time of a dense exchange; beyond the fastest and the slowest link as there.
    """
    ratios = results.ratios(setting)
    rows = [results.row(setting, method, ratio) for ratio in ratios]
    known = {ratio: row for ratio, row in zip(ratios, rows) if row is not None}
    alone = statistics.median(row["alone_ms"] for row in known.values())
    bits = dense_bits(next(iter(known.values()))["parameters"], setting.hosts)
    return float(np.interp(1e3 * bits / rate / alone, [*known], [r["ms"] for r in known.values()]))


def rate_of(parameters: int, hosts: int, ratio: float, alone: float) -> str:
    """Return the rate at which a dense exchange takes so many steps of `alone` milliseconds."""
    return f"{dense_bits(parameters, hosts) / (ratio * alone):.0f}kbit"


def measure(
    results: Results,
    setting: Setting,
    methods: Sequence[str],
    ratios: Sequence[float],
    folder: Path | None,
    turns: int = TURNS,
) -> None:
    """Time steps over links at which a dense exchange takes so many of them.

    Args:
        results: to add to; what is there is not timed again.
        setting, methods, folder, turns: of `timed`.
        ratios: of a dense exchange to a step without any.
    """
    with Hosts(setting.hosts) as hosts:
        known = [row for row in results.timed if setting_of(row) == setting]
        if known:  # the ratios of one setting are all of the same step
            alone, parameters = known[0]["alone_ms"], known[0]["parameters"]
        else:
            alone, parameters = timed(hosts, setting, [ALONE], folder)[ALONE]
        print(f"{setting.recipe}, {setting.hosts} hosts: a step takes {alone:.0f} ms", flush=True)
        for ratio in ratios:
            rate = rate_of(parameters, setting.hosts, ratio, alone)
            left = [method for method in methods if results.ms(setting, method, ratio) is None]
            hosts.set_rate(rate)
            if not left:
                continue
            for method, (ms, _) in timed(hosts, setting, left, folder, turns=turns).items():
                row = {"ms": ms, "rate": rate, "alone_ms": alone, "parameters": parameters}
                row["turns"] = turns
                results.add_time(setting, ratio, method, row)
                print(f"  {method} at {ratio:g} ({rate}): {ms:.0f} ms", flush=True)
