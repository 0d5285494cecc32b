"""Local steps beside a slow rank, or ranks that pause: with a deadline, and without.

    python -m benchmarks.archive.stragglers
    python -m benchmarks.archive.stragglers --json docs/measured/stragglers.json

Four processes of this machine train a perceptron of 26,122 parameters on 1,200 of scikit-learn's
digits, `torch.distributed` over gloo, `ddp.LocalSteps(every=10)` with averaging in 8 bits. A step
sleeps for 20 ms, as if it computed elsewhere, so ranks do not share cores. Either one rank sleeps
four times as long; or each rank stands still for a second in one step of 100. For each case the
same training runs for as long without a deadline and with one of 2 s, in turns. Told are the steps
that all ranks made in a second, the exchanges, the seconds to a loss of 0.3 on the other 597
digits, looked at after each exchange, and the loss at the end.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy

from hvd_gradcomp import Int8Compressor, OuterSGD
from hvd_gradcomp.torch import ddp

RANKS, EVERY, BATCH, SEEN = 4, 10, 16, 1200
STEP, SLOWER, PAUSE, RARE = 0.02, 4, 1.0, 0.01  # seconds; times; seconds; of steps
TARGET, DEADLINE, SECONDS = 0.3, 2.0, 40.0
CASES = ("none slow", "one slow", "pauses")
Row = dict[str, Any]


def trained(case: str, deadline: float | None, seconds: float) -> Row:
    """Train for so long; return this rank's numbers."""
    rank = dist.get_rank()
    data = load_digits()
    x, y = torch.from_numpy(data.data / 16).float(), torch.from_numpy(data.target)
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 128),
        torch.nn.ReLU(),
        torch.nn.Linear(128, 128),
        torch.nn.ReLU(),
        torch.nn.Linear(128, 10),
    )
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    averaging = {"every": EVERY, "outer": OuterSGD(1, 0), "compression": Int8Compressor()}
    optimizer = ddp.LocalSteps(sgd, model.named_parameters(), **averaging, deadline=deadline)
    random = torch.Generator().manual_seed(100 + rank)
    reached, rounds, looked = None, 0, 0.0
    dist.barrier()
    begin = time.perf_counter()
    # All ranks stop in the same round: the last one in which rank 0 still had time.
    on = torch.ones(1)
    while on:
        pause = STEP * (SLOWER if case == "one slow" and rank == RANKS - 1 else 1)
        if case == "pauses" and float(torch.rand(1, generator=random)) < RARE:
            pause += PAUSE
        time.sleep(pause)
        chosen = torch.randint(0, SEEN, (BATCH,), generator=random)
        optimizer.zero_grad()
        cross_entropy(model(x[chosen]), y[chosen]).backward()
        optimizer.step()
        if optimizer.rounds > rounds:
            rounds, start = optimizer.rounds, time.perf_counter()
            with torch.no_grad():
                loss = float(cross_entropy(model(x[SEEN:]), y[SEEN:]))
            looked += time.perf_counter() - start
            if reached is None and loss <= TARGET:
                reached = time.perf_counter() - begin - looked
            on[0] = float(time.perf_counter() - begin < seconds)
            dist.broadcast(on, 0)
    took = time.perf_counter() - begin - looked
    steps = torch.tensor(float(optimizer.steps_made))
    each = [torch.zeros_like(steps) for _ in range(RANKS)]
    dist.all_gather(each, steps)
    return {
        "case": case,
        "deadline": deadline,
        "seconds": took,
        "steps_a_second": float(sum(each)) / took,
        "steps": [int(n) for n in each],
        "rounds": rounds,
        "seconds_to_target": reached,
        "loss": loss,
    }


def as_rank(rank: int, folder: str, seconds: float) -> None:
    """Run all cases as one of the ranks; rank 0 writes the rows."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS
    )
    rows = [trained(case, by, seconds) for case in CASES for by in (None, DEADLINE)]
    if rank == 0:
        Path(folder, "rows.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.archive.stragglers", description=__doc__
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of each training")
    parser.add_argument("--json", type=Path, help="where the rows go")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(as_rank, (folder, options.seconds), RANKS)
        rows = json.loads(Path(folder, "rows.json").read_text())
    print("| case | deadline | steps / s | exchanges | s to the target | loss at the end |")
    print("|---|--:|--:|--:|--:|--:|")
    for row in rows:
        by = "none" if row["deadline"] is None else f"{row['deadline']:g} s"
        target = "never" if row["seconds_to_target"] is None else f"{row['seconds_to_target']:.1f}"
        print(
            f"| {row['case']} | {by} | {row['steps_a_second']:.0f} | {row['rounds']} | {target} | "
            f"{row['loss']:.3f} |"
        )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
