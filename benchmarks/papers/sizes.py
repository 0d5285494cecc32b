"""Bytes of a step in the networks that the papers trained; they need no training.

    make papers ARGS="--parts bytes"   # less than a minute

Shapes, ranks and settings are the papers'; steps are exchanged in one process on tensors without
data, see `counting`. EGC and Variance, whose gradients decide how much they send, send as many
elements as their papers print. Momentum is 0: a velocity takes memory, and no bytes.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

import torch
from torch import nn

import hvd_gradcomp
from benchmarks.papers import models
from benchmarks.papers.counting import count
from benchmarks.papers.recorded import Recorded
from hvd_gradcomp.tuning.models import resnet, shapes

NAME = "bytes"  # of the part
NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "ResNet-50": resnet,
    "ResNet-101, 10 classes": lambda: resnet((3, 4, 23, 3), 10),
    "ResNet-50, 10 classes": lambda: resnet(classes=10),
    "the paper's VGG": models.vgg_of_the_paper,
}
TEACHING = "full_steps=1, train_steps=2, momentum=0"
LEARNING = 3  # steps of LGC before codes travel


@dataclass(frozen=True)
class Case:
    """A step to count.

    Attributes:
        key: what it is called.
        title: what the page calls it.
        network: a key of `NETWORKS`.
        ranks: how many exchange.
        compressor: an expression of hvd_gradcomp's names.
        ratio: elements for one that is sent; 0 where the method decides.
    """

    key: str
    title: str
    network: str
    ranks: int
    compressor: str
    ratio: float = 0.0

    @property
    def settings(self) -> dict[str, Any]:
        """Return what the result depends on, for JSON."""
        return {name: value for name, value in asdict(self).items() if name not in ("key", "title")}


def lgc(pattern: str, options: str = "") -> str:
    return f'LGCCompressor("{pattern}", {options}{TEACHING})'


RING, SERVER = "ring_allreduce", "parameter_server"
FORM = 'signs=False, scale="model", first_layer=(), '
SCALECOM, DGC = "ScaleComCompressor(density={})", "DGCCompressor(density=0.001, momentum=0)"
VARIANCE = "VarianceCompressor(alpha=2, capacity='{}')"
FIFTY, HUNDRED = "ResNet-50", "ResNet-101, 10 classes"
CASES = (
    Case("ring-2", "LGC, ring", FIFTY, 2, lgc(RING)),
    Case("form-2", "LGC, ring, the paper's form", FIFTY, 2, lgc(RING, FORM)),
    Case("server-2", "LGC, parameter server", FIFTY, 2, lgc(SERVER)),
    Case("dgc-2", "DGC", FIFTY, 2, DGC),
    Case("ring-4", "LGC, ring", HUNDRED, 4, lgc(RING)),
    Case("form-4", "LGC, ring, the paper's form", HUNDRED, 4, lgc(RING, FORM)),
    Case("server-4", "LGC, parameter server", HUNDRED, 4, lgc(SERVER)),
    Case("scalecom-4", "ScaleCom, 0.1 %", HUNDRED, 4, SCALECOM.format(0.001)),
    Case("dgc-4", "DGC", HUNDRED, 4, DGC),
    Case("ring-8", "LGC, ring", FIFTY, 8, lgc(RING)),
    Case("ring-8-percent", "LGC, ring, 1 % selected", FIFTY, 8, lgc(RING, "alpha=0.01, ")),
    Case("server-8", "LGC, parameter server", FIFTY, 8, lgc(SERVER)),
    Case("server-8-percent", "LGC, server, 1 % selected", FIFTY, 8, lgc(SERVER, "alpha=0.01, ")),
    Case("scalecom-8", "ScaleCom, 0.1 %", FIFTY, 8, SCALECOM.format(0.001)),
    Case("scalecom-8-percent", "ScaleCom, 1 %", FIFTY, 8, SCALECOM.format(0.01)),
    Case("dgc-8", "DGC", FIFTY, 8, DGC),
    Case("egc-4", "EGC, K = 1024", "ResNet-50, 10 classes", 4, "EGCCompressor(momentum=0)", 1052),
    *(
        Case(f"variance-{name}-{policy}", f"Variance, {of}, capacity `{policy}`", network, 2,
             VARIANCE.format(policy), ratio)
        for name, of, network, ratio in (
            ("cifar-sgd", "momentum SGD", "the paper's VGG", 383.6),
            ("cifar-adam", "Adam", "the paper's VGG", 913.4),
            ("imagenet-sgd", "momentum SGD", FIFTY, 990.7),
        )
        for policy in ("largest", "latest")
    ),
)  # fmt: skip


class Sizes(Recorded):
    """Counts in a file, which is written after each case."""

    name, cases = NAME, CASES

    def of_workers(self, key: str) -> tuple[float, ...]:
        """Return by how much a rank sends less than dense gradients; empty if it was not counted.

        With a server two numbers: of the worker that sends a code, and of the others, without the
        server's answer. Else one, of the mean over ranks.
        """
        row = self[key]
        if row is None:
            return ()
        sent = row["steps"][-1]
        if ANSWER not in row["pieces"]:
            return (dense(row) / statistics.fmean(sent),)
        return dense(row) / sent[1], dense(row) / (sent[0] - row["pieces"][ANSWER][0])


ANSWER = "the server's answer"


def dense(row: dict[str, Any]) -> float:
    """Return the bytes of dense gradients."""
    return 4.0 * row["parameters"]


def measure(case: Case) -> dict[str, Any]:
    """Count a case; of LGC all steps, in which phases follow each other, else one."""
    compressor = eval(case.compressor, vars(hvd_gradcomp))
    with torch.device("meta"):
        names = shapes(NETWORKS[case.network]())
    steps = 1 + LEARNING * ("LGC" in case.compressor)
    density = 1 / case.ratio if case.ratio else 0.0
    counted = count(compressor, names, case.ranks, steps, density)
    return {
        "parameters": sum(prod(shape) for _, shape in names),
        "vectors": sum(prod(shape) for _, shape in names if len(shape) == 1),
        "steps": counted.steps,
        "pieces": counted.pieces,
    }
