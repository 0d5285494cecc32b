"""Recommendation of `hvd-gradcomp advise` on a link, beside what was measured there."""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

import hvd_gradcomp
from benchmarks.papers.parts import Scale
from benchmarks.papers.training import TASKS as DATA
from benchmarks.rig import Hosts
from benchmarks.worth.ways import COMMON, STOCK, TASKS
from hvd_gradcomp.planning.description import brief

FOLDER = "WORTH_DATA"  # environment variable: a folder in the place of Debian's packages
COMMAND = ["python", "-m", "hvd_gradcomp", "advise", "--rounds", "9"]
MODEL = "benchmarks.worth.advised:transformer"
COMPARED = ("bf16", "int8", "qsgd", "power", "chunked", "denser-5")  # ways whose compressors


def transformer() -> tuple[torch.nn.Module, Any, torch.optim.Optimizer]:
    """Return what `make worth` trains, the loss of its next batch, and its optimizer."""
    folder = os.environ.get(FOLDER)
    data = DATA["transformer"](Path(folder) if folder else None, Scale(6400, 4))
    torch.manual_seed(1)
    model = data.model()
    losses = data.epoch(model, 1000)
    optimizer = torch.optim.AdamW(model.parameters(), lr=TASKS["transformer"].rate)
    return model, lambda: next(losses)(), optimizer


def advice(hosts: Hosts, folder: Path | None, timeout: float) -> dict[str, Any]:
    """Run the command between the hosts; return its JSON.

    Raises:
        JobError: the ranks have failed.
    """
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "advice.json")
        chosen = [f"--compression={COMMON[way].compressor}" for way in COMPARED]
        command = [*COMMAND, "--model", MODEL, "--json", str(path), *chosen]
        env = {FOLDER: str(folder)} if folder else {}
        env |= {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
        hosts.horovodrun(command, env=env, timeout=timeout)
        return dict(json.loads(path.read_text()))


def way_of(said: dict[str, Any]) -> str:
    """Return the key of the way that was recommended; stock Horovod for none.

    Raises:
        ValueError: no way of `make worth` is like it.
    """
    local = said["local_steps"]
    if local is None and said["use"] is None:
        return STOCK
    use = said["use"] if local is None else local["use"]
    for key, way in COMMON.items():
        alike = brief(eval(way.compressor.format(momentum=0.0), vars(hvd_gradcomp))) == use
        every = f"every={local['every']}, outer" if local else ""
        if alike and not way.library and way.local.partition("=OuterSGD")[0] == every:
            return key
    raise ValueError(f"no way of make worth is like what advise says: {use}, {local}")


def compared(said: dict[str, Any], sooner: dict[str, list[float]]) -> dict[str, Any]:
    """Return what was recommended, and how far it is from the best that was measured.

    Args:
        said: by `advise`.
        sooner: times sooner at the target by way, for each seed; of ways that were timed.
    """
    middle = {way: statistics.median(found) for way, found in sooner.items() if found}
    way, best = way_of(said), max(middle, key=lambda key: middle[key])
    local = said["local_steps"]
    return {
        "method": way,
        "expected": local["sooner"] if local else None,
        "sooner": middle.get(way),
        "best": best,
        "best_sooner": middle[best],
        "within": middle[best] / middle[way] if way in middle else None,
        "forward_backward_ms": said["forward_ms"] + said["backward_ms"],
        "bandwidth": said["bandwidth"],
    }
