"""Handwritten digits on PyTorch, on ranks that come and go.

horovodrun --gloo --min-np 1 -np 2 --host-discovery-script ./discover.sh \
    python -m examples.pytorch.elastic --method variance

Kill a worker, or have the script print another host: training goes on from the last commit.
"""

from __future__ import annotations

import time

import torch
from torch import nn

import hvd_gradcomp.torch as hvd
from examples import digits
from examples.pytorch.digits import prepared


def main() -> None:
    options = digits.arguments(__doc__.splitlines()[0])
    hvd.init()
    (train_x, train_y, test_x, test_y), model, optimizer = prepared(options)
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, epoch=0)

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        while state.epoch < options.epochs:
            for batch in digits.shard(
                len(train_y), options.batch_size, hvd.rank(), hvd.size(), options.seed + state.epoch
            ):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(train_x[batch]), train_y[batch]).backward()
                optimizer.step()
            if hvd.rank() == 0:
                digits.say(state.epoch, options.epochs)
            state.epoch += 1
            state.commit()

    start = time.perf_counter()
    train(state)
    seconds = time.perf_counter() - start
    with torch.no_grad():
        accuracy = (model(test_x).argmax(1) == test_y).float().mean().item()
    stats = hvd.compression_stats(optimizer)
    if hvd.rank() == 0:
        digits.report(options, "PyTorch, elastic", accuracy, stats, seconds)
    hvd.shutdown()


if __name__ == "__main__":
    main()
