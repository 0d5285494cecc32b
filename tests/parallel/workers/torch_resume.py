"""Horovod's documented resume: rank 0 alone loads, and broadcasts what it has loaded."""

from __future__ import annotations

import io
import logging
import sys
import threading

import torch
from torch import nn

import hvd_gradcomp.torch as hvd
from hvd_gradcomp.method.handover import correction_of, residual_of
from tests.methods import (
    DGC,
    DROPPING,
    EGC_PLAIN,
    EVERY,
    ONE_OF_EACH_EXCHANGE,
    ONEBIT,
    QSGD,
    SCALECOM,
    SPARSE_GD,
    STROM,
    VARIANCE,
)
from tests.parallel.workers.results import digest, errors_of, finish

STEPS = 8
# Through each phase in a few steps; one is resumed in each of them.
SOON = {"alpha": 0.1, "full_steps": 4, "train_steps": 24, "ae_lr": 0.005}
LGC = hvd.LGCCompressor(momentum=0.9, **SOON)
LGC_SERVER = hvd.LGCCompressor("parameter_server", momentum=0.5, feedback="paper", **SOON)
GRADIVEQ = hvd.GradiVeQCompressor(ratio=4, warmup_steps=3, sample_steps=12, compress_steps=30)
GRADIVEQ_FED_BACK = hvd.GradiVeQCompressor(
    warmup_steps=3, sample_steps=12, compress_steps=30, sampling="qsgd", feedback=True
)
LEARNED = [LGC, LGC_SERVER, GRADIVEQ, GRADIVEQ_FED_BACK]
LEARNED_STOPS = (2, 14, 34)
# Whose residual is all that was not sent yet, and nothing is rounded away.
CONSERVING = [STROM, SPARSE_GD, DROPPING, EGC_PLAIN, SCALECOM, ONEBIT]


def build(compressor=None, seed=1, made=None, **options):
    torch.manual_seed(seed)
    convolutions = (nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Conv2d(6, 6, 3), nn.BatchNorm2d(6), nn.ReLU())
    model = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(96, 10))
    optimizer = (made or plain)(compressor, model.parameters())
    return model, hvd.DistributedOptimizer(
        optimizer,
        model.named_parameters(),
        compression=compressor,
        bucket_bytes=4096,
        **options,
    )


def plain(compressor, parameters):
    if compressor is None or correction_of(compressor) is None:
        return torch.optim.Adam(parameters, lr=0.01, weight_decay=0.01)
    momentum = correction_of(compressor)[0]
    return torch.optim.SGD(parameters, lr=0.001, momentum=momentum, weight_decay=0.01)


def train(model, optimizer, first, last):
    for step in range(first, last):
        generator = torch.Generator().manual_seed(1000 * step + hvd.rank())
        x = torch.randn(8, 1, 8, 8, generator=generator)
        y = torch.randint(0, 10, (8,), generator=generator)
        optimizer.zero_grad()
        (20 * nn.functional.cross_entropy(model(x), y)).backward()
        optimizer.step()


def saved(model, optimizer):
    """As `torch.save` leaves it in a file."""
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    return file.getvalue()


def load(data, model, optimizer):
    state, kept = torch.load(io.BytesIO(data))
    model.load_state_dict(state)
    optimizer.load_state_dict(kept)


def broadcast(model, optimizer, root=0):
    hvd.broadcast_parameters(model.state_dict(), root)
    hvd.broadcast_optimizer_state(optimizer, root)


def of_parameters(model):
    return digest(p.detach().numpy() for p in model.parameters())


def of_state(optimizer):
    """What has to be equal on all ranks: the optimizer's own state and options."""
    state = optimizer.state_dict()
    tensors = [(k, v) for s in state["state"].values() for k, v in sorted(s.items())]
    options = [sorted(group.items(), key=str) for group in state["param_groups"]]
    return digest([v for _, v in tensors]) + str([k for k, _ in tensors]) + str(options)


def resumed(compressor, stops, steps, root=0):
    """For each stop [without it, resumed], and the state right after the broadcast."""
    whole, data = build(compressor), {}
    for first, last in zip((0, *stops), (*stops, steps)):
        train(*whole, first, last)
        data[last] = saved(*whole)
    results = {}
    for stop in stops:
        model, optimizer = build(compressor, seed=2 + hvd.rank())
        if hvd.rank() == root:
            load(data[stop], model, optimizer)
        broadcast(model, optimizer, root)
        state = of_state(optimizer), optimizer._gradcomp.steps
        train(model, optimizer, stop, steps)
        hvd.verify(optimizer)
        stats = hvd.compression_stats(optimizer)
        assert stats.steps == steps and stats.element_ratio < 1e4
        results[f"{stop} {compressor!r}"] = [[of_parameters(whole[0]), of_parameters(model)], state]
    return results


class Watched(logging.Handler):
    """What is logged meanwhile."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())

    def __enter__(self):
        logging.getLogger("hvd_gradcomp").addHandler(self)
        return self.lines

    def __exit__(self, *_):
        logging.getLogger("hvd_gradcomp").removeHandler(self)


def kept(optimizer):
    """What this rank keeps back, and the sum over ranks."""
    pieces = []
    for bucket in optimizer._gradcomp.buckets:
        residual = residual_of(bucket.compressor, bucket.state)
        pieces += [] if residual is None else [x.reshape(-1).double() for x in bucket.cut(residual)]
    flat = torch.cat(pieces)
    return flat, hvd.allreduce(flat, op=hvd.Sum)


def conserved(compressor):
    """How far off the parameters are: a step of all gradients, less what is kept back in the end.

    Of what the ranks had kept back before, rank 0's part is left.
    """

    def line(seed):
        torch.manual_seed(seed)
        w = nn.Parameter(torch.randn(3072))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([w], lr=1.0), [("w", w)], compression=compressor
        )
        return w, optimizer

    def slide(w, optimizer, first, last):
        total = torch.zeros(3072, dtype=torch.float64)
        for step in range(first, last):
            slope = torch.randn(
                3072, generator=torch.Generator().manual_seed(step * 9 + hvd.rank())
            )
            optimizer.zero_grad()
            (w * slope).sum().backward()
            optimizer.step()
            total += slope
        return hvd.allreduce(total, op=hvd.Sum)

    w, optimizer = line(1)
    slide(w, optimizer, 0, 5)
    state = {k: v for k, v in torch.load(io.BytesIO(saved(nn.Module(), optimizer)))[1].items()}
    start = w.detach().clone()
    w, optimizer = line(2 + hvd.rank())
    if hvd.rank() == 0:
        optimizer.load_state_dict(state)
        w.data.copy_(start)
    hvd.broadcast_parameters([w], 0)
    hvd.broadcast_optimizer_state(optimizer, 0)
    before, whole = kept(optimizer)
    assert bool(before.any()) == (hvd.rank() == 0)
    total = slide(w, optimizer, 5, 10) + whole - kept(optimizer)[1]
    moved = (start - w.detach()).double() * hvd.size()
    assert total.norm() > 50
    return float((moved - total).norm() / total.norm())


# -- other ways to start and to resume -------------------------------------------------------------


def started():
    """Nobody has loaded anything: nothing is changed but the gradients, which are zeros."""
    model, optimizer = build(DGC, seed=hvd.rank())
    model[0].weight.requires_grad_(False)
    with Watched() as lines:
        broadcast(model, optimizer)
    parameters = of_parameters(model)
    assert model[0].weight.grad is None and not model[0].bias.grad.any()
    assert not optimizer.state and not lines
    torch.manual_seed(0)
    assert parameters == of_parameters(build(seed=0)[0])
    return parameters


def loaded_before():
    """Into the optimizer inside, before it is wrapped; a scheduler of that one goes on."""
    whole = build()
    train(*whole, 0, 3)
    data = saved(*whole)
    train(*whole, 3, 4)
    for group in whole[1].param_groups:
        group["lr"] *= 0.3
    train(*whole, 4, 6)
    schedulers = []

    def made(compressor, parameters):
        optimizer = plain(compressor, parameters)
        if hvd.rank() == 0:
            optimizer.load_state_dict(torch.load(io.BytesIO(data))[1])
        schedulers.append(torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.3))
        return optimizer

    model, optimizer = build(seed=hvd.rank(), made=made)
    if hvd.rank() == 0:
        model.load_state_dict(torch.load(io.BytesIO(data))[0])
    broadcast(model, optimizer)
    train(model, optimizer, 3, 4)
    schedulers[0].step()
    train(model, optimizer, 4, 6)
    return [of_parameters(whole[0]), of_parameters(model)]


def in_the_middle():
    """Where all ranks are at one step, what belongs to each stays there."""
    model, optimizer = build(STROM)
    train(model, optimizer, 0, 3)
    residual, _ = kept(optimizer)
    sent = hvd.compression_stats(optimizer).bytes_sent
    with Watched() as lines:
        broadcast(model, optimizer)
    assert residual.any() and torch.equal(residual, kept(optimizer)[0]) and not lines
    assert hvd.compression_stats(optimizer).bytes_sent == sent
    train(model, optimizer, 3, 4)
    return of_parameters(model)


def warned():
    """What is lost is said once, on one rank."""
    whole = build(STROM)
    train(*whole, 0, 3)
    model, optimizer = build(STROM)
    if hvd.rank() == 1:
        load(saved(*whole), model, optimizer)
    with Watched() as lines:
        broadcast(model, optimizer, 1)
    assert len(lines) == (hvd.rank() == 1), lines
    return "".join(hvd.allgather_object("".join(lines)))


def other_root():
    """Who trains LGC's autoencoder is not the rank that has loaded: it learns anew, on all."""
    ends = []
    with Watched() as lines:
        for (_, end), _ in resumed(LGC_SERVER, LEARNED_STOPS, 40, root=1).values():
            ends.append(end)
    warnings_ = [line for line in lines if "learns anew" in line]
    assert len(warnings_) == len(LEARNED_STOPS) * (hvd.rank() == 1), lines
    return ends


def back_to_the_start():
    """The root has made no step, the others have; LGC has seen the order of their layers."""
    model, optimizer = build(LGC)
    train(model, optimizer, 0, 3)
    fresh = build(LGC)
    if hvd.rank() == 0:
        model, optimizer = fresh
    optimizer._gradcomp.rename("gradcomp.again")
    broadcast(model, optimizer)
    train(model, optimizer, 0, 3)
    whole = build(LGC)
    train(*whole, 0, 3)
    return [of_parameters(whole[0]), of_parameters(model)]


def of_a_set(process_set, root):
    """Those outside take the optimizer's own state, and have no exchange."""
    model, optimizer = build(QSGD, process_set=process_set)
    if process_set.included():
        train(model, optimizer, 0, 3)
    again, its = build(QSGD, seed=hvd.rank(), process_set=process_set)
    if hvd.rank() == root:
        load(saved(model, optimizer), again, its)
    broadcast(again, its, root)
    first = of_parameters(again)
    if process_set.included():
        assert its._gradcomp.steps == 3
        train(again, its, 3, 5)
        model.load_state_dict(again.state_dict())
        hvd.broadcast_optimizer_state(its, root, process_set=process_set)
        hvd.broadcast_parameters(model.state_dict(), root, process_set=process_set)
        train(again, its, 5, 6)
    else:
        assert len(its.state) == len(list(again.parameters()))
    return first


class Odd(nn.Module):
    """Parameters and buffers of all kinds."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.halves = nn.Parameter(torch.randn(5, 3).bfloat16())
        self.filters = nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(6).double()
        self.scalar = nn.Parameter(torch.randn(()))
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer("flags", torch.rand(7) < 0.5)
        self.register_buffer("turned", torch.randn(3, 4).t())
        self.register_buffer("many", torch.randn(40_000, 500))  # more than one piece
        self.register_buffer("complex", torch.randn(2, dtype=torch.complex64))


def odd_parameters():
    """Whatever has a dtype, by name and without, of a model and of an optimizer's state."""
    ends = []
    for what in (lambda m: m.state_dict(), lambda m: list(m.state_dict().values())):
        model, same = Odd(hvd.rank()), Odd(0)
        hvd.broadcast_parameters(what(model), 0)
        for (name, x), y in zip(model.state_dict().items(), same.state_dict().values()):
            assert torch.equal(x, y) and x.stride() == y.stride(), name
        ends.append(digest(x.detach().view(torch.uint8) for x in [model.halves, model.many]))
    model.many = None
    optimizer = torch.optim.Adam(model.parameters())
    if hvd.rank() == 0:
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        optimizer.step()
        first = optimizer.state[model.halves]
        first["exp_avg_sq"] = first["exp_avg_sq"].float() + 1e-4  # more exact than its parameter
        optimizer.param_groups[0]["lr"] = torch.tensor(0.5)
    hvd.broadcast_optimizer_state(optimizer, 0)
    moment = optimizer.state[model.filters.weight]["exp_avg"]
    assert moment.is_contiguous(memory_format=torch.channels_last)
    assert optimizer.state[model.halves]["exp_avg_sq"].dtype == torch.float32
    tensors = [x for s in optimizer.state.values() for x in s.values()]
    ends.append(digest(x.contiguous().reshape(-1).view(torch.uint8) for x in tensors))
    return [*ends, float(optimizer.param_groups[0]["lr"])]


def mismatches():
    """On all ranks the same error, and the next call works."""

    def halfway():
        model, optimizer = build(STROM)
        train(model, optimizer, 0, 1)
        optimizer.set_backward_passes_per_step(2)  # after one nobody waits for the other ranks
        if hvd.rank() == 1:
            model(torch.ones(2, 1, 8, 8)).sum().backward()
        try:
            hvd.broadcast_optimizer_state(optimizer, 0)
        finally:
            if hvd.rank() == 0:
                model(torch.ones(2, 1, 8, 8)).sum().backward()
            optimizer.step()

    def forgotten():
        whole = build(STROM)
        train(*whole, 0, 3)
        model, optimizer = build(STROM)
        if hvd.rank() == 0:
            load(saved(*whole), model, optimizer)
        hvd.broadcast_parameters(model.state_dict(), 0)
        train(model, optimizer, 3, 4)

    def groups():
        model, _ = build()
        several = [{"params": [p]} for p in model.parameters()]
        if hvd.rank() == 1:
            several = [{"params": list(model.parameters())}]
        hvd.broadcast_optimizer_state(torch.optim.SGD(several, lr=0.1), 0)

    def locked():
        optimizer = torch.optim.SGD(build()[0].parameters(), lr=0.1)
        optimizer.param_groups[0]["schedule"] = threading.Lock()
        hvd.broadcast_optimizer_state(optimizer, 0)

    ones = {"a": torch.ones(3), "b": torch.ones(2)}
    shape = {"a": torch.ones(3), "b": torch.ones(2 + hvd.rank() % 2)}
    dtype = {**ones, "b": torch.ones(2, dtype=(torch.float32, torch.float64)[hvd.rank() % 2])}
    missing = dict([*ones.items()][: 2 - hvd.rank() % 2])
    wrong = STROM if hvd.rank() != 1 else VARIANCE
    return errors_of(
        {
            "halfway": halfway,
            "forgotten": forgotten,
            "groups": groups,
            "locked": locked,
            "compressor": lambda: hvd.broadcast_optimizer_state(build(wrong)[1], 0),
            "shape": lambda: hvd.broadcast_parameters(shape, 0),
            "dtype": lambda: hvd.broadcast_parameters(dtype, 0),
            "missing": lambda: hvd.broadcast_parameters(missing, 0),
            "no tensor": lambda: hvd.broadcast_parameters({"a": 3}, 0),
            "no root": lambda: hvd.broadcast_parameters(ones, 7),
        }
    )


def main(folder: str, ranks: str) -> None:
    """With 2 ranks all methods and cases, with others one method of each way to exchange."""
    number = int(ranks)
    subset = hvd.ProcessSet(range(1, number)) if number > 2 else None
    hvd.init(process_sets=[subset] if subset else None)
    torch.set_num_threads(1)
    methods = EVERY if number == 2 else ONE_OF_EACH_EXCHANGE
    settings = [(c, (STEPS // 2,), STEPS) for c in methods]
    if number == 2:
        settings += [(c, LEARNED_STOPS, 40) for c in LEARNED]
    else:
        settings += [(LGC, LEARNED_STOPS[2:], 36), (GRADIVEQ, LEARNED_STOPS[1:2], 18)]
    result = {"pairs": {}}
    for compressor, stops, steps in settings:
        print("case:", compressor, flush=True)  # the last one is what hangs, should one hang
        result["pairs"] |= resumed(compressor, stops, steps)
    if number > 1:
        result["conserved"] = {repr(c): conserved(c) for c in CONSERVING}
        cases = {
            "started": started,
            "loaded before": loaded_before,
            "in the middle": in_the_middle,
            "said": warned,
            "back to the start": back_to_the_start,
            "odd parameters": odd_parameters,
            "other root" if number == 2 else "process set": lambda: (
                other_root() if number == 2 else of_a_set(subset, 2)
            ),
        }
        result["cases"] = {}
        for name, case in cases.items():
            print("case:", name, flush=True)
            result["cases"][name] = case()
        result["errors"] = mismatches()
    finish(hvd, folder, result)


if __name__ == "__main__":
    main(*sys.argv[1:])
