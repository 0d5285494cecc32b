"""DiLoCo beside torchft's: the same inner and outer optimizers, batches and rounds, two ranks.

    pip install --no-deps torchft==0.2.0
    pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http
    python -m benchmarks.archive.torchft --steps 300 --every 15

Trains the small GPT of `make papers` on the King James Bible, once with `ddp.LocalSteps` and once
with torchft's `DiLoCo` behind its `Manager`, over gloo on CPUs, and prints the loss of both by
round, how far the parameters are apart at the end, and the seconds of a step. torchft is a
dependency of nothing else here.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.moments import GPT
from benchmarks.papers import data
from examples.pytorch.char_lstm import ALPHABET, loss_of
from hvd_gradcomp.algorithms.combined.local_steps import DILOCO
from hvd_gradcomp.torch import ddp

RANKS, WINDOW, WINDOWS = 2, 32, 8
RATE, DECAY, OUTER = 0.001, 0.01, DILOCO
TIMEOUT = datetime.timedelta(seconds=60)
Step = Callable[[], Any]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


def model_and_optimizer() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = GPT(words=ALPHABET, length=WINDOW)
    torch.nn.init.normal_(model.words.weight, std=0.02)
    torch.nn.init.normal_(model.places.weight, std=0.02)
    return model, torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY)


def train(
    rank: int, steps: int, every: int, model: torch.nn.Module, optimizer: Any, step: Step
) -> dict[str, Any]:
    text = data.text(None)
    generator = torch.Generator().manual_seed(100 + rank)
    losses, recent, begin = [], 0.0, time.perf_counter()
    for number in range(1, steps + 1):
        starts = torch.randint(0, len(text) - WINDOW, (WINDOWS,), generator=generator)
        batch = torch.stack([text[s : s + WINDOW + 1] for s in starts.tolist()])
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        step()
        recent += loss.item()
        if number % every == 0:
            losses.append(recent / every)
            recent = 0.0
    seconds = (time.perf_counter() - begin) / steps
    parameters = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    return {"losses": losses, "seconds": seconds, "parameters": parameters}


def ours(rank: int, steps: int, every: int, address: str) -> dict[str, Any]:
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=RANKS)
    model, adam = model_and_optimizer()
    optimizer = ddp.LocalSteps(adam, model.named_parameters(), every, OUTER, None)
    result = train(rank, steps, every, model, optimizer, optimizer.step)
    dist.destroy_process_group()
    return result


def theirs(rank: int, steps: int, every: int, address: str) -> dict[str, Any]:
    from torchft import Manager, ProcessGroupGloo
    from torchft.local_sgd import DiLoCo

    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    model, adam = model_and_optimizer()
    how = {"momentum": OUTER.momentum, "nesterov": bool(OUTER.nesterov)}
    outer = torch.optim.SGD(model.parameters(), lr=OUTER.lr, **how)

    def save() -> dict[str, Any]:
        return {"model": model.state_dict()}

    def load(saved: dict[str, Any]) -> None:
        model.load_state_dict(saved["model"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=load,
        state_dict=save,
        min_replica_size=RANKS,
        use_async_quorum=False,
        replica_id=f"replica{rank}",
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=address,
        timeout=TIMEOUT,
        init_sync=False,  # both begin alike; else one gives nothing in the first round
    )
    with DiLoCo(manager, [model], adam, outer, sync_every=every, pin_memory=False):
        result = train(rank, steps, every, model, adam, adam.step)
    manager.shutdown(wait=False)
    return result


def work(name: str, rank: int, steps: int, every: int, address: str, path: str) -> None:
    torch.set_num_threads(1)
    run = {"ours": ours, "torchft": theirs}[name]
    torch.save(run(rank, steps, every, address), path)


def on_ranks(name: str, steps: int, every: int, address: str) -> list[dict[str, Any]]:
    """Run on all ranks; return what each has found."""
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        paths = [str(Path(folder, f"{rank}.pt")) for rank in range(RANKS)]
        running = [
            spawn.Process(target=work, args=(name, rank, steps, every, address, path))
            for rank, path in enumerate(paths)
        ]
        for process in running:
            process.start()
        for process in running:
            process.join()
        if any(process.exitcode for process in running):
            raise SystemExit(f"{name}: a rank has failed")
        return [torch.load(path) for path in paths]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    try:
        from torchft.coordination import LighthouseServer
    except ImportError as error:
        sys.exit(f"torchft cannot be imported ({error}); see the head of this file")
    how = options.steps, options.every
    ours = on_ranks("ours", *how, f"tcp://localhost:{free_port()}")
    lighthouse = LighthouseServer(bind="localhost:0", min_replicas=RANKS)
    other = on_ranks("torchft", *how, lighthouse.address())
    lighthouse.shutdown()
    result: dict[str, Any] = {"steps": options.steps, "every": options.every}
    for name, results in (("ours", ours), ("torchft", other)):
        means = [sum(pair) / RANKS for pair in zip(*(r["losses"] for r in results))]
        seconds = max(result["seconds"] for result in results)
        result[name] = {"losses": means, "seconds": seconds}
        print(f"{name:8} {1e3 * seconds:6.1f} ms a step; loss by round:", end=" ")
        print(*(f"{loss:.3f}" for loss in means))
    apart = (ours[0]["parameters"] - other[0]["parameters"]).abs().max().item()
    result["apart"] = apart
    size = ours[0]["parameters"].abs().max().item()
    print(f"parameters are at most {apart:.2g} apart at the end; the largest is {size:.2g}")
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
