"""Recommendation of `hvd-gradcomp advise` on a link, beside what was measured there."""

from __future__ import annotations

import json
import os
import shlex
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import hvd_gradcomp
from benchmarks.rig import Hosts
from benchmarks.worth.methods import DENSE, METHODS
from benchmarks.worth.recipes import RECIPES, SMALL, task
from benchmarks.worth.results import Results, Setting, usual
from hvd_gradcomp.planning.description import brief

FOLDER, RECIPE, HOSTS = "WORTH_DATA", "WORTH_RECIPE", "WORTH_HOSTS"  # environment variables
COMMAND = ["-m", "hvd_gradcomp", "advise", "--rounds", "9"]
MODEL = "benchmarks.worth.advised:model"
LIMIT = 1800.0  # seconds of a run
COMPARED = ("bf16", "int8", "qsgd", "power", "eighth-5")  # methods whose compressors are measured


def model() -> tuple[torch.nn.Module, Any, torch.optim.Optimizer]:
    """Return what a rank of `make worth` trains, the loss of its next batch, and its optimizer.

    The recipe is the environment's, the small GPT by default, and so is the number of hosts.
    """
    recipe, folder = os.environ.get(RECIPE, SMALL), os.environ.get(FOLDER)
    setting = usual(recipe, int(os.environ.get(HOSTS, "2")))
    data = task(recipe, setting.batch // setting.hosts, 0, 1, Path(folder) if folder else None)
    torch.manual_seed(1)
    model = data.model()
    losses = data.batches(model, 1)
    how = RECIPES[recipe]
    return model, lambda: next(losses)(), how.optimizer([*model.parameters()], how.rates[0])


def torchrun(command: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return what each host runs, so that its rank is one of `torch.distributed`."""
    start = ["python", "-m", "torch.distributed.run", "--nnodes", str(len(names))]
    start += ["--nproc-per-node", "1", "--master-addr", names[0], "--master-port", "29400"]
    return [
        "sh",
        "-c",
        f'exec {shlex.join(start)} --node-rank "$HOROVOD_RANK" {shlex.join(command)}',
    ]


def advice(hosts: Hosts, setting: Setting, folder: Path | None, limit: float) -> dict[str, Any]:
    """Run the command between the hosts, over gloo as the trainings were; return its JSON.

    Raises:
        JobError: the ranks have failed.
    """
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "advice.json")
        chosen = [f"--compression={METHODS[method].compressor}" for method in COMPARED]
        command = [*COMMAND, "--model", MODEL, "--json", str(path), *chosen]
        env = {RECIPE: setting.recipe, HOSTS: str(setting.hosts), "GLOO_SOCKET_IFNAME": "eth0"}
        env |= {FOLDER: str(folder)} if folder else {}
        env |= {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
        hosts.horovodrun(torchrun(command, hosts.names), env=env, timeout=limit)
        return dict(json.loads(path.read_text()))


def method_of(advice: dict[str, Any]) -> str:
    """Return the key of the method that was recommended.

    Raises:
        ValueError: no method of `make worth` is like it.
    """
    local, use = advice["local_steps"], advice["use"]
    if local is None and use is None:
        return DENSE
    use = use if local is None else local["use"]
    every = "" if local is None else f"every={local['every']}"
    for key, method in METHODS.items():
        if not method.compressor or method.local != every or method.dense_first:
            continue
        text = method.compressor.format(momentum=0.0)
        if brief(eval(text, vars(hvd_gradcomp))) == use:
            return key
    raise ValueError(f"no method of make worth is like what advise says: {use}, {local}")


def measure(
    results: Results, setting: Setting, ratios: Sequence[float], folder: Path | None
) -> None:
    """Ask for advice over links of these ratios, and print how far it is from the best.

    Args:
        results: to add to; their steps were timed at these ratios.
        setting: what is trained.
        ratios: of a dense exchange to a step without any.
        folder: in the place of Debian's packages.
    """
    with Hosts(setting.hosts) as hosts:
        for ratio in ratios:
            timed = results.row(setting, DENSE, ratio)
            if timed is None:
                raise SystemExit(f"nothing was timed at {ratio:g}: --parts time")
            hosts.set_rate(timed["rate"])
            advised = advice(hosts, setting, folder, LIMIT)
            row = compared(results, setting, ratio, advised)
            results.add_advice(setting, ratio, row)
            print(f"  at {ratio:g}: {row['method']}, within {row['within']}", flush=True)


def compared(
    results: Results, setting: Setting, ratio: float, advice: dict[str, Any]
) -> dict[str, Any]:
    """Return what was recommended, and how far it is from the best that was measured."""
    seconds = {
        method: results.seconds(setting, method, ratio) for method in results.methods(setting)
    }
    known = {method: each for method, each in seconds.items() if each is not None}
    method, best = method_of(advice), min(known, key=lambda key: known[key])
    local = advice["local_steps"]
    return {
        "method": method,
        "best": best,
        "expected": local["sooner"] if local else None,
        "within": known[method] / known[best] if method in known else None,
        "forward_backward_ms": advice["forward_ms"] + advice["backward_ms"],
        "bandwidth": advice["bandwidth"],
    }
