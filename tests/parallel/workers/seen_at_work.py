"""Line at the beginning of an exchange, and counts, as a user sees them: one rank of four."""

from __future__ import annotations

import contextlib
import functools
import io

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from hvd_gradcomp import Int8Compressor, QSGDCompressor, QuadraticRule
from hvd_gradcomp.torch import ddp, fsdp
from tests.parallel.workers import ddp_training
from tests.parallel.workers.ddp_training import Normed, ddp_model
from tests.parallel.workers.fsdp_training import Transformer, mesh_of
from tests.parallel.workers.fsdp_training import loss as sharded_loss
from tests.parallel.workers.perceptron import Model, loss

EVERY, ROUNDS = 4, 2
LAYERS = sum(p.numel() for p in Model().parameters())
INT8 = Int8Compressor(exchange="two_shot")


def adam(model):
    return torch.optim.AdamW(model.parameters(), 0.01)


def train(model, optimizer, steps, loss=loss):
    for step in range(steps):
        optimizer.zero_grad()
        (
            loss(model, step) if loss is sharded_loss else loss(model, step, dist.get_rank())
        ).backward()
        optimizer.step()


def sharded(mesh):
    torch.manual_seed(1)
    model = Transformer()
    for p in model.unused.parameters():
        p.requires_grad_(False)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["in"])
    return fully_shard(model, mesh=mesh["in"])


def plain_model():
    torch.manual_seed(1)
    model = Model()
    model.unused.requires_grad_(False)
    return model


def begun(run):
    """Return the lines of all ranks."""
    with contextlib.redirect_stderr(io.StringIO()) as stream:
        run()
    lines = [line for line in stream.getvalue().splitlines() if line.startswith("hvd_gradcomp: ")]
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, lines)
    return every


def announced():
    """On the first rank, once, however many exchanges there are."""
    mesh = mesh_of()
    inside = mesh["in"].get_group()

    def compressed(**how):
        model = ddp_model()
        ddp.compress(model, QSGDCompressor(), **how)
        train(model, adam(model), 3)

    def wrapped(make, **how):
        model = plain_model()
        train(model, make(adam(model), model.named_parameters(), **how), 5)

    def of_ddp(group=None, **how):
        model = ddp_model(process_group=group)
        train(model, ddp.local_steps(model, adam(model), **how), 5)

    def of_shards(make, *what, **how):
        model = sharded(mesh)
        train(model, make(model, adam(model), *what, mesh=mesh, **how), 5, sharded_loss)

    def compressed_shards():
        model = sharded(mesh)
        fsdp.compress(model, INT8, mesh=mesh)
        train(model, adam(model), 3, sharded_loss)

    streamed = {"every": EVERY, "compression": INT8, "fragments": 2, "delay": 1}
    rule = {"every": QuadraticRule(0.02, 2), "warmup_steps": 2, "compression": None}
    cases = {
        compressed: ", with QSGDCompressor(); about ",
        lambda: wrapped(ddp.LocalSteps, **streamed): "every 4 local steps; about ",
        lambda: of_ddp(**rule): "uncompressed, in local steps with every=QuadraticRule(",
        lambda: of_ddp(
            inside, **streamed
        ): "elements between hosts (and 1 tensor, 3 elements, dense), with Int8",
        lambda: wrapped(ddp.MomentumExchange, compression=INT8, warmup_steps=2): "after 2 dense",
        compressed_shards: "elements of this rank's shards",
        lambda: of_shards(fsdp.local_steps, **streamed): "every 4 local steps; about ",
        lambda: of_shards(fsdp.MomentumExchange, INT8, 2): "after 2 dense steps; about ",
    }
    seen = {text: begun(run) for run, text in cases.items()}
    for text, (lines, *others) in seen.items():
        assert len(lines) == 1 and text in lines[0], (text, lines)
        assert not any(others), (text, others)
    assert not any(
        begun(lambda: wrapped(ddp.LocalSteps, every=1, compression=None))
    )  # as dense as without it


def reduced(run):
    """Return how many elements this process has handed to allreduces, whoever has asked for it."""
    with torch.profiler.profile(record_shapes=True) as profile:
        run()
    shapes = [e.input_shapes for e in profile.events() if e.name == "gloo:all_reduce"]
    return sum(torch.Size(shape).numel() for each in shapes for shape in each)


def counted():
    """Statistics count the bytes of their own optimizer, and of nothing else at the same time."""
    mesh = mesh_of()
    inside = mesh["in"].get_group()
    steps = EVERY * ROUNDS

    def check(optimizer, sent, ratio=EVERY):
        stats = optimizer.stats()
        assert stats.bytes_sent == 4 * sent, (stats.bytes_sent, 4 * sent)
        assert stats.steps == steps
        assert stats.ratio == ratio or not sent, (stats.ratio, ratio)

    # The reduction of DistributedDataParallel is switched off: nothing travels but the rounds.
    for make in (
        lambda m: ddp.local_steps(m, adam(m), EVERY, compression=None),
        lambda m: ddp.LocalSteps(adam(m), m.named_parameters(), EVERY, compression=None),
    ):
        model = ddp_model()
        optimizer = make(model)
        travelled = reduced(functools.partial(train, model, optimizer, steps))
        check(optimizer, travelled)
        assert travelled >= ROUNDS * (LAYERS - 6)  # but for what is not used
    # Inside a host it stays on, and its traffic, which is no traffic between hosts, is left out.
    model = ddp_model(process_group=inside)
    optimizer = ddp.local_steps(model, adam(model), EVERY, compression=None, bucket_bytes=2500)
    trained = sum(p.numel() for p in model.parameters())
    travelled = reduced(lambda: train(model, optimizer, steps))
    assert travelled > steps * (trained - 6)
    check(optimizer, optimizer.stats().bytes_sent // 4)
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, optimizer.stats().bytes_sent)
    of_host = [every[rank] for rank in dist.get_process_group_ranks(inside)]
    assert sum(of_host) in (4 * ROUNDS * trained, 4 * ROUNDS * (trained - 6)), (of_host, trained)
    # So are the user's own collectives, and what other optimizers and models of the process send.
    for make, loss_of in ((ddp_model, loss), (lambda: sharded(mesh), sharded_loss)):
        counts = []
        for among in (False, True):
            model = make()
            if loss_of is loss:
                optimizer = ddp.local_steps(model, adam(model), EVERY, compression=None)
            else:
                how = {"mesh": mesh, "every": EVERY, "compression": None}
                optimizer = fsdp.local_steps(model, adam(model), **how)
            run = functools.partial(train, model, optimizer, steps, loss_of)
            if among:
                among_others(run, steps)
            elif loss_of is loss:
                check(optimizer, reduced(run))
            else:  # inside of a host gloo reduces by allreduces, too
                run()
                shards = [p.to_local() for p in model.parameters() if p.requires_grad]
                check(optimizer, ROUNDS * sum(shard.numel() for shard in shards))
            counts.append(optimizer.stats())
        assert counts[0] == counts[1]


def among_others(run, steps):
    """Train while a second model has local steps, a third one DDP, and the user evaluates."""
    second, third = plain_model(), DistributedDataParallel(Normed())
    optimizer = ddp.LocalSteps(adam(second), second.named_parameters(), 2, compression=None)
    run()
    train(second, optimizer, steps)
    third(torch.randn(4, 12)).sum().backward()
    dist.all_reduce(torch.ones(5000))
    assert optimizer.stats().ratio == 2 and optimizer.stats().steps == steps


def main():
    ddp_training.main(globals())


if __name__ == "__main__":
    main()
