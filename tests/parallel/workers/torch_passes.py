"""Moments of micro-batches through `DistributedOptimizer`, beside those of single samples."""

from __future__ import annotations

import sys

import numpy as np
import torch

import hvd_gradcomp.torch as hvd
from tests.parallel.workers.passes import BATCH, PASSES, draws, loss_weights, share_of_truth
from tests.parallel.workers.results import finish


class Recording(hvd.VarianceCompressor):
    """Keeps the moments that it is handed."""

    def aggregate(self, ops, context, gradient, state, **extra):
        RECORDED.append(extra["moment"].numpy().copy())
        return super().aggregate(ops, context, gradient, state, **extra)


RECORDED: list = []


def share(passes, known):
    """The mean moment over all draws, as a share of the truth."""
    torch.manual_seed(1)
    inputs, outputs = loss_weights().shape
    model = torch.nn.Linear(inputs, outputs, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.from_numpy(loss_weights().T.copy()))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.0),
        model.named_parameters(),
        compression=Recording(moments="microbatch"),
        backward_passes_per_step=passes,
        batch_size=BATCH if known else None,
    )
    RECORDED.clear()
    for x, y in draws():
        optimizer.zero_grad()
        pieces = zip(*(torch.from_numpy(part).split(BATCH // passes) for part in (x, y)))
        for piece, target in pieces:
            ((model(piece) - target).square().sum(1).mean() / passes).backward()
        optimizer.step()
    size = inputs * outputs
    assert all((moment >= 0).all() for moment in RECORDED)
    return share_of_truth(np.stack([m[:size].reshape(outputs, inputs).T for m in RECORDED]))


def fewer():
    """Passes that do not use a layer contribute zeros to it; a step of one pass is one sample."""
    used, rare = (torch.nn.Parameter(torch.ones(4)) for _ in range(2))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([used, rare], lr=0.0),
        [("used", used), ("rare", rare)],
        compression=Recording(moments="microbatch"),
        backward_passes_per_step=4,
    )
    results = []
    for passes in (4, 1):
        RECORDED.clear()
        optimizer.zero_grad()
        for number in range(passes):
            loss = (used * (number + 1.0)).sum()
            (loss + (rare * 3.0).sum() if number == 0 else loss).backward()
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
        layouts = {name: b.layout for b in optimizer._gradcomp.buckets for name in b.layout.names}
        (moment,), layout = RECORDED, layouts["used"]
        starts = [layout.offsets[layout.names.index(name)] for name in ("used", "rare")]
        results.append([float(moment[start]) for start in starts])
    return results


def main(folder: str) -> None:
    hvd.init()
    result = {f"{p} {known}": share(p, known) for p in PASSES for known in (True, False)}
    finish(hvd, folder, {**result, "fewer": fewer()})


if __name__ == "__main__":
    main(*sys.argv[1:])
