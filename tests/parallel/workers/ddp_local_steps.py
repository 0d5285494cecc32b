"""`ddp.local_steps`: a `DistributedDataParallel` whose ranks, or hosts, train alone; no Horovod."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from hvd_gradcomp import (
    ChunkedTopKCompressor,
    Int8Compressor,
    NoneCompressor,
    OuterSGD,
    QSGDCompressor,
    SparseGDCompressor,
)
from hvd_gradcomp.checkpoint.schema import CheckpointError
from hvd_gradcomp.ops import NonFiniteGradientError
from hvd_gradcomp.runtime.config_check import MismatchError
from hvd_gradcomp.runtime.errors import OutOfStepError
from hvd_gradcomp.torch import ddp
from hvd_gradcomp.torch.local.fragment import digest
from tests.methods import (
    BALANCED,
    GRADIVEQ,
    LGC,
    LGC_SERVER,
    ONE_OF_EACH,
    ONE_OF_TODAY,
    PRODUCTS,
    ROBUST,
    TODAY,
)
from tests.parallel.workers import ddp_training
from tests.parallel.workers.ddp_training import (
    OPTIONS_OF_DDP,
    Normed,
    alike,
    ddp_model,
    raises,
    reductions,
    sgd,
    train,
)
from tests.parallel.workers.perceptron import Model, vector

SPARSE = SparseGDCompressor(density=0.1)
SCHEDULES = (
    {"every": 3},
    {"every": 4, "fragments": 2, "delay": 1},
    {"every": 3, "warmup_steps": 2, "outer": OuterSGD(0.7, 0.9)},
)


def batch(step):
    """Return this rank's samples of a step."""
    seed = 100 * step + dist.get_rank()
    return torch.randn(8, 12, generator=torch.Generator().manual_seed(seed))


def backward(model, step):
    model(batch(step)).square().mean().backward()


def steps_of(model, optimizer, steps, first=0, passes=1):
    """Train; of several passes all but the last are under `no_sync`."""
    for step in range(first, first + steps):
        optimizer.zero_grad()
        for extra in range(1, passes):
            if isinstance(model, DistributedDataParallel):
                with model.no_sync():
                    backward(model, step + 50 * extra)
            else:
                backward(model, step + 50 * extra)
        backward(model, step)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()


def adam(model):
    return torch.optim.AdamW(model.parameters(), 0.01)


def as_a_plain_module():
    """Equal to `LocalSteps` of a plain module, to the bit, with every option of DDP."""
    for how, compression in zip(SCHEDULES, (NoneCompressor(), SPARSE, NoneCompressor())):

        def by_plain(passes, how=how, compression=compression):
            model = Normed()
            more = {"named_buffers": model.named_buffers(), "compression": compression}
            local = ddp.LocalSteps(adam(model), model.named_parameters(), **how, **more)
            return trained(model, local, passes)

        rights = {passes: by_plain(passes) for passes in (1, 2)}
        for of_ddp in OPTIONS_OF_DDP:
            model = Normed()
            if dist.get_rank():  # only the first rank's count
                with torch.no_grad():
                    model.layers[0].weight.add_(1.0)
            model = DistributedDataParallel(model, **of_ddp)
            more = {"average_buffers": True, "compression": compression}
            optimizer = ddp.local_steps(model, adam(model), **how, **more)
            assert not reductions(lambda m=model: backward(m, 99))
            model.module.load_state_dict(Normed().state_dict())  # what forward does to buffers
            passes = 1 if "static_graph" in of_ddp else 2  # which goes without `no_sync`
            right, ends, stats = rights[passes]
            names = list(right.state_dict())
            assert list(model.state_dict()) == [f"module.{name}" for name in names]
            assert [*trained(model, optimizer, passes)[1:]] == [ends, stats], (how, of_ddp)
            for x, y in zip(right.state_dict().values(), model.state_dict().values()):
                assert torch.equal(x, y), (how, of_ddp)
            alike(vector(model))


def trained(model, optimizer, passes):
    """Return the model, digests of its parameters within rounds, and the traffic."""
    ends = []
    for steps, first in ((7, 0), (5, 7)):
        steps_of(model, optimizer, steps, first, passes)
        ends.append(digest([vector(model)]))
    optimizer.exchange()
    return model, ends, ddp.compression_stats(optimizer)


def takes_no_samples(compression):
    return getattr(compression, "moments", "step") in ("step", "auto")


def every_method():
    """Replicas are equal after each round, and differ between."""
    methods = [*ONE_OF_EACH, *ONE_OF_TODAY, *PRODUCTS, *ROBUST, *BALANCED[::2]]
    methods += [GRADIVEQ, LGC, LGC_SERVER]
    for compression in filter(takes_no_samples, methods):
        model = ddp_model()
        start = vector(model)
        optimizer = ddp.local_steps(model, adam(model), 2, OuterSGD(0.7, 0.9), compression)
        for round_ in range(2):
            train(model, optimizer, 2, 2 * round_)
            assert optimizer.is_exchanged
            alike(vector(model))
        stats = ddp.compression_stats(optimizer)
        # A threshold of 0.5 is more than these few steps change.
        assert not torch.equal(start, vector(model)) or not stats.elements_sent, compression
        assert stats.steps == 4
        ddp.verify(optimizer)
        train(model, optimizer, 1, 4)
        assert not optimizer.is_exchanged


def resumed():
    """To the bit from the middle of a round, also from what a plain module has saved."""
    for how in SCHEDULES:
        for compression in (None, SPARSE, TODAY[0]):

            def make(wraps, how=how, compression=compression):
                model = Normed()
                if not wraps:
                    named = model.named_parameters()
                    return model, ddp.LocalSteps(adam(model), named, compression=compression, **how)
                model = DistributedDataParallel(model)
                return model, ddp.local_steps(model, adam(model), compression=compression, **how)

            straight, optimizer = make(True)
            steps_of(straight, optimizer, 5)
            saved = copy.deepcopy((straight.module.state_dict(), optimizer.state_dict()))
            steps_of(straight, optimizer, 6, 5)
            optimizer.exchange()
            for wraps in (True, False):
                again, other = make(wraps)
                of_model, of_optimizer = copy.deepcopy(saved)
                getattr(again, "module", again).load_state_dict(of_model)
                other.load_state_dict(of_optimizer)
                steps_of(again, other, 6, 5)
                other.exchange()
                assert torch.equal(vector(straight), vector(again)), (how, compression, wraps)
            alike(vector(straight))
    other = ddp_model()
    local = ddp.local_steps(other, adam(other), 3)
    raises(CheckpointError, "saved with another", lambda: local.load_state_dict(saved[1]))


def refused():
    """Errors on all ranks; also what one rank alone has done."""
    first = dist.get_rank() == 0

    def local(model, every=3, **how):
        return ddp.local_steps(model, sgd(model), every, **how)

    for how in ({"every": 3 if first else 4}, {"deadline": 5.0 if first else None}):
        name = next(iter(how))
        model = ddp_model()
        raises(MismatchError, f"{name}=", lambda m=model, how=how: local(m, **how))
    model = ddp_model()
    ddp.compress(model, QSGDCompressor())
    both = "ddp.LocalSteps and ddp.compress would both exchange the same parameters"
    raises(ValueError, both, lambda: local(model))
    train(model, sgd(model), 1)
    model = ddp_model()
    if first:
        model.register_comm_hook(None, fp16_compress_hook)
    raises(MismatchError, "fp16_compress_hook", lambda: local(model))
    model = ddp_model()
    plain = "takes a DistributedDataParallel, got Model. For a plain module call ddp.LocalSteps"
    raises(TypeError, plain, lambda: local(model.module))
    raises(MismatchError, plain, lambda: local(model.module if first else model))
    optimizer = local(model)
    train(model, optimizer, 1)
    act = (lambda: ddp.verify(optimizer)) if first else optimizer.exchange
    raises(OutOfStepError, "rank 0 calls verify or ends an exchange", act)
    del optimizer
    model = ddp_model()
    compiled = torch.compile(model, backend="eager")
    raises(TypeError, "before torch.compile", lambda: local(compiled))
    optimizer = local(model)
    train(model, optimizer, 4)
    raises(RuntimeError, "give all ranks as many steps", model.join)
    raises(ValueError, "exchanges already", lambda: ddp.local_steps(model, optimizer))
    partial = ddp_model()
    optimizer = ddp.local_steps(partial, sgd(partial.module.first), 3)
    message = "DistributedDataParallel reduces parameters that ddp.LocalSteps does not exchange"
    raises(ValueError, message, lambda: train(partial, optimizer, 1))
    for nonfinite in ("skip", "raise"):
        model = ddp_model()
        optimizer = local(model, nonfinite=nonfinite)
        train(model, optimizer, 3)
        shared = vector(model)
        train(model, optimizer, 2, 3)
        if first:
            with torch.no_grad():
                model.module.first.weight[0, 0] = float("nan")
        if nonfinite == "raise":
            raises(NonFiniteGradientError, "", lambda m=model, o=optimizer: train(m, o, 1, 5))
            continue
        train(model, optimizer, 1, 5)
        assert torch.equal(vector(model), shared)
        train(model, optimizer, 3, 6)
        alike(vector(model))
        assert not torch.equal(vector(model), shared)


def compiled():
    """The model compiles as ever, with its reduction off; only a round is left out."""
    ends = []
    for compiles in (False, True):
        torch._dynamo.reset()
        model = DistributedDataParallel(Normed())
        optimizer = ddp.local_steps(model, sgd(model), 2, compression=ChunkedTopKCompressor(k=8))
        counted = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
        forward = torch.compile(model, backend=counted) if compiles else model
        for step in range(5):
            optimizer.zero_grad()
            forward(batch(step)).square().mean().backward()
            optimizer.step()
        assert (counted.op_count > 2) == compiles, counted.op_count
        optimizer.exchange()
        ends.append(vector(model))
    torch.testing.assert_close(*ends)
    torch._dynamo.reset()


def in_hosts():
    """Two hosts of two ranks: dense in a host in each step, and rounds between hosts.

    Equal to a plain module whose gradients are averaged in the host, exchanged by one rank of each.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("hosts", "ranks"))
    inside, across = mesh["ranks"].get_group(), mesh["hosts"].get_group()
    for how in SCHEDULES:
        if "warmup_steps" in how:
            continue  # of all ranks: they are averaged in another order
        for compression in (NoneCompressor(), Int8Compressor(), SPARSE):
            torch.manual_seed(dist.get_rank())
            model = Model()
            model.unused.requires_grad_(False)
            model = DistributedDataParallel(model, process_group=inside)
            inner = adam(model)
            optimizer = ddp.local_steps(
                model, inner, compression=compression, bucket_bytes=2500, **how
            )
            assert type(model) is DistributedDataParallel
            alike(vector(model))
            plain = copy.deepcopy(model.module)
            local = ddp.LocalSteps(
                adam(plain),
                plain.named_parameters(),
                compression=compression,
                bucket_bytes=2500,
                process_group=across,
                **how,
            )
            for step in range(9):
                for x, opt in ((model, optimizer), (plain, local)):
                    opt.zero_grad()
                    ddp_training.backward(x, step)
                    for p in plain.parameters() if x is plain else ():
                        if p.grad is not None:
                            dist.all_reduce(p.grad.div_(2), group=inside)
                    opt.step()
                alike(vector(model), inside)
                assert torch.equal(vector(model), vector(plain)), (how, compression, step)
            optimizer.exchange()
            local.exchange()
            alike(vector(model))
            ddp.verify(optimizer)
            sent = [None] * 4
            dist.all_gather_object(sent, ddp.compression_stats(optimizer).bytes_sent)
            whole = ddp.compression_stats(local).bytes_sent
            assert max(sent) < whole and sum(sent[:2]) <= whole, (sent, whole)


def levels_of_hosts():
    """Methods and checkpoints on two hosts; compression inside of one; what is refused."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("hosts", "ranks"))
    inside = mesh["ranks"].get_group()

    def make(compression, compress=None, **how):
        model = ddp_model(process_group=inside)
        if compress is not None:
            ddp.compress(model, compress)
        how = {"every": 2, "compression": compression, "bucket_bytes": 2500, **how}
        return model, ddp.local_steps(model, adam(model), **how)

    for compression in filter(takes_no_samples, [*ONE_OF_EACH, *ONE_OF_TODAY, *PRODUCTS]):
        model, optimizer = make(compression, outer=OuterSGD(0.7, 0.9), warmup_steps=1)
        for round_ in range(2):
            train(model, optimizer, 3 if not round_ else 2, 3 * round_)
            alike(vector(model))
        ddp.verify(optimizer)
    model, optimizer = make(SPARSE, QSGDCompressor())
    train(model, optimizer, 4)
    alike(vector(model))
    assert ddp.state_of(model).steps == 4
    model, optimizer = make(SPARSE, every=4)
    train(model, optimizer, 6)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer, 6, 6)
    again, other = make(SPARSE, every=4)
    again.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    train(again, other, 6, 6)
    assert torch.equal(vector(model), vector(again))
    raises(ValueError, "DistributedDataParallel over a host", lambda: make(None, deadline=1.0))
    model, optimizer = make(None, nonfinite="skip")
    train(model, optimizer, 1)
    if dist.get_rank() == 3:
        with torch.no_grad():
            model.module.third.bias[0] = float("nan")
    train(model, optimizer, 1, 1)
    assert vector(model).isfinite().all()
    alike(vector(model))
    # One host alone is all ranks that take part.
    model = ddp_model(process_group=inside)
    optimizer = ddp.local_steps(model, sgd(model), 2, process_group=inside)
    assert type(model) is not DistributedDataParallel
    train(model, optimizer, 2)
    alike(vector(model), inside)
    part = dist.new_group([0, 1, 2])
    alone = [dist.new_group([rank]) for rank in range(4)]
    uneven = part if dist.get_rank() < 3 else alone[3]
    text = "DistributedDataParallel reduces over [0, 1, 2], [3] of ranks [0, 1, 2, 3]: give it one"
    model = ddp_model(process_group=uneven)
    raises(ValueError, text, lambda: ddp.local_steps(model, sgd(model), 2))
    # Of a host, and between all ranks: one of the two is wrong.
    model = ddp_model(process_group=inside)
    named = list(model.named_parameters())
    raises(
        ValueError,
        "call ddp.local_steps(model, optimizer), which takes the ranks that reduce",
        lambda: ddp.LocalSteps(sgd(model), named, 2),
    )
    partial = ddp_model(process_group=inside)
    optimizer = ddp.local_steps(partial, sgd(partial.module.first), 2)
    message = "does not exchange, and hosts would drift apart: second.weight"
    raises(ValueError, message, lambda: train(partial, optimizer, 1))


def main():
    ddp_training.main(globals())


if __name__ == "__main__":
    main()
