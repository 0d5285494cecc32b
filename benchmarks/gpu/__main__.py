"""Measures on a GPU in some minutes: the same bits, FSDP2, local steps, times, launches.

    make gpu SETUP=0 PYTHON=python3                    # as below, where there is a GPU
    python -m benchmarks.gpu --folder results          # writes gpu-cuda.json and gpu-cuda.md
    python -m benchmarks.gpu --device cpu --minutes 15 # a rehearsal, at a small size

Parts, in the order of their worth:

`kernels`: tests of each kernel beside the plain ops, to the bit, and captured in CUDA graphs.
`fsdp`: a transformer by `fully_shard`, two replicas, by the hook and with local steps; two ranks
share one GPU over gloo, two GPUs go by NCCL.
`local`: a transformer by `ddp.local_steps`, every 5 steps: a step and a round, beside DDP.
`training`: a step of ResNet-50 with each method beside DDP alone, over NCCL, on one or two GPUs.
`exchange`: a small model with each method, over NCCL; where there is one GPU, by one process, and
then by two over gloo that share it.
`steps`: `benchmarks.codecs`: copies and launches of a step, and its extra memory.
`reads`: tests of codecs on the device, where a wait for it is an error (sync-debug mode).
`horovod`: tests of ranks, where Horovod is installed.

All replicas have to be equal to the bit at the end. Each part has a share of the time that is left,
and what it does not use goes to the next ones. A method that would end too late is left out, and
named. Results are written after each row. Called once more, it measures what has no result, or one
with an error. What lacks a package is named first, and not run. On a CPU Triton's interpreter runs
the kernels, and a small transformer takes the place of ResNet-50.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.gpu.requirements import ALWAYS, NEEDS, missing, needed

CLOSING = 20.0  # seconds: what has begun may end, and results are written


def lacking(parts: list[str], device: str) -> dict[str, str]:
    """Return why parts cannot run, by part, and say it."""
    why = {part: ", ".join(missing(needed(part, device))) for part in parts}
    why = {part: absent for part, absent in why.items() if absent}
    packages = missing(package for part in parts for package in needed(part, device))
    if packages:
        print(f"not installed: {', '.join(packages)}; not run: {', '.join(why)}", flush=True)
    return {
        part: f"{absent} {'are' if ',' in absent else 'is'} not installed"
        for part, absent in why.items()
    }


def machine(device: str) -> dict[str, Any]:
    """Describe the machine."""
    import torch

    from hvd_gradcomp.ops.torch import TorchOps

    facts: dict[str, Any] = {"torch": torch.__version__, "device": device}
    if device == "cuda":
        facts["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        facts |= {"cuda": torch.version.cuda, "nccl": list(torch.cuda.nccl.version())}
        facts["kernels"] = TorchOps(device).kernels is not None
    if find_spec("triton"):
        facts["triton"] = version("triton")
    return facts


def run(options: argparse.Namespace, begun: float) -> int:
    """Measure all parts; return 1 if something has failed."""
    from benchmarks.gpu.part import Setting
    from benchmarks.gpu.parts import PARTS
    from benchmarks.gpu.results import Results

    absent = lacking(options.parts, options.device)
    facts = machine(options.device)
    try:
        results = Results(options.folder / f"gpu-{options.device}.json", facts)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    devices = len(facts.get("gpus", [""]))
    setting = Setting(options.device, devices, tuple(options.only), options.workers, options.whole)
    deadline = begun + 60 * options.minutes - CLOSING
    for part in options.parts:
        if part in absent:
            results.skip(part, absent[part])
    parts = [part for part in options.parts if part not in absent]
    for at, part in enumerate(parts):
        shares = sum(PARTS[each].share for each in parts[at:])
        left = deadline - time.monotonic()
        _measure(part, PARTS[part], setting, results, left * PARTS[part].share / shares)
    print(f"\n{results.table()}")
    seconds = time.monotonic() - begun
    print(f"results: {results.path} and {results.path.with_suffix('.md').name}; {seconds:.0f} s")
    return int(results.failed())


def _measure(name: str, part: Any, setting: Any, results: Any, seconds: float) -> None:
    """Measure what a part has no result of, for so many seconds."""
    begin, error = time.monotonic(), ""
    left = results.left(name, part.names(setting))
    print(f"{name}: {len(left)} to measure, {max(0, seconds):.0f} s", flush=True)
    try:
        if left and seconds > 0:
            for row in part.measure(setting, left, begin + seconds):
                results.add(name, row)
                print(f"  {_line(row)}, {time.monotonic() - begin:.0f} s", flush=True)
    except Exception as failure:  # the other parts can still be had
        error = str(failure)[-2000:] or type(failure).__name__
    tried = {row["name"] for row in results.rows(name)}
    results.end(name, [each for each in left if each not in tried], error)


def _line(row: dict[str, Any]) -> str:
    """Return what to show of a row while the others are measured."""
    for key in ("error", "cut"):
        if key in row:
            return f"{row['name']}: {key}: {row[key].strip().splitlines()[-1]}"
    shown: dict[str, Callable[[Any], str]] = {
        "passed": lambda n: f"{n} passed",
        "ms": lambda ms: f"{ms:.1f} ms",
        "round_ms": lambda ms: f"a round {ms:.1f} ms",
        "copies": lambda x: f"{x:.1f} copies",
    }
    return f"{row['name']}: " + ", ".join(f(row[key]) for key, f in shown.items() if key in row)


def main(arguments: list[str] | None = None) -> int:
    begun = time.monotonic()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--minutes", type=float, default=8.0, help="of all parts together")
    parser.add_argument("--parts", nargs="+", choices=NEEDS, default=list(NEEDS))
    parser.add_argument("--only", nargs="+", default=[], metavar="POINT", help="such as QSGD")
    parser.add_argument("--whole", action="store_true", help="all tests of a part")
    workers = min(12, os.cpu_count() or 1) if find_spec("xdist") else 0
    parser.add_argument("--workers", type=int, default=workers, help="of tests, by pytest-xdist")
    parser.add_argument("--folder", type=Path, default=Path("results"))
    options = parser.parse_args(arguments)
    if absent := missing(ALWAYS):
        print(f"not installed: {', '.join(absent)}; nothing was run", file=sys.stderr)
        return 2
    if options.device == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")
    return run(options, begun)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
