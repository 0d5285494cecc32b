"""Measures on a GPU, into one file: tests, host reads, launches, memory, two ranks on NCCL.

    make gpu SETUP=0 PYTHON=python3                         # as below, where there is a GPU
    python -m benchmarks.gpu --folder results               # writes gpu-cuda.json and gpu-cuda.md
    python -m benchmarks.gpu --device cpu --only Strom      # as far as a CPU can do it

Parts, each by itself: `kernels` beside the ops, to the bit, and captured in CUDA graphs; `reads`:
ops, codecs and laws on the device, where a wait for it is an error (sync-debug mode); `steps`:
`benchmarks.codecs`, with launches a step and extra memory; `exchange`: two processes over NCCL with
`DistributedDataParallel` and no Horovod, a GPU each (gloo on a CPU), whose replicas have to be
equal to the bit. Where there is one GPU, one process over NCCL, and two over gloo that share it;
`training`: what a step of ResNet-50 takes with each method, and without a hook, in one process over
NCCL: what compressing costs where nothing has to travel; `horovod`: the same tests that a CPU runs
with ranks, where Horovod is installed.

On a CPU Triton's interpreter runs the kernels. What cannot run says why, and does not count.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.nn.parallel import DistributedDataParallel

from hvd_gradcomp.ops.torch import TorchOps

TESTS = {
    "kernels": ("tests/triton", "--ignore=tests/triton/test_compiled.py"),  # that needs no GPU
    "reads": (
        "tests/single/test_device.py",
        "tests/single/test_golden.py",
        "tests/single/test_laws.py",
        *("-k", "not tensorflow"),  # beside it no kernel would be taken
    ),
    "horovod": ("tests/parallel/test_torch.py", "-k", "gloo and (200_steps or backward)"),
}
NEEDS = {
    "kernels": "triton",
    "exchange": "tabulate",
    "training": "torchvision",
    "horovod": "horovod",
}
PARTS = ("kernels", "reads", "steps", "exchange", "training", "horovod")
RANKS, STEPS = 2, 20
ALONE = "DDP without a hook"
PATIENCE = datetime.timedelta(minutes=3)

Result = dict[str, Any]


def tested(part: str, options: argparse.Namespace) -> Result:
    """Run pytest on a part and return its summary."""
    command = [sys.executable, "-m", "pytest", "-q", "--device", options.device, *TESTS[part]]
    if options.workers:
        command += ["-n", str(options.workers)]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        code = subprocess.run([*command, f"--junitxml={report}"]).returncode
        suite = ElementTree.parse(report).find("testsuite") if report.exists() else None
    attributes = {} if suite is None else suite.attrib
    numbers = {
        key: int(attributes.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")
    }
    return {
        "command": " ".join(command[1:]),
        **numbers,
        "seconds": attributes.get("time"),
        "code": code,
    }


def steps(options: argparse.Namespace) -> Result:
    """The rows of `benchmarks.codecs`."""
    from benchmarks import codecs

    only = ["--only", *options.only] if options.only else []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "rows.json")
        arguments = ["--device", options.device, "--steps", str(options.steps), "--json", str(file)]
        code = codecs.main([*arguments, *only])
        return {"rows": json.loads(file.read_text()), "code": code}


def exchange(options: argparse.Namespace) -> Result:
    """Return rank 0's measurements of steps of two processes; of one over NCCL with one GPU."""
    if options.device == "cpu":
        ways = [("gloo", RANKS)]
    elif torch.cuda.device_count() < RANKS:
        ways = [("nccl", 1), ("gloo", RANKS)]
    else:
        ways = [("nccl", RANKS)]
    rows = [row for setting in ways for row in spawned(options, *setting, small)]
    return {"rows": rows, "code": int(any("error" in row for row in rows))}


def training(options: argparse.Namespace) -> Result:
    """Return measurements of steps of ResNet-50 in one process."""
    rows = spawned(options, "nccl" if options.device == "cuda" else "gloo", 1, resnet50)
    return {"rows": rows, "code": int(any("error" in row for row in rows))}


class Task(NamedTuple):
    """A model, the loss of its next batch, and the learning rate of SGD."""

    model: torch.nn.Module
    loss: Callable[[torch.nn.Module], torch.Tensor]
    rate: float


def small(device: str) -> Task:
    """Two layers on noise."""
    layers = torch.nn.Linear(512, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 10)
    generator = torch.Generator(device).manual_seed(dist.get_rank())

    def loss(model: torch.nn.Module) -> torch.Tensor:
        inputs = torch.randn(32, 512, generator=generator, device=device)
        return model(inputs).square().mean()

    return Task(torch.nn.Sequential(*layers).to(device), loss, 0.05)


def resnet50(device: str) -> Task:
    """ResNet-50 on 64 images of noise (on a CPU 2), under autocast to bfloat16."""
    from torchvision.models import resnet50 as built

    model = built().to(device, memory_format=torch.channels_last)
    images = torch.randn(64 if device == "cuda" else 2, 3, 224, 224, device=device)
    images = images.to(memory_format=torch.channels_last)
    labels = torch.arange(len(images), device=device)

    def loss(model: torch.nn.Module) -> torch.Tensor:
        with torch.autocast(device, torch.bfloat16):
            return torch.nn.functional.cross_entropy(model(images), labels)

    return Task(model, loss, 1e-3)


def spawned(
    options: argparse.Namespace, backend: str, ranks: int, task: Callable[[str], Task]
) -> list[Result]:
    """Return a row for each method; one that fails has an error, and new processes go on."""
    from benchmarks import points

    selected = points.chosen(points.every(), options.only)
    names = [point.name for point in selected if point.middle]
    if not options.only:
        names.insert(0, ALONE)
    rows: list[Result] = []
    while names:
        failure = ""
        with tempfile.TemporaryDirectory() as folder:
            done = Path(folder, "rows.json")
            done.write_text("[]")
            try:
                arguments = folder, options.device, backend, ranks, task, names
                torch.multiprocessing.spawn(ranked, arguments, ranks)
            except Exception as error:
                failure = str(error).strip()[-2000:]
            rows += json.loads(done.read_text())
        names = [name for name in names if all(row["point"] != name for row in rows)]
        if failure and names:
            row = {"point": names.pop(0), "backend": backend, "ranks": ranks, "error": failure}
            rows.append(row)
    return rows


def ranked(
    rank: int,
    folder: str,
    device: str,
    backend: str,
    ranks: int,
    task: Callable[[str], Task],
    names: list[str],
) -> None:
    """Train with each method in turn, as one of the processes; rank 0 writes what is done."""
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    store = f"file://{folder}/store"
    dist.init_process_group(backend, store, rank=rank, world_size=ranks, timeout=PATIENCE)
    rows = []
    for name in names:
        row = {"point": name, "backend": backend, "ranks": ranks}
        rows.append({**row, **trained(name, device, task)})
        if rank == 0:
            Path(folder, "rows.json").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def trained(name: str, device: str, task: Callable[[str], Task]) -> Result:
    """Return times and bytes of `STEPS` steps with one method; raise where replicas differ."""
    from benchmarks import points
    from hvd_gradcomp.torch import ddp

    torch.manual_seed(1)
    bare, loss, rate = task(device)
    model = DistributedDataParallel(bare)
    state = None
    if name != ALONE:
        (point,) = (point for point in points.every() if point.name == name)
        state = ddp.compress(model, point.make())
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    times = []
    for _ in range(STEPS):
        start = time.perf_counter()
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    every = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(every, flat)
    if not (all(torch.equal(every[0], x) for x in every) and bool(flat.isfinite().all())):
        raise AssertionError(f"{name}: replicas differ, or are not finite")
    late = times[STEPS // 2 :]  # once all is compiled
    sent = STEPS * 4 * flat.numel() if state is None else state.stats().bytes_sent
    spread = {"ms": statistics.median(late), "least_ms": min(late), "first_ms": times[0]}
    return {key: 1e3 * seconds for key, seconds in spread.items()} | {"bytes_sent": sent}


def machine(device: str) -> Result:
    """Describe the machine."""
    facts: Result = {"torch": torch.__version__, "device": device}
    if device == "cuda":
        facts["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        facts |= {"cuda": torch.version.cuda, "nccl": list(torch.cuda.nccl.version())}
        facts["kernels"] = TorchOps(device).kernels is not None
    if importlib.util.find_spec("triton"):
        from importlib.metadata import version

        facts["triton"] = version("triton")
    return facts


def table(result: Result) -> str:
    """As Markdown."""
    lines = ["| part | what came of it |", "|---|---|"]
    for part, outcome in result["parts"].items():
        if "not run" in outcome:
            text = f"not run: {outcome['not run']}"
        elif "tests" in outcome:
            failed = outcome["failures"] + outcome["errors"]
            passed = outcome["tests"] - failed - outcome["skipped"]
            text = f"{passed} passed, {failed} failed, {outcome['skipped']} skipped"
        else:
            text = "failed" if outcome["code"] else f"{len(outcome['rows'])} methods"
        lines.append(f"| {part} | {text} |")
    if result["machine"].get("kernels") is False:  # steps and exchange are of plain ops
        lines += ["", "PyTorch took no kernels here."]
    rows = result["parts"].get("steps", {}).get("rows", [])
    if rows:
        calls = "launches" if result["machine"]["device"] == "cuda" else "operators"
        lines += ["", f"| point | copies | {calls} a bucket | extra memory, buckets |"]
        lines.append("|---|--:|--:|--:|")
    for row in rows:
        numbers = row["copies"], row["calls"] / row["buckets"], row["extra_buckets"]
        lines.append(f"| {row['point']} | " + " | ".join(f"{x:.2f}" for x in numbers) + " |")
    for part in ("exchange", "training"):
        rows = result["parts"].get(part, {}).get("rows", [])
        if rows:
            heads = part, "over", "ranks", f"bytes sent in {STEPS} steps", "ms a step", "least"
            lines += ["", f"| {' | '.join(heads)} |", "|---|---|--:|--:|--:|--:|"]
        for row in rows:
            where = f"{row['point']} | {row['backend']} | {row['ranks']}"
            if "error" in row:
                lines.append(f"| {where} | | {row['error'].splitlines()[-1]} | |")
            else:
                numbers = f"{row['bytes_sent']} | {row['ms']:.1f} | {row['least_ms']:.1f}"
                lines.append(f"| {where} | {numbers} |")
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--only", nargs="+", default=[], metavar="POINT", help="of steps, exchange")
    parser.add_argument("--steps", type=int, default=9, help="that are measured")
    parser.add_argument("--workers", type=int, default=0, help="of the tests; needs pytest-xdist")
    parser.add_argument("--folder", type=Path, default=Path("results"))
    options = parser.parse_args(arguments)
    if options.device == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")
    options.folder.mkdir(parents=True, exist_ok=True)
    path = options.folder / f"gpu-{options.device}.json"
    result: Result = {"machine": machine(options.device), "parts": {}}
    for part in options.parts:
        measure = {"steps": steps, "exchange": exchange, "training": training}.get(part)
        needed = NEEDS.get(part)
        try:
            if needed and importlib.util.find_spec(needed) is None:
                outcome = {"not run": f"{needed} is not installed"}
            else:
                outcome = measure(options) if measure else tested(part, options)
        except Exception as error:  # the other parts can still be had
            outcome = {"rows": [], "code": 1, "error": str(error)[-2000:]}
        result["parts"][part] = outcome
        path.write_text(json.dumps(result, indent=1) + "\n")
    path.with_suffix(".md").write_text(table(result))
    print(table(result))
    print(f"results: {path} and {path.with_suffix('.md').name}")
    return int(any(outcome.get("code") for outcome in result["parts"].values()))


if __name__ == "__main__":
    sys.exit(main())
