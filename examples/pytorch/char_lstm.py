"""Character-level LSTM on text that every machine has: the source of the standard library.

horovodrun --gloo -np 2 python -m examples.pytorch.char_lstm --compression "StromCompressor(0.01)"

Variance and Hybrid take their second moments from micro-batches: --passes 4 cuts each batch into
four, which costs an LSTM less than the moments of single samples (`python -m benchmarks.moments`).
"""

from __future__ import annotations

import argparse
import logging
import math
import sysconfig
from pathlib import Path

import torch
from rich.progress import track
from torch import nn

import hvd_gradcomp.torch as hvd
from hvd_gradcomp.cli.options import chosen

ALPHABET = 128


def text(limit: int) -> torch.Tensor:
    """The first `limit` ASCII characters of the standard library's modules, in order of name."""
    folder = Path(sysconfig.get_path("stdlib"))
    pieces, length = [], 0
    for path in sorted(folder.glob("*.py")):
        data = bytes(b for b in path.read_bytes() if b < ALPHABET)
        pieces.append(data)
        length += len(data)
        if length >= limit:
            break
    return torch.frombuffer(bytearray(b"".join(pieces)[:limit]), dtype=torch.uint8).long()


class CharacterModel(nn.Module):
    """Embedding, LSTM, projection to the next character."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(ALPHABET, 32)
        self.lstm = nn.LSTM(32, width, batch_first=True)
        self.head = nn.Linear(width, ALPHABET)

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embedding(characters))[0])


def loss_of(model: nn.Module, windows: torch.Tensor) -> torch.Tensor:
    scores = model(windows[:, :-1])
    return nn.functional.cross_entropy(scores.flatten(0, 1), windows[:, 1:].flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compression", default="VarianceCompressor(alpha=2)")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=32, help="windows a rank and step")
    parser.add_argument("--passes", type=int, default=4, help="micro-batches a step")
    parser.add_argument("--window", type=int, default=64, help="characters")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--characters", type=int, default=2_000_000)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    (method,) = chosen([options.compression])
    compressor = method.compressor

    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    data = text(options.characters)
    train, test = data[: -len(data) // 10], data[-len(data) // 10 :]
    model = CharacterModel(options.width)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr=3e-3),
        model.named_parameters(),
        compression=compressor,
        backward_passes_per_step=options.passes,
        batch_size=options.batch_size,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    generator = torch.Generator().manual_seed(hvd.rank())
    steps = range(options.steps)
    for _ in track(steps, "char LSTM") if hvd.rank() == 0 else steps:
        starts = torch.randint(
            0, len(train) - options.window - 1, (options.batch_size,), generator=generator
        )
        windows = torch.stack([train[s : s + options.window + 1] for s in starts.tolist()])
        optimizer.zero_grad()
        for piece in windows.chunk(options.passes):
            (loss_of(model, piece) / options.passes).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    with torch.no_grad():
        held_out = test[: len(test) // 65 * 65][: 65 * 500].view(-1, 65)
        perplexity = math.exp(loss_of(model, held_out))
    stats = hvd.compression_stats(optimizer)
    if hvd.rank() == 0:
        print(
            f"{compressor!r}: perplexity {perplexity:.2f} a character, one element in "
            f"{stats.element_ratio:.1f} sent, bytes / {stats.ratio:.1f}"
        )
    hvd.shutdown()


if __name__ == "__main__":
    main()
