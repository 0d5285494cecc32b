"""CIFAR-10 with the VGG-like network of the variance paper (Tsuzuku et al. 2018, Table 3).

horovodrun --gloo -np 2 python -m examples.pytorch.cifar10 FOLDER

FOLDER holds the python version of the data set as its authors distribute it (`data_batch_1` to
`data_batch_5`, `test_batch`). The paper: 8 workers, batch 64 a worker, 300 epochs, Adam with its
defaults or momentum SGD, weight decay 0.0005, no augmentation.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

import torch
from rich.progress import track
from torch import nn

import hvd_gradcomp.torch as hvd
from examples import cifar10
from hvd_gradcomp.cli.options import chosen


def network() -> nn.Sequential:
    """Table 3: blocks of 3x3 convolutions with dropout between them, each block max-pooled."""
    layers: list[nn.Module] = []
    width = 3
    for out, count, rate in [
        (64, 2, 0.3),
        (128, 2, 0.4),
        (256, 3, 0.4),
        (512, 3, 0.4),
        (512, 3, 0.4),
    ]:
        for i in range(count):
            layers += [nn.Conv2d(width, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU()]
            if i < count - 1:
                layers.append(nn.Dropout(rate))
            width = out
        layers.append(nn.MaxPool2d(2))
    head = [nn.Flatten(), nn.Dropout(0.5), nn.Linear(512, 512), nn.BatchNorm1d(512), nn.ReLU()]
    return nn.Sequential(*layers, *head, nn.Dropout(0.5), nn.Linear(512, 10))


def accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    model.eval()
    with torch.no_grad():
        right = sum(
            (model(x).argmax(1) == y).sum().item()
            for x, y in zip(images.split(500), labels.split(500))
        )
    model.train()
    return 100 * right / len(labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--compression", default="VarianceCompressor(alpha=2)")
    parser.add_argument("--optimizer", choices=("adam", "momentum"), default="adam")
    parser.add_argument("--epochs", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=64, help="a rank")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    (method,) = chosen([options.compression])
    compressor = method.compressor

    hvd.init()
    device = torch.device("cuda", hvd.local_rank()) if torch.cuda.is_available() else "cpu"
    torch.manual_seed(options.seed)
    train_x, train_y, test_x, test_y = (
        torch.from_numpy(x).to(device) for x in cifar10.load(options.folder)
    )
    train_x, test_x = (x.permute(0, 3, 1, 2).contiguous() for x in (train_x, test_x))
    model = network().to(device)
    if compressor.uses_moments:
        hvd.track_moments(model)
    if options.optimizer == "adam":
        plain: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), weight_decay=5e-4)
    else:
        plain = torch.optim.SGD(model.parameters(), 0.05 * 8, momentum=0.9, weight_decay=5e-4)
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), compression=compressor)
    gamma = 1.0 if options.optimizer == "adam" else 0.5
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 25, gamma)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    batches = len(train_y) // (options.batch_size * hvd.size())
    for epoch in range(options.epochs):
        generator = torch.Generator().manual_seed(options.seed + epoch)  # the same on all ranks
        order = torch.randperm(len(train_y), generator=generator)
        indices = order[hvd.rank() :: hvd.size()][: batches * options.batch_size]
        pieces = indices.split(options.batch_size)
        for batch in track(pieces, f"epoch {epoch + 1}") if hvd.rank() == 0 else pieces:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(train_x[batch]), train_y[batch]).backward()
            optimizer.step()
        scheduler.step()
        if hvd.rank() == 0:
            stats = hvd.compression_stats(optimizer)
            print(
                f"epoch {epoch + 1}: accuracy {accuracy(model, test_x, test_y):.2f} %, one element "
                f"in {stats.element_ratio:.1f} sent, bytes / {stats.ratio:.1f}",
                flush=True,
            )
    hvd.shutdown()


if __name__ == "__main__":
    main()
