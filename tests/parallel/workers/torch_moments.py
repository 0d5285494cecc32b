"""Per-sample moments in training: models with tables and tokens, layers apart, layers that thaw."""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.nn import functional

import hvd_gradcomp.torch as hvd
from tests.parallel.workers.results import digest, finish

COMPRESSOR = hvd.VarianceCompressor(alpha=0.5, zeta=0.9)
WORDS = 12


class Sentence(nn.Module):
    """A transformer in small: positions that no sample owns, words tied to the last layer."""

    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, 8), nn.Embedding(6, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.gamma = nn.Parameter(torch.ones(8))

    def forward(self, tokens):
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        return functional.linear(self.block(x) * self.gamma, self.words.weight)


class Experts(nn.Module):
    """One layer gets some rows, of whatever samples; another has random dropout inside."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, 8)
        self.memory = nn.LSTM(8, 8, num_layers=2, dropout=0.5, batch_first=True)
        self.last = nn.Linear(8, WORDS)

    def forward(self, tokens):
        return self.last(self.memory(self.words(tokens))[0])


def batches(count):
    generator = torch.Generator().manual_seed(100 + hvd.rank())
    return torch.randint(0, WORDS, (count, 8, 6), generator=generator)


def loss_of(model, tokens):
    return functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())


def made(kind, others="error"):
    torch.manual_seed(1)
    model = kind()
    tracker = hvd.track_moments(model, others=others)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.5),
        model.named_parameters(),
        compression=COMPRESSOR,
    )
    hvd.broadcast_parameters(model.state_dict(), 0)
    return model, tracker, optimizer


def train(model, optimizer, steps=20):
    for tokens in batches(steps):
        optimizer.zero_grad()
        loss_of(model, tokens).backward()
        optimizer.step()


def transformer():
    model, tracker, optimizer = made(Sentence)
    train(model, optimizer)
    stats = hvd.compression_stats(optimizer)
    assert 0 < stats.elements_sent < stats.elements
    rows = {line.split()[0]: line for line in hvd.describe(optimizer).splitlines()[2:]}
    assert "per sample: embedding, linear" in rows["words.weight"]
    assert "per sample: add" in rows["places.weight"]
    assert "per sample: linear" in rows["block.self_attn.in_proj_weight"]
    assert "per sample: mul" in rows["gamma"] and str(tracker).count("per sample") == len(rows) - 1
    tracker.remove()
    return model


def step():
    """What the compressor is given for these layers is the square of the gradient."""
    model, tracker, optimizer = made(Experts, "step")
    moments = {}
    bucket, slot = optimizer._gradcomp.planner.places[model.memory.weight_hh_l0]
    start = optimizer._gradcomp._launch

    def watched(bucket_):
        if bucket_ is bucket:
            moments["moment"] = bucket.moment_views[slot].clone()
            moments["gradient"] = bucket.views[slot].clone()
        start(bucket_)

    optimizer._gradcomp._launch = watched
    train(model, optimizer)
    assert moments["gradient"].any()
    assert torch.equal(moments["moment"], moments["gradient"] ** 2)
    assert "of the step: its dropout" in hvd.describe(optimizer)
    tracker.remove()
    return model


def dense():
    """These layers get the mean of the ranks, to rounding; the others are compressed."""
    model, tracker, optimizer = made(Experts, "dense")
    table = hvd.describe(optimizer).splitlines()
    assert ["None()" in line for line in table[2:-1]] == [False, *8 * [True], False, False]
    (tokens,) = batches(1)
    state = torch.get_rng_state()
    gradients = torch.autograd.grad(loss_of(model, tokens), model.memory.parameters())
    torch.set_rng_state(state)
    loss_of(model, tokens).backward()
    optimizer.synchronize()
    for p, gradient_here in zip(model.memory.parameters(), gradients):
        mean = torch.stack(hvd.allgather_object(gradient_here)).mean(0)
        assert torch.allclose(p.grad, mean, atol=1e-7)
    with optimizer.skip_synchronize():
        optimizer.step()
    train(model, optimizer)
    assert "none, sent dense: its dropout" in str(tracker)
    tracker.remove()
    return model


def thawed(kind, others):
    """A layer that is frozen when all is made joins as it thaws."""

    def train_frozen():
        def frozen():
            model = kind()
            for p in list(model.parameters())[1:-1]:
                p.requires_grad_(False)
            return model

        model, tracker, optimizer = made(frozen, others)
        train(model, optimizer, 3)
        for p in model.parameters():
            p.requires_grad_(True)
        train(model, optimizer, 5)
        table = hvd.describe(optimizer)
        assert "frozen" not in table
        assert table.count("None()") == (8 if others == "dense" else 0)
        tracker.remove()
        return model

    return train_frozen


def by_hand():
    """A gradient that did not come through backward has no moments: an error, not zeros."""
    model, tracker, optimizer = made(Sentence)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    try:
        optimizer.step()
    except RuntimeError as error:
        assert "has a gradient, but nothing was seen" in str(error), error
    else:
        raise AssertionError("no error")
    tracker.remove()
    return model


def main(folder: str) -> None:
    hvd.init()
    torch.set_num_threads(1)
    cases = {
        "transformer": transformer,
        "step": step,
        "dense": dense,
        "thawed": thawed(Sentence, "error"),
        "thawed, dense": thawed(Experts, "dense"),
        "by hand": by_hand,
    }
    result = {}
    for name, case in cases.items():
        print("case:", name, flush=True)  # the last one is what hangs, should one hang
        result[name] = digest(p.detach().numpy() for p in case().parameters())
    finish(hvd, folder, result)


if __name__ == "__main__":
    main(*sys.argv[1:])
