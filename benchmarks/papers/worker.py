"""Worker of `make papers`: runs the rows of a job, one after another; rank 0 writes them.

horovodrun --gloo -np 2 python -m benchmarks.papers.worker JOB.json
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import torch

import hvd_gradcomp.torch as hvd
from benchmarks.papers.parts import Measured, Scale
from benchmarks.papers.registry import PARTS
from benchmarks.papers.training import TASKS, run


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    logging.basicConfig(level=logging.ERROR)
    part, scale = PARTS[job["part"]], Scale(**job["scale"])
    folder = Path(job["data"]) if job["data"] else None
    hvd.init()
    torch.set_num_threads(1)
    tasks: dict[tuple[str, float], Any] = {}
    for key, seed in job["runs"]:
        row = part.row(key)
        kind, scaled = (row.task, row.length), row.at(scale)
        if kind not in tasks:
            tasks[kind] = TASKS[row.task](folder, scaled)
        result = run(row, scaled, seed, tasks[kind])
        if hvd.rank() == 0:
            Measured(part, Path(job["folder"])).add(row, scale, seed, result)
            loss = "" if result["lost"] is None else f", {result['lost']:.2f} of the energy lost"
            print(
                f"{part.name} {key} seed {seed}: {result['score']:.4g}, elements / "
                f"{result['element_ratio']:,.1f}, bytes / {result['ratio']:,.1f}{loss}, "
                f"{result['seconds']:.0f} s",
                flush=True,
            )
    hvd.shutdown()


if __name__ == "__main__":
    main()
