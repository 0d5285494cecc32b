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
from benchmarks.worth.methods import COMMON, STOCK, TASKS
from hvd_gradcomp.planning.description import brief

FOLDER = "WORTH_DATA"  # environment variable: a folder in the place of Debian's packages
COMMAND = ["python", "-m", "hvd_gradcomp", "advise", "--rounds", "9"]
MODEL = "benchmarks.worth.advised:transformer"
COMPARED = ("bf16", "int8", "qsgd", "power", "chunked", "denser-5")  # methods whose compressors


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
        chosen = [f"--compression={COMMON[method].compressor}" for method in COMPARED]
        command = [*COMMAND, "--model", MODEL, "--json", str(path), *chosen]
        env = {FOLDER: str(folder)} if folder else {}
        env |= {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
        hosts.horovodrun(command, env=env, timeout=timeout)
        return dict(json.loads(path.read_text()))


def method_of(advice: dict[str, Any]) -> str:
    """Return the key of the method that was recommended; stock Horovod for none.

    Raises:
        ValueError: no method of `make worth` is like it.
    """
    local = advice["local_steps"]
    if local is None and advice["use"] is None:
        return STOCK
    use = advice["use"] if local is None else local["use"]
    for key, method in COMMON.items():
        alike = brief(eval(method.compressor.format(momentum=0.0), vars(hvd_gradcomp))) == use
        every = f"every={local['every']}, outer" if local else ""
        if alike and not method.library and method.local.partition("=OuterSGD")[0] == every:
            return key
    raise ValueError(f"no method of make worth is like what advise says: {use}, {local}")


def compared(advice: dict[str, Any], sooner: dict[str, list[float]]) -> dict[str, Any]:
    """Return what was recommended, and how far it is from the best that was measured.

    Args:
        said: by `advise`.
        sooner: times sooner at the target by method, for each seed; of methods that were timed.
    """
    middle = {
        method: statistics.median(speed_ups) for method, speed_ups in sooner.items() if speed_ups
    }
    method, best = method_of(advice), max(middle, key=lambda key: middle[key])
    local = advice["local_steps"]
    return {
        "method": method,
        "expected": local["sooner"] if local else None,
        "sooner": middle.get(method),
        "best": best,
        "best_sooner": middle[best],
        "within": middle[best] / middle[method] if method in middle else None,
        "forward_backward_ms": advice["forward_ms"] + advice["backward_ms"],
        "bandwidth": advice["bandwidth"],
    }
