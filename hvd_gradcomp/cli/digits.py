"""Training of handwritten digits by `DistributedDataParallel`, as the ranks of `demo` run it.

The data set, its split and the network are also those of the examples. scikit-learn and PyTorch
are imported when they are needed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from hvd_gradcomp import NoneCompressor
from hvd_gradcomp.planning.methods import ExchangeMethod

if TYPE_CHECKING:
    import numpy as np
    import torch

    from hvd_gradcomp.tuning.job import Job

BATCH_SIZE, RATE = 32, 1e-3  # images of a rank; of Adam


class Row(NamedTuple):
    """Result of one training.

    Attributes:
        method: its title.
        accuracy: of the test images, in percent.
        bytes: that a rank handed to collectives, a mean over steps.
        ratio: bytes of the gradients over those.
        ms: of a step on the slowest rank, a mean over steps; without the first epoch of several.
        steps: of the training.
    """

    method: str
    accuracy: float
    bytes: float
    ratio: float
    ms: float
    steps: int


def load() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return 1,257 images to train on and 540 to test, which ship inside scikit-learn.

    Returns:
        Images, float32 [n, 8, 8, 1] in [0, 1], and labels, int64; then the same to test.
    """
    import numpy as np
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    images = (images / 16.0).astype(np.float32).reshape(-1, 8, 8, 1)
    train_x, test_x, train_y, test_y = train_test_split(
        images, labels.astype(np.int64), test_size=0.3, random_state=0, stratify=labels
    )
    return train_x, train_y, test_x, test_y


def shard(size: int, batch_size: int, rank: int, world: int, seed: int) -> np.ndarray:
    """Return this rank's batches of one epoch, [batches, batch_size].

    All ranks cut the same shuffled order.
    """
    import numpy as np

    order = np.random.default_rng(seed).permutation(size)
    batches = size // (batch_size * world)
    return order[: batches * batch_size * world].reshape(batches, world, batch_size)[:, rank]


def network() -> torch.nn.Module:
    """Return a convolutional network of 62,250 parameters."""
    from torch import nn

    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(256, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def train(
    job: Job,
    title: str,
    method: ExchangeMethod,
    epochs: int,
    seed: int,
    after_epoch: Callable[[], None],
) -> Row:
    """Train with one method; all ranks call it.

    Args:
        job: the ranks.
        title, method: how they exchange; without a compressor and local steps, as
            `DistributedDataParallel` does by itself.
        epochs: how often each image is seen.
        seed: of the network and the order of images.
        after_epoch: called at the end of each.
    """
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    from hvd_gradcomp.torch import ddp

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    train_x, train_y, test_x, test_y = map(torch.from_numpy, load())
    train_x, test_x = train_x.view(-1, 1, 8, 8), test_x.view(-1, 1, 8, 8)
    model = DistributedDataParallel(network())
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=RATE)
    compressed: Any = None  # has the statistics
    if method.keyword == "local":
        optimizer = compressed = ddp.local_steps(
            model, optimizer, compression=method.compressor, **method.settings
        )
    elif method.compressor != NoneCompressor():
        compressed = ddp.compress(model, method.compressor)

    steps, warm = 0, 0
    job.barrier()
    start = time.perf_counter()
    for epoch in range(epochs):
        for batch in shard(len(train_y), BATCH_SIZE, job.rank(), job.size(), seed + epoch):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(train_x[batch]), train_y[batch]).backward()
            optimizer.step()
            steps += 1
        after_epoch()
        if epoch == 0 and epochs > 1:
            warm = steps
            start = time.perf_counter()
    seconds = job.slowest(time.perf_counter() - start)
    if method.keyword == "local":
        optimizer.exchange()  # of the steps since the last one, so that ranks end with one model
    with torch.no_grad():
        correct = model.module(test_x).argmax(1) == test_y
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    sent = size if compressed is None else compressed.stats().bytes_sent / steps
    accuracy = 100 * float(correct.float().mean())
    return Row(title, accuracy, sent, size / sent, 1e3 * seconds / (steps - warm), steps)
