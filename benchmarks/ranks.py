"""Bytes that a rank receives in a step, by the number of ranks: every method, 2 to 1,024.

    python -m benchmarks.ranks                              # all methods of `hvd-gradcomp bench`
    python -m benchmarks.ranks --json docs/measured/ranks.json --png docs/measured/ranks.png
    python -m benchmarks.ranks --show docs/measured/ranks.json      # the table, nothing is measured

One rank works as in a step among so many; the payloads of the others are its own, so that one
process takes the place of 1,024. Gradients are those of a GPT of 0.8 million parameters on random
characters. Bytes are what its collectives bring a rank, by rings, as `advise` counts them. What
only the ranks' own gradients decide is not in it: how many elements a threshold passes elsewhere,
and the negotiation of capacities.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from benchmarks.moments import GPT
from hvd_gradcomp import Compressor, balanced
from hvd_gradcomp.cli import options, style
from hvd_gradcomp.cli.bench import warm_up_rounds
from hvd_gradcomp.core.cost_model import volume
from hvd_gradcomp.planning.description import brief
from hvd_gradcomp.tuning.job import Job
from hvd_gradcomp.tuning.measure import Gradients, UnmeasurableError, alone
from hvd_gradcomp.tuning.models import Model
from hvd_gradcomp.tuning.over_c10d import TorchJob

RANKS = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
ROUNDS = 3
TWO_SHOT = {
    "chunked-topk, owned": "ChunkedTopKCompressor(exchange='auto')",
    "chunked-topk, owned, k 256": "ChunkedTopKCompressor(k=256, exchange='auto')",
    "ok-topk, gathered": "OkTopKCompressor(exchange='allgather')",
}
BALANCED = ("variance-coded", "strom", "dgc")
DRAWN = {
    "dgc": "DGC",
    "qsgd": "QSGD, 4 bits",
    "ok-topk": "Ok-Topk",
    "scalecom": "ScaleCom",
}


def gradients(job: Job) -> Gradients:
    torch.manual_seed(1)
    model = GPT()

    def loss() -> torch.Tensor:
        tokens = torch.randint(1000, (8, 33))
        scores = model(tokens[:, :-1])
        return functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())

    return Gradients(job, Model("GPT", model, loss, real=True), real=4)


def received(job: Job, compressor: Compressor, grads: Gradients, ranks: int) -> float:
    """Return the bytes that a step brings a rank, the median of some."""
    cost = alone(job, compressor, grads, ranks, ROUNDS, warm_up_rounds(compressor))
    return statistics.median(
        sum(volume(kind, size, ranks) for bucket in one for kind, size in bucket.asks)
        for one in cost.rounds
    )


def measured(keys: list[str]) -> dict[str, Any]:
    job = TorchJob()
    grads = gradients(job)
    methods = {
        key: options.chosen([text], grads.scale)[0].compressor for key, text in TWO_SHOT.items()
    }
    usual = options.usual(grads.scale)
    owned = {f"{key}, balanced": balanced(usual[key]) for key in BALANCED}
    methods = {**usual, **methods, **owned}
    dense = {n: volume("allreduce", 4.0 * grads.elements, n) for n in RANKS}
    rows = []
    for key, compressor in methods.items():
        if keys and key not in keys:
            continue
        try:
            by_ranks = {n: received(job, compressor, grads, n) for n in RANKS}
        except (UnmeasurableError, ValueError) as error:
            print(f"{key}: left out: {error}", flush=True)
            continue
        print(key, *(f"{dense[n] / by_ranks[n]:.3g}" for n in RANKS), flush=True)
        rows.append({"key": key, "title": brief(compressor), "bytes": by_ranks})
    job.close()
    return {"elements": grads.elements, "dense": dense, "rows": rows}


def table(content: dict[str, Any]) -> str:
    """Return how many times fewer bytes a rank receives than with dense gradients; Markdown."""
    counts = [*content["dense"]]
    lines = [f"| method | {' | '.join(f'{int(n):,}' for n in counts)} |"]
    lines.append("| --- |" + " --: |" * len(counts))
    for row in content["rows"]:
        ratios = (content["dense"][n] / row["bytes"][n] for n in counts)
        cells = (f"{x:,.0f}" if x >= 99.5 else f"{x:.3g}" for x in ratios)
        lines.append(f"| `{row['title']}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(content: dict[str, Any], path: Path) -> None:
    counts = [int(n) for n in content["dense"]]
    rows = {row["key"]: row["bytes"] for row in content["rows"]}
    lines = {name: rows[key] for key, name in DRAWN.items() if key in rows}
    lines["no compression"] = content["dense"]
    with options.drawing(path, 7, 4) as axes:
        for (name, received), line in zip(lines.items(), style.lines(len(lines))):
            elements = [received[n] / content["elements"] for n in content["dense"]]
            axes.plot(counts, elements, markersize=3, **line)
            axes.annotate(
                name,
                (counts[-1], elements[-1]),
                (6, 0),
                textcoords="offset points",
                va="top" if name == "DGC" else "bottom",
                fontsize=8,
                color=line["color"],
            )
        axes.set(xscale="log", yscale="log", xlabel="ranks", ylabel="bytes received / element")
        axes.set_xticks(counts, [str(n) for n in counts])
        axes.set_xlim(right=8 * counts[-1])  # space for the labels
        axes.minorticks_off()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[], metavar="KEY")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--png", type=Path)
    parser.add_argument("--show", type=Path, metavar="JSON")
    choice = parser.parse_args()
    torch.set_num_threads(1)
    content = measured(choice.only) if choice.show is None else {}
    # Keys of JSON are texts.
    text = choice.show.read_text() if choice.show else json.dumps(content, indent=1)
    content = json.loads(text)
    if choice.json:
        choice.json.write_text(text + "\n")
    if choice.png:
        draw(content, choice.png)
    print(table(content))
    return 0


if __name__ == "__main__":
    sys.exit(main())
