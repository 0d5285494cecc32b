"""Bytes that a step puts on the links between real hosts, beside those that the law gives.

    python -m benchmarks.wire                                      # as root: 2, 4 and 8 hosts
    python -m benchmarks.wire --hosts 4 --only "Int8Compressor()" "PowerSGDCompressor()"
    python -m benchmarks.wire --show docs/measured/wire.json       # the table; measures nothing

Hosts are those of `benchmarks.rig`, a rank on each, links as fast as they are, `torch.distributed`
over gloo: Horovod's collectives bring the same, and its negotiation beside them. Each rank
exchanges gradients of a small GPT with every method. The kernel counts what goes through each
host's interface, in both directions; the host and the direction with the most are compared with the
law of `docs/payloads.md` (`benchmarks.ranks`). Above it are the headers of packets and of gloo.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.rig import Hosts, HostsError, JobError

WORKER = ["python", "-m", "benchmarks.wire", "--rank"]
MARK = "WIRE "
ROUNDS = 10
HOSTS = (2, 4, 8)


def counted(interface: str = "eth0") -> list[int]:
    """Return the bytes that this host's interface has received and sent."""
    (line,) = (
        line for line in Path("/proc/self/net/dev").read_text().splitlines() if interface in line
    )
    words = line.partition(":")[2].split()
    return [int(words[0]), int(words[8])]


def rank(only: list[str]) -> None:
    """Exchange with each method on this host's rank; rank 0 prints a line of JSON for each."""
    import horovod.torch as horovod
    import torch
    import torch.distributed as dist

    from benchmarks.papers.hook import connect
    from benchmarks.ranks import TWO_SHOT, gradients, received
    from hvd_gradcomp.cli import options
    from hvd_gradcomp.cli.bench import warm_up_rounds
    from hvd_gradcomp.core.cost_model import volume
    from hvd_gradcomp.planning.description import brief
    from hvd_gradcomp.tuning.measure import CompressedExchange, UnmeasurableError
    from hvd_gradcomp.tuning.over_c10d import TorchJob

    horovod.init()
    torch.set_num_threads(1)
    connect()
    horovod.shutdown()  # its negotiation goes on for as long as it runs
    job = TorchJob()
    ranks, first, grads = job.size(), job.rank() == 0, gradients(job)
    texts = only or [*TWO_SHOT.values()]
    methods = {m.name: m.compressor for m in options.chosen(texts, grads.scale)}
    if not only:
        methods = {**{brief(c): c for c in options.usual(grads.scale).values()}, **methods}
    laws = {}
    for title, compressor in methods.items():
        try:
            laws[title] = received(job, compressor, grads, ranks)
        except UnmeasurableError as error:
            if first:
                print(f"{title}: left out: {error}", flush=True)

    def moved(exchange: Callable[[list[torch.Tensor]], Any], rounds: int = ROUNDS) -> float:
        """Return the bytes of a round over the busiest link, in the busier direction."""
        for _ in range(4):  # capacities settle
            exchange(grads.draw())
        dist.barrier()
        before = counted()
        for _ in range(rounds):
            exchange(grads.draw())
        dist.barrier()
        both = [after - was for after, was in zip(counted(), before)]
        largest = torch.tensor(max(both))
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return float(largest) / rounds

    def dense(tensors: list[torch.Tensor]) -> None:
        dist.all_reduce(torch.cat([tensor.view(-1) for tensor in tensors]))

    def tell(title: str, law: float, counted_bytes: float) -> None:
        row = {"hosts": ranks, "method": title, "law": law, "counted": counted_bytes}
        if first:
            print(MARK + json.dumps({**row, "elements": grads.elements}), flush=True)

    tell("dense", volume("allreduce", 4.0 * grads.elements, ranks), moved(dense))
    for title, law in laws.items():
        exchange = CompressedExchange(job, methods[title], grads.layers, grads)
        for _ in range(warm_up_rounds(methods[title])):
            exchange.perform(grads.draw())
        tell(title, law, moved(exchange.perform))
    dist.destroy_process_group()


def on_hosts(count: int, only: list[str], timeout: float) -> list[dict[str, Any]]:
    """Run a rank on each of so many hosts; return the rows.

    Raises:
        JobError: a rank has failed.
        HostsError: there can be no hosts on this machine.
    """
    env = {"PYTHONPATH": os.environ.get("PYTHONPATH", ""), "GLOO_SOCKET_IFNAME": "eth0"}
    with Hosts(count) as hosts:
        output = hosts.horovodrun([*WORKER, *only], env=env, timeout=timeout, stream=True)
    lines = (line.partition(MARK) for line in output.splitlines())
    return [json.loads(row) for _, mark, row in lines if mark]


def table(rows: list[dict[str, Any]]) -> str:
    """Return the bytes by law and how many times as many were counted, by hosts; Markdown."""
    counts = sorted({row["hosts"] for row in rows})
    heads = " | ".join(f"{n} hosts, law | counted" for n in counts)
    lines = [f"| method | {heads} |", "| --- |" + " --: | --: |" * len(counts)]
    for title in dict.fromkeys(row["method"] for row in rows):
        cells = []
        for n in counts:
            selected = [r for r in rows if (r["hosts"], r["method"]) == (n, title)]
            if selected:
                (row,) = selected
                share = row["counted"] / row["law"]
                cells += [f"{row['law'] / 1e3:,.1f} kB", f"{share:.2f} times"]
            else:
                cells += ["", ""]
        lines.append(f"| `{title}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, nargs="+", default=HOSTS)
    parser.add_argument("--only", nargs="+", default=[], metavar="COMPRESSOR")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds of a job")
    parser.add_argument("--show", type=Path, metavar="JSON")
    parser.add_argument("--rank", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        rank(options.rank)
        return 0
    if options.show:
        print(table(json.loads(options.show.read_text())))
        return 0
    rows: list[dict[str, Any]] = []
    try:
        for count in options.hosts:
            rows += on_hosts(count, options.only, options.timeout)
            if options.json:
                options.json.write_text(json.dumps(rows, indent=1) + "\n")
    except (HostsError, JobError) as error:
        print(error, file=sys.stderr)
        return 2 if isinstance(error, HostsError) else 1
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
