"""Predictions of `hvd-gradcomp advise` for more hosts than it has, beside what was measured there.

    python -m benchmarks.archive.extrapolation             # as root: from 2 and 4 to 4 and 8
    python -m benchmarks.archive.extrapolation --rate 1gbit --json extrapolation.json

Hosts are those of `benchmarks.rig`, a rank on each, Horovod over gloo; the model is the small GPT
of `make worth`. `advise` runs on 2, 4 and 8 hosts and measures whole exchanges there; on 2 and 4 it
runs again with `--for-hosts`. Its predicted exchange is compared with the measured median. All
hosts share the cores of this machine, so the work of eight ranks takes longer on them than on
hosts of their own, which is no error of the prediction: `--rate` is low, so that links count.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.rig import Hosts, HostsError, JobError
from benchmarks.worth.advised import MODEL

COMPRESSORS = (
    "BF16Compressor()",
    "Int8Compressor()",
    "QSGDCompressor(bits=4)",
    "OneBitCompressor()",
    "PowerSGDCompressor(rank=4)",
    "ChunkedTopKCompressor()",
    "ChunkedTopKCompressor(exchange='two_shot')",
    "SparseGDCompressor(density=0.01)",
)
HOSTS = (2, 4, 8)
Rows = list[dict[str, Any]]


def advice(hosts: Hosts, ahead: int | None, rounds: int, timeout: float) -> dict[str, Any]:
    """Run `advise` on the hosts, for so many others; return its JSON.

    Raises:
        JobError: the ranks have failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "advice.json")
        command = ["python", "-m", "hvd_gradcomp", "advise", "--rounds", str(rounds)]
        command += ["--model", MODEL, "--json", str(path)]
        command += [f"--compression={text}" for text in COMPRESSORS]
        command += ["--for-hosts", str(ahead)] if ahead else []
        env = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
        hosts.horovodrun(command, env=env, timeout=timeout)
        return dict(json.loads(path.read_text()))


def measured(rate: str, rounds: int, timeout: float) -> Rows:
    """Return a row for each way, and numbers of hosts that were predicted and measured."""
    advice_of: dict[tuple[int, int], dict[str, Any]] = {}
    for count in HOSTS:
        with Hosts(count, rate) as hosts:
            for ahead in (n for n in HOSTS if n >= count):
                beyond = None if ahead == count else ahead
                advice_of[count, ahead] = advice(hosts, beyond, rounds, timeout)
                print(f"{count} hosts, for {ahead}", flush=True)
    rows = []
    for (count, ahead), advised in advice_of.items():
        took = {row["method"]: row["measured_ms"] for row in advice_of[ahead, ahead]["rows"]}
        for row in advised["rows"]:
            if took.get(row["method"]) is not None:
                rows.append(
                    {
                        "from": count,
                        "to": ahead,
                        "method": row["method"],
                        "predicted_ms": row["predicted_ms"],
                        "measured_ms": took[row["method"]],
                    }
                )
    return rows


def table(rows: Rows) -> str:
    """Return predicted over measured times, by way; Markdown, medians below."""
    pairs = list(dict.fromkeys((row["from"], row["to"]) for row in rows))
    heads = " | ".join(f"{a}, measured there" if a == b else f"{a} for {b}" for a, b in pairs)
    lines = [f"| exchange, predicted / measured | {heads} |", "|---|" + "--:|" * len(pairs)]
    for method in dict.fromkeys(row["method"] for row in rows):
        cells = []
        for pair in pairs:
            (row,) = (r for r in rows if (r["from"], r["to"]) == pair and r["method"] == method)
            ratio = row["predicted_ms"] / row["measured_ms"]
            cells.append(f"{ratio:.2f} of {row['measured_ms']:.0f} ms")
        lines.append(f"| `{method}` | {' | '.join(cells)} |")
    errors = [
        statistics.median(
            abs(row["predicted_ms"] / row["measured_ms"] - 1)
            for row in rows
            if (row["from"], row["to"]) == pair
        )
        for pair in pairs
    ]
    lines.append(f"| median error | {' | '.join(f'{100 * e:.0f} %' for e in errors)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", default="100mbit", help="of every link")
    parser.add_argument("--rounds", type=int, default=5, help="of each way")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds of a job")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--show", type=Path, metavar="JSON", help="measures nothing")
    options = parser.parse_args()
    if options.show:
        print(table(json.loads(options.show.read_text())))
        return 0
    try:
        rows = measured(options.rate, options.rounds, options.timeout)
    except (HostsError, JobError) as error:
        print(error, file=sys.stderr)
        return 2 if isinstance(error, HostsError) else 1
    print(table(rows))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
