"""What is done to `p.grad` between backward and step, held against plain PyTorch on the mean.

Each rank knows all ranks' batches. So it also trains a copy of the model by itself: with the mean
of what backward gives on every rank, treated in the same way, and a plain optimizer.
"""

from __future__ import annotations

import copy
import io
import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hvd_gradcomp.torch as hvd
from hvd_gradcomp.method.compressor import leaves
from hvd_gradcomp.method.handover import correction_of
from tests.methods import CHUNKED, EVERY, ONE_OF_EACH
from tests.parallel.workers.places import arrays, choose, here
from tests.parallel.workers.results import digest, errors_of, finish

STEPS = 4
LR = 0.1


class Towers(nn.Module):
    """Layers that a loss may use or not."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.trunk, self.left, self.right = nn.Linear(5, 6), nn.Linear(6, 3), nn.Linear(6, 3)
        self.unused = nn.Linear(2, 2)
        self.to(here())

    def forward(self, x, left=True, right=True):
        h = self.trunk(x).tanh()
        return left * self.left(h).square().sum() + right * self.right(h).square().sum()


class Trained(NamedTuple):
    """What a case does; each field takes the model first.

    Attributes:
        backward: (model, batch, rank, step): all backward passes of a step.
        between: (model, step): what is done to gradients then.
        options: of the distributed optimizer.
    """

    backward: Callable[..., None] = lambda model, x, rank, step: model(x).backward()
    between: Callable[..., Any] = lambda model, step: None
    options: Mapping[str, Any] = MappingProxyType({})


def batch(rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 5, generator=generator).to(here())


def clip(model, step=0):
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def mean_gradient(model, case, step, passes=1):
    """Sets the mean of all ranks' gradients."""
    total = [torch.zeros_like(p) for p in model.parameters()]
    for rank in range(hvd.size()):
        model.zero_grad()
        case.backward(model, batch(rank, step), rank, step)
        for t, p in zip(total, model.parameters()):
            t += 0 if p.grad is None else p.grad.to_dense()
    for t, p in zip(total, model.parameters()):
        p.grad = t / hvd.size()


def train(case, compression=None, steps=STEPS):
    """Largest difference to plain training, and whether gradients were reduced after backward."""
    model, plain = Towers(), Towers()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=LR),
        model.named_parameters(),
        compression=compression,
        **case.options,
    )
    reference = torch.optim.SGD(plain.parameters(), lr=LR)
    difference, same = 0.0, True
    for step in range(steps):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        case.backward(model, batch(hvd.rank(), step), hvd.rank(), step)
        seen = [torch.zeros(1) if p.grad is None else p.grad for p in model.parameters()]
        if case.backward is not none_on_one:  # the others would wait for it there
            digest_here = digest(arrays(seen))
            same = same and len(set(hvd.allgather_object(digest_here))) == 1
        case.between(model, step)
        optimizer.step()
        mean_gradient(plain, case, step)
        case.between(plain, step)
        reference.step()
        pairs = zip(model.parameters(), plain.parameters())
        difference = max(difference, *(float((a - b).detach().abs().max()) for a, b in pairs))
    return difference, same


def twice(model, x, rank, step, first=True):
    """Two backward passes that share no layer."""
    h = model.trunk(x).detach()
    parts = [model.left(h).square().sum(), model.right(h).square().sum()]
    for part in parts if first else reversed(parts):
        part.backward()
        users_collective(model, step)


def microbatches(count):
    def backward(model, x, rank, step):
        for piece in x.chunk(4)[:count]:
            model(piece).backward()

    return backward


def two_losses(model, x, rank, step):
    """As in PyTorch's tutorials: the trunk gets two contributions, each head one."""
    h = model.trunk(x).tanh()
    model.left(h).square().sum().backward(retain_graph=True)
    model.right(h).square().sum().backward()


def checkpointed(reentrant):
    def backward(model, x, rank, step):
        x = x.clone().requires_grad_()
        h = checkpoint(lambda x: model.trunk(x).tanh(), x, use_reentrant=reentrant)
        heads = checkpoint(lambda h: model.left(h) + model.right(h), h, use_reentrant=reentrant)
        heads.square().sum().backward()

    return backward


def beside(model, x, rank, step):
    """On a stream of its own, as with batches that are copied ahead; the same on a CPU."""
    if here().type == "cpu":
        model(x).backward()
        return
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        model(x).backward()
    torch.cuda.current_stream().wait_stream(stream)


def by_hand(model, x, rank, step):
    gradients = torch.autograd.grad(model(x), list(model.parameters()), allow_unused=True)
    for p, gradient in zip(model.parameters(), gradients):
        p.grad = gradient


def surgery(model, step):
    """Projects one layer's gradient on another's, and drops a third."""
    left, right = model.left.weight.grad, model.right.weight.grad
    model.left.weight.grad = left - (left * right).sum() / right.square().sum() * right
    model.trunk.bias.grad = None


def scaled(model, step):
    for p in model.parameters():
        if p.grad is not None:
            p.grad.mul_(0.25)


def unused_on_some(model, x, rank, step):
    h = model.trunk(x).tanh()
    loss = model.right(h).square().sum()
    if (step + rank) % 2:
        loss = loss + model.left(h).square().sum()
    loss.backward()


def none_on_one(model, x, rank, step):
    if rank != step % hvd.size():
        model(x).backward()


def users_collective(model, step):
    hvd.allreduce(torch.ones(3, device=here()), name="between backward and step")


CASES = {
    "nothing": Trained(),
    "clip by norm": Trained(between=clip),
    "clip by value": Trained(
        between=lambda model, step: nn.utils.clip_grad_value_(model.parameters(), 0.05)
    ),
    "scaled": Trained(between=scaled),
    "surgery": Trained(between=surgery),
    "small buckets": Trained(between=clip, options={"bucket_bytes": 64}),
    "passes": Trained(microbatches(4), clip, {"backward_passes_per_step": 4}),
    "too few passes": Trained(microbatches(2), options={"backward_passes_per_step": 4}),
    "unused on some ranks": Trained(unused_on_some, clip),
    "unused on some ranks, user's collective": Trained(unused_on_some, users_collective),
    "nothing on one rank": Trained(none_on_one),
    "several backwards": Trained(twice, clip),
    "several backwards, other order": Trained(
        lambda model, x, rank, step: twice(model, x, rank, step, (rank + step) % 2)
    ),
    "two losses": Trained(two_losses, clip, {"backward_passes_per_step": 2}),
    "checkpointed": Trained(checkpointed(False), clip),
    "checkpointed, reentrant": Trained(checkpointed(True), clip),
    "by hand": Trained(by_hand),
    "beside": Trained(beside, clip, {"bucket_bytes": 64}),
}


def with_scaler(synchronizes):
    """`unscale_`, then clipping, with a scale that changes; overflows left out."""
    model, plain = Towers(), Towers()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=LR), model.named_parameters()
    )
    reference = torch.optim.SGD(plain.parameters(), lr=LR)
    scaler = torch.amp.GradScaler(here().type, init_scale=2.0**10, growth_interval=2)
    for step in range(6):
        overflows = step == 3 and hvd.rank() == 0
        optimizer.zero_grad()
        loss = model(batch(hvd.rank(), step))
        scaler.scale(loss * (float("inf") if overflows else 1.0)).backward()
        if synchronizes:
            optimizer.synchronize()
        scaler.unscale_(optimizer)
        clip(model)
        scaler.step(optimizer)
        scaler.update()
        if step != 3:
            mean_gradient(plain, CASES["nothing"], step)
            clip(plain)
            reference.step()
    pairs = zip(model.parameters(), plain.parameters())
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


def gan():
    """As PyTorch's own example: the generator's loss reaches the discriminator too."""
    torch.manual_seed(1)
    models = nn.ModuleDict({"g": nn.Linear(5, 4), "d": nn.Linear(4, 1)}).to(here())
    plain = copy.deepcopy(models)

    def optimizers(models, wrap):
        made = {}
        for name, passes in (("g", 1), ("d", 2)):
            sgd = torch.optim.SGD(models[name].parameters(), lr=LR)
            made[name] = wrap(sgd, models[name], passes)
        return made

    def play(models, optimizers, reduce, x):
        g, d = models["g"], models["d"]
        d.zero_grad()
        d(x[:, :4]).square().sum().backward()
        d(g(x).detach()).sum().backward()
        reduce(d)
        clip(d)
        optimizers["d"].step()
        g.zero_grad()
        d.zero_grad()
        d(g(x)).square().sum().backward()
        reduce(g)
        clip(g)
        optimizers["g"].step()
        optimizers["d"].zero_grad()

    ours = optimizers(
        models,
        lambda sgd, model, passes: hvd.DistributedOptimizer(
            sgd, model.named_parameters(), backward_passes_per_step=passes
        ),
    )
    theirs = optimizers(plain, lambda sgd, model, passes: sgd)

    def mean(model):
        for p in model.parameters():
            p.grad.copy_(hvd.allreduce(p.grad, name="mean"))

    for step in range(STEPS):
        play(models, ours, lambda model: None, batch(hvd.rank(), step))
        play(plain, theirs, mean, batch(hvd.rank(), step))
    pairs = zip(models.parameters(), plain.parameters())
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


def sparse_on_some():
    """A table that only some ranks have looked up in."""
    torch.manual_seed(1)
    model = nn.ModuleDict({"table": nn.Embedding(20, 3, sparse=True), "head": nn.Linear(3, 2)})
    model.to(here())
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=LR), model.named_parameters(), sparse_as_dense=False
    )
    for step in range(STEPS):
        optimizer.zero_grad()
        x = torch.ones(2, 3, device=here())
        if (step + hvd.rank()) % 2:
            x = model["table"](torch.tensor([step, hvd.rank()], device=here()))
        model["head"](x).square().sum().backward()
        optimizer.step()
    return digest(arrays(model.parameters()))


def rows_or_all(compressor, batch_rows):
    """Bytes of each step of an embedding with sparse gradients, and where training ended."""
    torch.manual_seed(1)
    table = nn.Embedding(64, 32, sparse=True)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(table.parameters(), lr=LR), table.named_parameters(), compression=compressor
    )
    sent, before = [], 0
    for step in range(3):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(10 * step + hvd.rank())
        table(torch.randint(0, 64, (batch_rows,), generator=generator)).square().sum().backward()
        optimizer.step()
        now = hvd.compression_stats(optimizer).bytes_sent
        sent.append(now - before)
        before = now
    hvd.verify(optimizer)
    return sent


def sparse_here_dense_there():
    """A layer whose gradient is sparse on some ranks and dense on others, in changing roles."""
    ours, plain = torch.zeros(6, 3), torch.zeros(6, 3)
    ours, plain = (nn.Parameter(x.to(here())) for x in (ours, plain))
    head = [nn.Parameter(torch.ones(3, device=here())) for _ in range(2)]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([ours, head[0]], lr=LR), sparse_as_dense=False
    )
    theirs = torch.optim.SGD([plain, head[1]], lr=LR)

    def loss(table, last, step, rank):
        sparse = (step + rank) % 3 == 0
        rows = torch.tensor([step % 6, rank, 2], device=here())
        rows_ = nn.functional.embedding(rows, table, sparse=sparse)
        return (rows_ * last + rows[:, None]).square().sum()

    for step in range(6):
        optimizer.zero_grad()
        loss(ours, head[0], step, hvd.rank()).backward()
        optimizer.step()
        theirs.zero_grad()
        means = [
            torch.autograd.grad(loss(plain, head[1], step, rank), [plain, head[1]])
            for rank in range(hvd.size())
        ]
        for p, gradients in zip((plain, head[1]), zip(*means)):
            dense = [g.to_dense() if g.is_sparse else g for g in gradients]
            p.grad = torch.stack(dense).mean(0)
        theirs.step()
    pairs = zip((ours, head[0]), (plain, head[1]))
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


def kept(compressor):
    """Whether a reduced gradient that was kept is as it was after another step."""
    model = Towers()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=LR), model.named_parameters(), compressor
    )
    for step in range(4):
        model(batch(hvd.rank(), step)).backward()
        reduced = [p.grad for p in model.parameters() if p.grad is not None]
        parts = [gradient.detach()[:1] for gradient in reduced]  # as good as the whole
        before = [part.clone() for part in parts]
        optimizer.step()
        optimizer.zero_grad()
        if step % 2:
            reduced.clear()
        model(batch(hvd.rank(), 9)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if not all(torch.equal(a, b) for a, b in zip(parts, before)):
            return False
    return True


def swapped():
    """The trunk thaws as the heads freeze: no hook of before fires in that step."""
    model, plain = Towers(), Towers()

    def train_only(model, thawed):
        for name, p in model.named_parameters():
            p.requires_grad_(name.startswith("trunk") == thawed)

    train_only(model, False)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=LR), model.named_parameters()
    )
    reference = torch.optim.SGD(plain.parameters(), lr=LR)
    for step in range(STEPS):
        for one in (model, plain):
            train_only(one, step >= 2)
        optimizer.zero_grad()
        model(batch(hvd.rank(), step)).backward()
        clip(model)
        optimizer.step()
        gradients = [
            torch.autograd.grad(plain(batch(rank, step)), trained(plain), allow_unused=True)
            for rank in range(hvd.size())
        ]
        plain.zero_grad()
        for p, those in zip(trained(plain), zip(*gradients)):
            p.grad = None if those[0] is None else torch.stack(those).mean(0)
        clip(plain)
        reference.step()
    pairs = zip(model.parameters(), plain.parameters())
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


def trained(model):
    return [p for p in model.parameters() if p.requires_grad]


WAYS_TO_DROP = {
    "never": lambda model, optimizer: None,
    "zero_grad": lambda model, optimizer: optimizer.zero_grad(),
    "of the model": lambda model, optimizer: model.zero_grad(),
    "discard_step": lambda model, optimizer: optimizer.discard_step(),
    "synchronized": lambda model, optimizer: (optimizer.synchronize(), model.zero_grad()),
}


def dropped(compressor):
    """Reduced gradients that nobody wants leave no trace, whatever drops them."""
    ends = {}
    for how, drop in WAYS_TO_DROP.items():
        model = Towers()
        hvd.track_moments(model)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=LR),
            model.named_parameters(),
            compression=compressor,
        )
        for step in range(STEPS):
            if how != "never":
                (30 * model(batch(hvd.rank(), 50 + step))).backward()
                drop(model, optimizer)
            model(batch(hvd.rank(), step)).backward()
            optimizer.step()
            model.zero_grad()
        stats = hvd.compression_stats(optimizer)
        assert (stats.steps, stats.skipped) == (STEPS, STEPS * (how != "never"))
        kept = [x for bucket in optimizer._gradcomp.buckets for _, x in leaves(bucket.state)]
        ends[how] = digest(arrays([*model.parameters(), *kept]))
    return ends


def guarded(compressor, **options):
    """Steps that a guard of the norm leaves out, with one bad batch in 60; and the last loss."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.3),
        model.named_parameters(),
        compression=compressor,
        **options,
    )
    data = torch.randn(60, 32, 16, generator=torch.Generator().manual_seed(hvd.rank()))
    left_out = 0
    for step, x in enumerate(data):
        optimizer.zero_grad()
        loss = (model(x) - x).square().mean()
        (loss * (1e4 if step == 20 else 1)).backward()
        if torch.nn.utils.clip_grad_norm_(model.parameters(), 50.0) > 50.0:
            left_out += 1
            continue
        optimizer.step()
    return left_out, float(loss.detach())


def joins():
    """Ranks with less data than others, as Horovod has it: a rank that has joined adds zeros."""
    model, plain = Towers(), Towers()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=LR), model.named_parameters()
    )
    reference = torch.optim.SGD(plain.parameters(), lr=LR)
    steps = [3 + 2 * (rank == 0) for rank in range(hvd.size())]
    have = Trained(lambda model, x, rank, step: model(x).backward() if step < steps[rank] else None)
    for _ in range(2):  # epochs
        for step in range(steps[hvd.rank()]):
            optimizer.zero_grad()
            model(batch(hvd.rank(), step)).backward()
            clip(model)
            optimizer.step()
        hvd.join()
        hvd.broadcast_parameters(model.state_dict(), 0)
        for step in range(max(steps)):
            mean_gradient(plain, have, step)
            clip(plain)
            reference.step()
    pairs = zip(model.parameters(), plain.parameters())
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


class Both(NamedTuple):
    """Two optimizers over two models, stepped in turns; the second not in each step."""

    optimizers: list[Any]

    def step(self, models, rank, step):
        for turn, (model, optimizer) in enumerate(zip(models, self.optimizers)):
            if turn == 0 or step % 2 == 0:
                optimizer.zero_grad()
                model(batch(rank, step)).backward()
                clip(model)
                optimizer.step()


def joined_compressed(compressor):
    """Ranks with less data than others: nothing kept is lost, and all end with the same replica."""
    models = [Towers(), Towers()]
    for model in models:
        hvd.track_moments(model)
    both = Both(
        [
            hvd.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=LR, momentum=momentum),
                model.named_parameters(),
                compression=compressor,
                verify_every=2,
            )
            for model, momentum in zip(models, (0.0, 0.9 * (correction_of(compressor) is None)))
        ]
    )
    last = []
    for _ in range(2):  # epochs
        for step in range(2 + hvd.rank() + 2 * (hvd.rank() == 1)):
            both.step(models, hvd.rank(), step)
        last.append(hvd.join())
    for optimizer in both.optimizers:
        hvd.verify(optimizer)
    steps = [hvd.compression_stats(one).steps for one in both.optimizers]
    momenta = [s for o in both.optimizers for state in o.state.values() for s in state.values()]
    tensors = [x for x in momenta if isinstance(x, torch.Tensor)]
    return last, steps, digest(arrays([*models[0].parameters(), *models[1].parameters(), *tensors]))


def unused(optimizer_class, **options):
    """How far a layer moves that no rank uses any more, and whether it has a gradient."""
    model = Towers()
    optimizer = hvd.DistributedOptimizer(
        optimizer_class(model.parameters(), lr=LR, **options),
        model.named_parameters(),
        compression=hvd.StromCompressor(tau=0.01),
    )
    used_before = [p.detach().clone() for p in model.left.parameters()]
    before = [p.detach().clone() for p in model.unused.parameters()]
    for step in range(STEPS):
        optimizer.zero_grad()
        if hvd.rank() == 0 or step % 2:
            model(batch(hvd.rank(), step), right=False).backward()
        optimizer.synchronize()
        clip(model)
        with optimizer.skip_synchronize():
            optimizer.step()
        assert all(p.grad is None for p in model.unused.parameters())
    assert not any(torch.equal(p, q) for p, q in zip(model.left.parameters(), used_before))
    pairs = zip(model.unused.parameters(), before)
    return max(float((p - q).detach().abs().max()) for p, q in pairs)


def copied():
    """A copy of a model with its optimizer is one of the optimizer that was wrapped."""
    model = Towers()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9),
        model.named_parameters(),
        compression=hvd.DGCCompressor(density=0.2),
    )
    other, plain = copy.deepcopy((model, optimizer))
    for step in range(2):
        for one, steps in ((model, optimizer), (other, plain)):
            steps.zero_grad()
            one(batch(0, step)).backward()
            steps.step()
    saved = io.BytesIO()
    torch.save(optimizer, saved)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=False)
    hvd.verify(optimizer)
    kinds = [type(one) is torch.optim.SGD for one in (plain, loaded)]
    return kinds, [group["momentum"] for one in (plain, loaded) for group in one.param_groups]


def synchronized(how):
    """What several calls of `synchronize` make of a step: nothing else than one."""
    model = Towers()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9),
        model.named_parameters(),
        compression=hvd.DGCCompressor(density=0.2),
    )
    for step in range(STEPS):

        def closure(step=step):
            optimizer.zero_grad()
            loss = model(batch(hvd.rank(), step))
            loss.backward()
            for _ in range(how != "never"):
                optimizer.synchronize()
            return loss

        if how == "in a closure":
            optimizer.step(closure)
            continue
        closure()
        if how == "twice":
            optimizer.synchronize()
        if how == "dropped":
            optimizer.zero_grad()
            model(batch(hvd.rank(), step)).backward()
        optimizer.step()
    stats = hvd.compression_stats(optimizer)
    assert (stats.steps, stats.skipped) == (STEPS, STEPS * (how == "dropped"))
    return digest(p.detach().cpu().numpy() for p in model.parameters())


def by_hand_after_a_dropped_step():
    """`synchronize` of a step that is dropped says nothing of the next one."""
    model = Towers()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=LR), model.named_parameters()
    )
    model(batch(hvd.rank(), 0)).backward()
    optimizer.synchronize()
    optimizer.zero_grad()
    for p in model.parameters():
        p.grad = torch.full_like(p, float(hvd.rank()))
    optimizer.step()
    hvd.verify(optimizer)


def clipped(compressor):
    """The largest update in units of what clipping leaves of it; and where training ended."""
    model = Towers()
    tracker = hvd.track_moments(model) if compressor.uses_moments else None
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=LR), model.named_parameters(), compression=compressor
    )
    largest = 0.0
    for step in range(3):
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.zero_grad()
        unused_on_some(model, batch(hvd.rank(), step), hvd.rank(), step)
        clip(model)
        optimizer.step()
        moved = torch.cat([(b - p).flatten() for b, p in zip(before, model.parameters())])
        largest = max(largest, float(moved.detach().norm()) / (LR * 0.01))
    if tracker is not None:
        tracker.remove()
    return largest, digest(arrays(model.parameters()))


def refused():
    """What cannot be honoured is an error on all ranks, and the next step is sound."""
    results = {}

    def again(case, **options):
        def run():
            model = Towers()
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=LR), model.named_parameters(), **options
            )
            error = None
            try:
                case(model, optimizer)
            except Exception as raised:
                error = raised
            hvd.broadcast_parameters(model.state_dict(), 0)  # an error on some ranks only
            optimizer.zero_grad()
            for piece in batch(hvd.rank(), 9).chunk(options.get("backward_passes_per_step", 1)):
                model(piece).backward()
            optimizer.step()
            hvd.verify(optimizer)
            if error is not None:
                raise error

        return run

    def too_early(model, optimizer):
        microbatches(2)(model, batch(hvd.rank(), 0), hvd.rank(), 0)
        if hvd.rank() == 1:
            clip(model)
        optimizer.step()

    def in_time(model, optimizer):
        microbatches(2)(model, batch(hvd.rank(), 0), hvd.rank(), 0)
        optimizer.synchronize()
        clip(model)
        optimizer.step()

    def replaced(model, optimizer):
        microbatches(2)(model, batch(hvd.rank(), 0), hvd.rank(), 0)
        model.left.bias.grad = torch.ones(3, device=here())
        optimizer.step()

    def on_some_ranks(model, optimizer):
        if hvd.rank():
            model(batch(hvd.rank(), 0)).backward()
        clip(model)
        optimizer.step()

    def stepped_in_a_hook(model, optimizer):
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        model(batch(hvd.rank(), 0)).backward()

    def once_too_often(model, optimizer):
        for _ in range(2):
            model(batch(hvd.rank(), 0)).backward()

    def behind(model, optimizer):
        optimizer._gradcomp.steps += hvd.rank()
        try:
            model(batch(hvd.rank(), 0)).backward()
            optimizer.step()
        finally:
            optimizer._gradcomp.steps = 0

    def higher(model, optimizer):
        model(batch(hvd.rank(), 0)).backward(create_graph=True)

    results = errors_of(
        {
            "too early": again(too_early, backward_passes_per_step=4),
            "in time": again(in_time, backward_passes_per_step=4),
            "replaced": again(replaced, backward_passes_per_step=4),
            "on some ranks": again(on_some_ranks),
            "once too often": again(once_too_often),
            "out of step": again(behind),
        }
    )
    results |= errors_of(
        {
            "higher": lambda: higher(*_made()),
            "in a hook": lambda: stepped_in_a_hook(*_made()),
        }
    )
    return results


def _made():
    model = Towers()
    return model, hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=LR))


def main(folder: str, device: str = "cpu") -> None:
    hvd.init()
    choose(device)
    torch.set_num_threads(1)
    result = {"cases": {}, "clipped": {}}
    for name, case in CASES.items():
        print("case:", name, flush=True)  # the last one is what hangs, should one hang
        result["cases"][name] = train(case)
    for compressor in EVERY:
        print("clipped:", compressor, flush=True)
        result["clipped"][repr(compressor)] = clipped(compressor)
    print("scaler", flush=True)
    result["scaler"] = [with_scaler(synchronizes) for synchronizes in (False, True)]
    result["gan"] = gan()
    print("sparse", flush=True)
    result["sparse"] = sparse_on_some()
    print("sparse here, dense there", flush=True)
    result["both"] = sparse_here_dense_there()
    result["rows"] = [
        rows_or_all(hvd.NoneCompressor(), 4),
        rows_or_all(hvd.NoneCompressor(), 300),
        rows_or_all(hvd.QSGDCompressor(), 60),
    ]
    result["kept"] = {repr(one): kept(one) for one in [*EVERY, CHUNKED]}
    result["swapped"] = swapped()
    result["dropped"] = {repr(one): dropped(one) for one in [*ONE_OF_EACH, CHUNKED]}
    result["guarded"] = {
        "kept": guarded(hvd.SparseGDCompressor(density=0.01)),
        "not kept": guarded(hvd.SparseGDCompressor(density=0.01), rollback=False),
    }
    result["joined"] = joins()
    result["joined compressed"] = {
        repr(one): joined_compressed(one) for one in [*ONE_OF_EACH, CHUNKED]
    }
    result["unused"] = [
        unused(torch.optim.AdamW, weight_decay=0.1),
        unused(torch.optim.SGD, momentum=0.9, weight_decay=0.1),
    ]
    result["copied"] = copied()
    ways = ("never", "once", "twice", "in a closure", "dropped")
    result["synchronized"] = {how: synchronized(how) for how in ways}
    by_hand_after_a_dropped_step()
    if hvd.size() > 1:
        result["errors"] = refused()
    finish(hvd, folder, result)


if __name__ == "__main__":
    main(*sys.argv[1:])
