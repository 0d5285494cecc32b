"""Attacks what is promised: nothing loads wrong, nothing hangs, nothing diverges in silence.

    make chaos                                        # all parts, about a quarter of an hour
    make chaos ARGS="--parts files payloads"
    make chaos ARGS="--parts ranks --only MPI --seed 7"
    make chaos ARGS="--folder docs/measured"          # and puts it on the site
    python -m tests.chaos --show docs/measured/chaos.json

Each input is drawn from the seed, so the same one does the same again. Parts: `files` damages
checkpoints, `payloads` what travels, `numbers` gradients, `ranks` real processes, `links` what lies
between hosts, and elastic runs, `churn` ranks that come and go without Horovod, `stragglers` slow
ones with local steps that have a deadline, `situations` what users do: two exchanges of one model,
weights set and put back, calls in other modes, trainings one after another. What each came to is
counted; the exit status is 1 if anything came to one of `outcomes.BAD`: hung, lost, diverged, or an
error that says nothing of the cause, for example.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import platform
import sys
import time
from pathlib import Path

from tests.chaos import outcomes

PARTS = {
    "files": "tests.chaos.files",
    "payloads": "tests.chaos.payloads",
    "numbers": "tests.chaos.numbers",
    "ranks": "tests.chaos.ranks",
    "links": "tests.chaos.links",
    "churn": "tests.chaos.churn",
    "stragglers": "tests.chaos.stragglers",
    "situations": "tests.chaos.situations",
}


def main() -> None:
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")  # graphs are ready a sixth sooner
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS], help="which")
    parser.add_argument("--seed", type=int, default=1, help="of what is drawn")
    parser.add_argument("--share", type=float, default=1.0, help="of the inputs; 0.1 is a tenth")
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="WHERE",
        help="frameworks and jobs with one of these words in what the table calls them",
    )
    parser.add_argument("--folder", help="where chaos.json goes; what is not run stays")
    parser.add_argument("--show", metavar="JSON", help="prints what was measured before")
    options = parser.parse_args()
    if options.show:
        print(outcomes.table(json.loads(Path(options.show).read_text())["parts"]), end="")
        return
    logging.getLogger("hvd_gradcomp").setLevel(logging.ERROR)
    measured = {
        name: run(name, options.seed, options.share, options.only) for name in options.parts
    }
    print(outcomes.table(measured), end="")
    if options.folder:
        path = Path(options.folder, "chaos.json")
        path.parent.mkdir(parents=True, exist_ok=True)
        before = json.loads(path.read_text())["parts"] if path.exists() else {}
        merged = before | {n: outcomes.renewed(before.get(n), p) for n, p in measured.items()}
        machine = {"cores": os.cpu_count(), "system": platform.machine()}
        record = {
            "machine": machine,
            "parts": {name: merged[name] for name in PARTS if name in merged},
        }
        path.write_text(json.dumps(record, indent=1) + "\n")
    sys.exit(1 if outcomes.bad(measured) else 0)


def run(name: str, seed: int, share: float, only: list[str]) -> dict[str, object]:
    """One part, as the JSON has it."""
    begun, inputs = time.monotonic(), []
    for one in importlib.import_module(PARTS[name]).attacks(seed, share, only):
        inputs.append(one)
        if one.outcome in outcomes.BAD:
            print(
                f"{one.outcome}: {one.where}, {one.attack}, {one.case}: {one.message[:300]}",
                flush=True,
            )
    seconds = round(time.monotonic() - begun)
    return {"seed": seed, "share": share, "seconds": seconds, "rows": outcomes.tallied(inputs)}


if __name__ == "__main__":
    main()
