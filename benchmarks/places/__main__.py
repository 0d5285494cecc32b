"""Step between two hosts, by the place to train: what is typed from README, and what it gains.

    python -m benchmarks.places                                     # as root, ten minutes
    python -m benchmarks.places --only ddp keras --rate 1gbit
    python -m benchmarks.places --json docs/measured/places.json
    python -m benchmarks.places --show docs/measured/places.json    # the table of docs/worth.md

Each place trains a GPT of 0.8 million parameters on noise, with AdamW in float32, three times: as
its framework exchanges gradients, with `QSGDCompressor()` and with local steps, each by the line
that README has. Two hosts are network namespaces with real sockets between them (`benchmarks.rig`),
a rank and a thread each. A cell is the mean of 20 steps, four rounds of local steps, from the end
of one step to the end of another, on the first rank; then how many times as fast as the framework's
own exchange that is. `alone` is a step of the same model without an exchange, with FSDP2 sharded on
its host, the median of three. What is in the file of `--json` already is not run again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks.places.worker import MARK, METHODS, PLACES
from benchmarks.rig import Hosts, HostsError, JobError, bits_per_second

HOSTS = 2
OWN = METHODS[0]


def measured(hosts: Hosts, place: str, method: str) -> dict[str, Any]:
    """Return the row of a place and a method, trained on all hosts.

    Raises:
        JobError: the ranks have failed.
    """
    command = ["python", "-m", "benchmarks.places.worker", place, method]
    output = hosts.horovodrun(command, env={"GLOO_SOCKET_IFNAME": "eth0"}, timeout=400.0)
    (line,) = (line for line in output.splitlines() if MARK in line)
    return dict(json.loads(line.partition(MARK)[2]))


def table(result: dict[str, Any]) -> str:
    """Return what was measured in Markdown."""
    rows = {(row["place"], row["method"]): row for row in result["rows"]}
    lines = [
        "| where | alone, ms | dense exchange / step | own exchange, ms | QSGD | local steps |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for place in (place for place in PLACES if (place, OWN) in rows):
        first = rows[place, OWN]
        alone = statistics.median(rows[place, method]["alone_ms"] for method in METHODS)
        bits = 64 * (HOSTS - 1) / HOSTS * first["parameters"]
        ratio = 1e3 * bits / bits_per_second(result["rate"]) / alone
        cells = [f"{alone:.0f}", f"{ratio:.1f}", f"{first['ms']:.0f}"]
        for method in METHODS[1:]:
            ms = rows[place, method]["ms"]
            cells.append(f"{ms:.0f} ({first['ms'] / ms:.1f})")
        lines.append(f"| {PLACES[place].title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.places", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--only", nargs="+", choices=PLACES, default=list(PLACES))
    parser.add_argument("--rate", default="100mbit", help="of the links")
    parser.add_argument("--json", type=Path, help="write what was measured there")
    parser.add_argument("--show", type=Path, metavar="JSON", help="print it, and measure nothing")
    options = parser.parse_args()
    if options.show:
        print(table(json.loads(options.show.read_text())))
        return 0
    result: dict[str, Any] = {"rate": options.rate, "rows": []}
    if options.json and options.json.exists():
        result = json.loads(options.json.read_text())
    if result["rate"] != options.rate:
        parser.error(f"{options.json} has times at {result['rate']}: give another --json")
    rows = result["rows"]
    known = {(row["place"], row["method"]) for row in rows}
    try:
        with Hosts(HOSTS, options.rate) as hosts:
            for place, method in itertools.product(options.only, METHODS):
                if (place, method) in known:
                    continue
                rows.append(measured(hosts, place, method))
                print(f"{place}, {method}: {rows[-1]['ms']:.0f} ms", flush=True)
                if options.json:
                    options.json.write_text(json.dumps(result, indent=1) + "\n")
    except HostsError as error:
        print(error, file=sys.stderr)
        return 2
    except JobError as error:
        print(error, file=sys.stderr)
        return 1
    print(table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
