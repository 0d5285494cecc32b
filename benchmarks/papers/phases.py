"""Seconds of an exchange by phase, in the papers' networks between hosts; nothing is trained.

    make papers ARGS="--parts phases"   # as root, some minutes

Hosts are those of `benchmarks.rig`, as many as the paper's nodes, one rank each. Their links have
the rate at which an uncompressed exchange takes `Case.dense` seconds, as far as they alone decide.
Gradients are noise. What learns has learned nothing useful, which takes as long.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import nn

import hvd_gradcomp
from benchmarks.papers.recorded import Recorded
from benchmarks.rig import Hosts
from benchmarks.worth.timings import dense_bits
from examples.pytorch import learned
from hvd_gradcomp.tuning.measure import CompressedExchange, DenseExchange, Gradients
from hvd_gradcomp.tuning.models import Model, resnet, shapes
from hvd_gradcomp.tuning.over_horovod import HorovodJob

NAME = "phases"  # of the part
MARK = "PHASES "  # begins rank 0's line with a result
NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "ResNet-32, 100 classes": lambda: learned.resnet(32, 100),
    "ResNet-50": resnet,
}
DENSE_ROUNDS = 5
SAMPLES, CYCLE = 100, 500  # steps of GradiVeQ, as the paper has them


class Phase(NamedTuple):
    """Steps of an exchange that are alike.

    Attributes:
        title: in the table.
        first, last: steps, of which the last is not one of them.
    """

    title: str
    first: int
    last: int


@dataclass(frozen=True)
class Case:
    """Exchange that is timed by phase.

    Attributes:
        key: what it is called.
        title: what the page calls it.
        network: a key of `NETWORKS`.
        ranks: how many exchange, one a host.
        dense: seconds of an uncompressed exchange, from which the rate of the links follows.
        compressor: an expression of hvd_gradcomp's names.
        phases: in turn, without those steps in which one changes to the next.
    """

    key: str
    title: str
    network: str
    ranks: int
    dense: float
    compressor: str
    phases: tuple[Phase, ...]

    @property
    def settings(self) -> dict[str, Any]:
        """Return what the result depends on, for JSON."""
        fields = asdict(self)
        del fields["key"], fields["title"], fields["phases"]
        return {**fields, "steps": self.steps}

    @property
    def steps(self) -> int:
        return self.phases[-1].last


DENSE = "dense"
SAMPLED, BASES = "sampling, QSGD", f"making the bases, once in {CYCLE} steps"
COMPRESSED, FULL, TOP_K = "compressed", "full", "top-k"
LGC_STEPS = "full_steps=3, train_steps=7, momentum=0"
LGC_PHASES = (Phase(FULL, 1, 3), Phase(TOP_K, 5, 10), Phase(COMPRESSED, 12, 20))
CASES = (
    Case(
        "gradiveq",
        "GradiVeQ at 8, QSGD while sampling",
        "ResNet-32, 100 classes",
        6,
        1.7,
        f'GradiVeQCompressor(ratio=8, warmup_steps=0, sample_steps={SAMPLES}, sampling="qsgd")',
        (
            Phase(SAMPLED, 1, SAMPLES - 1),
            Phase(BASES, SAMPLES - 1, SAMPLES),
            Phase(COMPRESSED, SAMPLES, SAMPLES + 20),
        ),
    ),
    Case(
        "qsgd",
        "QSGD, 4 bits",
        "ResNet-32, 100 classes",
        6,
        1.7,
        "QSGDCompressor(bits=4)",
        (Phase(COMPRESSED, 1, 20),),
    ),
    *(
        Case(
            f"lgc-{name}",
            f"LGC, {title}",
            "ResNet-50",
            8,
            6.0,
            f'LGCCompressor("{pattern}", {LGC_STEPS})',
            LGC_PHASES,
        )
        for name, title, pattern in (
            ("ring", "ring", "ring_allreduce"),
            ("server", "parameter server", "parameter_server"),
        )
    ),
)


class Phases(Recorded):
    """Times in a file, which is written after each case."""

    name, cases = NAME, CASES

    def seconds(self, key: str) -> dict[str, float]:
        """Return the median of each phase, and of uncompressed exchanges; empty if not timed."""
        row, case = self[key], next(case for case in CASES if case.key == key)
        if row is None:
            return {}
        medians = {p.title: statistics.median(row["steps"][p.first : p.last]) for p in case.phases}
        return {DENSE: statistics.median(row["dense"]), **medians}


def parameters(case: Case) -> list[tuple[str, tuple[int, ...]]]:
    """Return the names and shapes of a case's parameters."""
    with torch.device("meta"):
        return shapes(NETWORKS[case.network]())


def rate(case: Case) -> str:
    """Return the rate of the links, as tc writes it."""
    elements = sum(prod(shape) for _, shape in parameters(case))
    return f"{dense_bits(elements, case.ranks) / case.dense / 1e3:.0f}kbit"


def measure(case: Case) -> dict[str, Any]:
    """Time a case between hosts.

    Raises:
        HostsError: there can be no hosts here.
        JobError: the ranks have failed.
    """
    command = ["python", "-m", "benchmarks.papers.phases", case.key]
    env = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    with Hosts(case.ranks, rate(case)) as hosts:
        output = hosts.horovodrun(command, env=env, timeout=1800.0)
        line = next(line for line in output.splitlines() if MARK in line)
        return {"rate": hosts.rate, **json.loads(line.partition(MARK)[2])}


def work(case: Case) -> None:
    """Exchange as a rank of Horovod's; rank 0 prints the seconds of each step."""
    job = HorovodJob()
    torch.set_num_threads(1)
    with torch.device("meta"):
        model = Model(case.network, NETWORKS[case.network](), None, False)
    gradients = Gradients(job, model)
    compressor = eval(case.compressor, vars(hvd_gradcomp))
    exchange = CompressedExchange(job, compressor, gradients.layers, learned=False)
    dense = DenseExchange(job)
    result = {
        "dense": [dense.run(gradients.draw()).total for _ in range(1 + DENSE_ROUNDS)][1:],
        "steps": [exchange.run(gradients.draw()).total for _ in range(case.steps)],
    }
    if job.rank() == 0:
        print(MARK + json.dumps(result), flush=True)
    job.close()


if __name__ == "__main__":
    work(next(case for case in CASES if case.key == sys.argv[1]))
