"""Bad input: every rank writes the error that it got."""

from __future__ import annotations

import contextlib
import copy
import sys
import time

import torch
from torch import nn

import hvd_gradcomp.torch as hvd
from hvd_gradcomp.method.compressor import leaves
from hvd_gradcomp.runtime import config_check, stall_inspector
from tests.methods import ONE_OF_EACH
from tests.parallel.workers.results import errors_of, finish


def make(model=None, **options):
    model = model or nn.Linear(3, 2)
    names = options.pop("named_parameters", list(model.named_parameters()))
    compression = options.pop("compression", hvd.StromCompressor())
    return hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), names, compression=compression, **options
    )


def different_models():
    model = nn.Sequential(nn.Linear(4, 3 + hvd.rank()), nn.Linear(3 + hvd.rank(), 2))
    optimizer = make(model)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()


def different_compressors():
    optimizer = make(model := nn.Linear(3, 2), compression=hvd.StromCompressor(0.1 + hvd.rank()))
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()


def damaged_payload():
    model = nn.Linear(3, 200)  # large enough for payloads
    optimizer = make(model)
    engine = optimizer._gradcomp
    submit = engine.programs._submit

    def tampered(bucket, request):
        if hvd.rank() == 1:
            request.tensor[40] ^= 8
        return submit(bucket, request)

    engine.programs._submit = tampered
    before = model.weight.detach().clone()
    try:
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    finally:
        assert torch.equal(model.weight, before), "a wrong gradient was applied"


def different_sizes():
    model = nn.Linear(3, 200)  # large enough for payloads
    optimizer = make(model)
    engine = optimizer._gradcomp
    if hvd.rank() == 1:
        bucket = engine.buckets[0]
        capacity = bucket.state.capacity._replace(needed=torch.tensor(40), level=torch.tensor(3))
        bucket.state = bucket.state._replace(capacity=capacity)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()


def two_steps(optimizer, model, between):
    """Between two steps rank 0 does something that rank 1 does not."""
    for step in range(2):
        if step and hvd.rank() == 0:
            between()
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()


def joined_alone():
    optimizer = make(model := nn.Linear(3, 200), compression=hvd.NoneCompressor())
    late = nn.Parameter(torch.ones(7))
    two_steps(optimizer, model, lambda: optimizer.add_param_group({"params": [late]}))


def a_batch_less(collective):
    """Rank 1 has one batch less than rank 0, and goes on to a collective of its own."""

    def case():
        optimizer = make(model := nn.Linear(3, 2))
        for _ in range(2 - hvd.rank()):
            optimizer.zero_grad()
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
        collective(optimizer)

    return case


def metrics_of_a_slow_rank():
    """Rank 1 computes for longer than the patience: neither an error, nor names that part."""
    optimizer = make(model := nn.Linear(3, 2))
    for _ in range(2):
        time.sleep(1.5 * stall_inspector.PATIENCE + 1.0 if hvd.rank() == 1 else 0.0)
        assert float(hvd.allreduce(torch.tensor(1.0 + hvd.rank()))) == 1.5
        hvd.barrier()
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def fails_in_backward():
    """A backward of rank 1 raises an error; its gradients are dropped, and `step` is called."""
    optimizer = make(model := nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)))
    hidden = model[0](torch.ones(2, 3))
    if hvd.rank() == 1:
        hidden.register_hook(lambda _: 1 / 0)  # the second layer's gradients have come by then
        with contextlib.suppress(ZeroDivisionError):
            model[1](hidden).sum().backward()
        model.zero_grad()
    else:
        model[1](hidden).sum().backward()
    optimizer.step()


class Mixed(nn.Module):
    """Layers of every precision; behind odd ones complex numbers lie at odd places of a bucket."""

    def __init__(self):
        super().__init__()
        self.single = nn.Linear(3, 1, bias=False)
        self.waves = nn.Linear(3, 2, dtype=torch.complex64)
        self.wide = nn.Linear(1, 1, dtype=torch.float64)
        self.wide_waves = nn.Linear(2, 1, bias=False, dtype=torch.complex128)

    def forward(self, x):
        waves = self.wide_waves(self.waves(x).to(torch.complex128)).abs()
        return self.wide(waves * self.single(x.real)).square().sum()


def complex_parameters():
    """A complex parameter is two real ones."""
    torch.manual_seed(1)
    model = Mixed()
    optimizer = make(model, compression=hvd.NoneCompressor())
    x = [torch.randn(4, 3, dtype=torch.complex64) for _ in range(hvd.size())]
    whole = copy.deepcopy(model)
    model(x[hvd.rank()]).backward()
    (sum(whole(each) for each in x) / hvd.size()).backward()
    for p, q in zip(model.parameters(), whole.parameters()):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-5, check_dtype=True)
    optimizer.step()
    for compression in (
        hvd.QSGDCompressor(),
        hvd.DGCCompressor(density=0.3, momentum=0.0),
        hvd.PowerSGDCompressor(rank=2),
        hvd.ChunkedTopKCompressor(chunk=32, k=8),
        hvd.Int8Compressor(exchange="two_shot"),
    ):
        optimizer = make(model, compression=compression)
        for _ in range(2):
            optimizer.zero_grad()
            model(x[hvd.rank()]).backward()
            optimizer.step()
        hvd.verify(optimizer)


def in_inference_mode():
    """Check that no call between steps makes state that later steps cannot write to."""
    ends = []
    for mode in (torch.inference_mode, torch.no_grad):
        torch.manual_seed(2)
        model = nn.Linear(20, 30)
        with mode():
            optimizer = make(model, compression=hvd.DGCCompressor(density=0.1))
        for step in range(4):
            x = torch.full((2, 20), 1.0 + hvd.rank() + step)
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            model(x).mean().backward()
            with mode():
                optimizer.discard_step()
                optimizer.load_state_dict(optimizer.state_dict("consolidated"))
                hvd.verify(optimizer)
                if step == 2:
                    hvd.broadcast_parameters(model.state_dict(), 0)
                    hvd.broadcast_optimizer_state(optimizer, 0)
            model(x).mean().backward()
            with mode():
                optimizer.synchronize()
                optimizer.step()
                optimizer.zero_grad()
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*ends)


def frozen_alone():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 200))
    optimizer = make(model, compression=hvd.NoneCompressor())
    two_steps(optimizer, model, lambda: model[0].bias.requires_grad_(False))


def loaded_alone():
    compression = hvd.after(1, None, hvd.StromCompressor(tau=0.1))
    optimizer = make(model := nn.Linear(3, 200), compression=compression)
    begun = optimizer.state_dict()
    two_steps(optimizer, model, lambda: optimizer.load_state_dict(begun))


class Flipping:
    """A loan whose reply has another bit on this rank."""

    def __init__(self, loan):
        self.loan, self.ready = loan, loan.ready

    def wait(self):
        reply = self.loan.wait()
        reply.view(torch.int32)[5] ^= 8
        return reply


def flipped_sum():
    optimizer = make(model := nn.Linear(3, 200), compression=hvd.NoneCompressor())
    engine = optimizer._gradcomp
    submit = engine.programs._submit

    def tampered(bucket, request):
        sent = submit(bucket, request)
        if hvd.rank() == 1 and engine.steps == 1:
            return sent._replace(pending=Flipping(sent.pending))
        return sent

    engine.programs._submit = tampered
    two_steps(optimizer, model, lambda: None)
    optimizer.zero_grad()
    model(torch.ones(2, 3)).sum().backward()


def scaled_alone(compression=None):
    optimizer = make(model := nn.Linear(3, 200), compression=compression or hvd.NoneCompressor())
    optimizer.zero_grad()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if hvd.rank() else None
    loss = model(torch.ones(2, 3)).sum()
    (loss if scaler is None else scaler.scale(loss)).backward()


def other_scales():
    optimizer = make(model := nn.Linear(3, 200), compression=hvd.FP16Compressor())
    optimizer.zero_grad()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (3 + hvd.rank()))
    scaler.scale(model(torch.ones(2, 3)).sum()).backward()


def scalers_live_on():
    """A step that fails has no part in the next optimizer's, whoever still holds its scaler."""
    errors = []
    for compression in (hvd.NoneCompressor(), hvd.StromCompressor(0.1 + hvd.rank())):
        try:
            scaled_alone(compression)
        except config_check.MismatchError as error:  # at the end of backward, and at its beginning
            errors.append(error)
        optimizer = make(model := nn.Linear(3, 200))
        two_steps(optimizer, model, lambda: None)
        assert optimizer._gradcomp.scaling.scaler is None
    assert len(errors) == 2


def overflow(compressor):
    """No rank's gradient overflows, their sum does: nothing is changed, on any rank."""
    weight = nn.Parameter(torch.ones(40, 64))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([weight], lr=0.1), [("w", weight)], compression=compressor, op=hvd.Sum
    )
    try:
        (weight * 3e38).sum().backward()
        optimizer.step()
    finally:
        assert torch.equal(weight, torch.ones_like(weight))
        states = [x for b in optimizer._gradcomp.buckets for _, x in leaves(b.state)]
        assert all(bool(x.isfinite().all()) for x in states if x.numel() > 1000)


def degenerate():
    """Parameters without elements, of one, and of no dimension train with all methods."""
    for compressor in ONE_OF_EACH:
        for shapes in (((0,),), ((), (0, 3), (40, 9))):
            parameters = [nn.Parameter(torch.ones(shape)) for shape in shapes]
            model = nn.ParameterList(parameters)
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD(parameters, lr=0.1),
                model.named_parameters(),
                compression=compressor,
            )
            for _ in range(2):
                optimizer.zero_grad()
                sum(p.sum() * (1 + hvd.rank()) for p in parameters).backward()
                optimizer.step()
            assert all(bool(p.isfinite().all()) for p in parameters)
            assert hvd.compression_stats(optimizer).steps == 2


def half_named():
    model = nn.Linear(3, 2)
    make(model, named_parameters=[("weight", model.weight)])


def repeated_names():
    model = nn.Linear(3, 2)
    make(model, named_parameters=[("w", model.weight), ("w", model.bias)])


def wrapped_twice():
    model = nn.Linear(3, 2)
    hvd.DistributedOptimizer(make(model), model.named_parameters())


def main(folder: str) -> None:
    try:
        make()
        before_init = "nothing was raised"
    except ValueError as error:
        before_init = str(error)
    hvd.init()
    torch.set_num_threads(1)
    stall_inspector.PATIENCE = 1.0
    errors = errors_of(
        {
            "groups": lambda: make(groups=2),
            "num_groups": lambda: make(num_groups=2),
            "adasum": lambda: make(op=hvd.Adasum),
            "no compressor": lambda: make(compression="variance"),
            "untracked": lambda: make(compression=hvd.VarianceCompressor(moments="sample")),
            "one pass": lambda: make(compression=hvd.VarianceCompressor(moments="microbatch")),
            "half named": half_named,
            "repeated names": repeated_names,
            "wrapped twice": wrapped_twice,
            "no optimizer": lambda: hvd.DistributedOptimizer("adam"),
            "integers": lambda: make(nn.Linear(3, 2).to(torch.float8_e5m2)),
            "elsewhere": lambda: make(nn.Linear(3, 2, device="meta")),
            "stats": lambda: hvd.compression_stats(torch.optim.SGD([torch.ones(1)], lr=1)),
            "different models": different_models,
            "different compressors": different_compressors,
            "damaged payload": damaged_payload,
            "different sizes": different_sizes,
            "joined alone": joined_alone,
            "frozen alone": frozen_alone,
            "loaded alone": loaded_alone,
            "scaled alone": scaled_alone,
            "other scales": other_scales,
            "scalers live on": scalers_live_on,
            "flipped sum": flipped_sum,
            "none overflows": lambda: overflow(hvd.NoneCompressor()),
            "levels overflow": lambda: overflow(hvd.QSGDCompressor()),
            "two shots overflow": lambda: overflow(hvd.TernGradCompressor(exchange="two_shot")),
            "signs overflow": lambda: overflow(hvd.OneBitCompressor()),
            "values overflow": lambda: overflow(hvd.SparseGDCompressor(density=0.1)),
            "degenerate": degenerate,
            "complex": complex_parameters,
            "inference": in_inference_mode,
            "fails in backward": fails_in_backward,
            "slow": metrics_of_a_slow_rank,
            "metric": a_batch_less(lambda _: hvd.allreduce(torch.ones(1), name="metric")),
            "objects": a_batch_less(lambda _: hvd.allgather_object(1, name="objects")),
            "verify": a_batch_less(hvd.verify),
            "barrier": a_batch_less(lambda _: hvd.barrier()),  # last: it stays where it is
        }
    )
    errors["before init"] = before_init
    finish(hvd, folder, errors)


if __name__ == "__main__":
    main(sys.argv[1])
