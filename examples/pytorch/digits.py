"""Handwritten digits on PyTorch.

horovodrun --gloo -np 2 python -m examples.pytorch.digits --method variance
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

import hvd_gradcomp.torch as hvd
from examples import digits
from hvd_gradcomp.cli.digits import network


def prepared(options: Any) -> tuple[list[torch.Tensor], nn.Module, Any]:
    """The data, channels first, the network and its distributed optimizer."""
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    train_x, train_y, test_x, test_y = (torch.from_numpy(x) for x in digits.load())
    train_x, test_x = train_x.permute(0, 3, 1, 2), test_x.permute(0, 3, 1, 2)
    model = network()
    compressor = digits.METHODS[options.method]
    if compressor.uses_moments:
        hvd.track_moments(model)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr=options.learning_rate),
        model.named_parameters(),
        compression=compressor,
        hierarchical=options.hierarchical,
    )
    return [train_x, train_y, test_x, test_y], model, optimizer


def main() -> None:
    options = digits.arguments(__doc__.splitlines()[0])
    hvd.init(process_sets=digits.process_sets(options))
    (train_x, train_y, test_x, test_y), model, optimizer = prepared(options)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    start = time.perf_counter()
    for epoch in range(options.epochs):
        for batch in digits.shard(
            len(train_y), options.batch_size, hvd.rank(), hvd.size(), options.seed + epoch
        ):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(train_x[batch]), train_y[batch]).backward()
            optimizer.step()
        if hvd.rank() == 0:
            digits.say(epoch, options.epochs)
    seconds = time.perf_counter() - start
    with torch.no_grad():
        accuracy = (model(test_x).argmax(1) == test_y).float().mean().item()
    stats = hvd.compression_stats(optimizer)
    if hvd.rank() == 0:
        digits.report(options, "PyTorch", accuracy, stats, seconds)
    hvd.shutdown()


if __name__ == "__main__":
    main()
