"""Local steps of a model that `fully_shard` has sharded inside of hosts, one rank of four."""

from __future__ import annotations

import copy
import io
import json
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from hvd_gradcomp import (
    ChunkedTopKCompressor,
    Int8Compressor,
    OneBitCompressor,
    OuterSGD,
    PowerSGDCompressor,
    StromCompressor,
)
from hvd_gradcomp.algorithms.combined.local_steps import DILOCO
from hvd_gradcomp.checkpoint.schema import CheckpointError
from hvd_gradcomp.method.compressor import leaves
from hvd_gradcomp.monitoring.verify import DivergedError
from hvd_gradcomp.ops import NonFiniteGradientError
from hvd_gradcomp.runtime.config_check import MismatchError
from hvd_gradcomp.runtime.errors import OutOfStepError
from hvd_gradcomp.torch import ddp, fsdp
from tests.methods import (
    BALANCED,
    GRADIVEQ,
    LGC,
    NONE,
    ONE_OF_EACH,
    ONE_OF_TODAY,
    PRODUCTS,
    ROBUST,
)
from tests.parallel.workers.ddp_training import TIMEOUT, alike, raises
from tests.parallel.workers.fsdp_training import (
    WIDTH,
    WORDS,
    Transformer,
    loss,
    mesh_of,
    sgd,
    vector,
)
from tests.parallel.workers.lifetimes import leaves_nothing

EVERY, STEPS = 3, 7
FEEDBACK = Int8Compressor(feedback=True, exchange="two_shot")


def sharded(mesh, **options):
    """Return a model whose units are its layers and the rest; some of it is frozen."""
    torch.manual_seed(1)
    model = Transformer()
    for p in model.unused.parameters():
        p.requires_grad_(False)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def local(compression=None, mesh=None, of_fsdp=None, optimizer=sgd, every=EVERY, **options):
    """Return a model, and its optimizer."""
    mesh = mesh or mesh_of()
    model = sharded(mesh["in"], **(of_fsdp or {}))
    inner = optimizer(model)
    how = {"mesh": mesh, "every": every, "compression": compression, **options}
    return model, fsdp.local_steps(model, inner, **how)


def train(model, optimizer, steps, first=0, clip=None):
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss(model, step).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()


def among_hosts(model):
    """Return the parameters of each host, whole."""
    here = vector(model)
    every = [torch.empty_like(here) for _ in range(dist.get_world_size())]
    dist.all_gather(every, here)
    ranks = dist.get_world_size() // 2
    return every[0], every[ranks]


def hosts_are_equal(model):
    one, other = among_hosts(model)
    assert torch.equal(one, other) and one.isfinite().all()


def adamw(model):
    return torch.optim.AdamW(model.parameters(), 0.01)


def steep(model):
    """Return an optimizer whose steps pass the thresholds of all methods."""
    return torch.optim.AdamW(model.parameters(), 0.5)


class Host(nn.Module):
    """A model that is whole on each rank, whose gradients are the means over those of its host."""

    def __init__(self, model, group):
        super().__init__()
        self.model, self.group = model, group

    def forward(self, x):
        return self.model(x)

    def reduce(self):
        for p in self.parameters():
            if p.grad is not None:
                dist.all_reduce(p.grad, group=self.group)
                p.grad.div_(dist.get_world_size(self.group))


def equal_to_plain_models():
    """Of which each rank has all, to the bit; the shards put together."""
    mesh = mesh_of()
    inside, across = mesh.get_group("in"), mesh.get_group("hosts")
    for options in (
        {},
        {"outer": DILOCO, "warmup_steps": 2},
        {"delay": 1},
        {"every": 1},
    ):
        every = options.pop("every", EVERY)
        for make in (sgd, adamw):
            model, optimizer = local(NONE, mesh, None, make, every, **options)
            torch.manual_seed(1)
            plain = Transformer()
            for p in plain.unused.parameters():
                p.requires_grad_(False)
            whole = Host(plain, inside)
            named = plain.named_parameters()
            how = {"process_group": across, "compression": NONE, **options}
            ours = ddp.LocalSteps(make(plain), named, every, **how)
            for step in range(STEPS):
                train(model, optimizer, 1, step)
                ours.zero_grad()
                loss(whole, step).backward()
                whole.reduce()
                ours.step()
                expected = torch.cat([p.detach().reshape(-1) for p in plain.parameters()])
                assert torch.equal(vector(model), expected), (options, make, step)
            one, other = among_hosts(model)
            assert torch.equal(one, other) == (every == 1), options
            for x in (optimizer, ours):
                x.exchange()
            hosts_are_equal(model)
            assert optimizer.rounds == ours.rounds and optimizer.steps_made == STEPS


def every_method():
    """Hosts are apart between rounds, and equal after each of them."""
    for compression in [
        *ONE_OF_EACH,
        GRADIVEQ,
        LGC,
        *ONE_OF_TODAY,
        *PRODUCTS,
        *ROBUST,
        *BALANCED[1::2],
    ]:
        model, optimizer = local(compression, None, None, steep, 2, bucket_bytes=4000)
        start = vector(model)
        for step in range(4):
            train(model, optimizer, 1, step)
            one, other = among_hosts(model)
            assert torch.equal(one, other) == optimizer.is_exchanged == (step % 2 == 1), compression
        hosts_are_equal(model)
        assert not torch.equal(start, vector(model)), compression
        stats = fsdp.compression_stats(optimizer)
        assert stats.steps == 4 and stats.bytes_sent and stats.bytes_received, compression


def fragments_and_buffers():
    """Fragments of whole units, whose results arrive later; buffers are averaged over all ranks."""
    model, optimizer = local(NONE, every=6, fragments=3, delay=1)
    names = [[name for name, *_ in r.planner.layers] for r in optimizer.reducers]
    units = [{name.rpartition("layers.")[2][:2] for name in some} for some in names]
    assert units[1] == {"0."} and units[2] == {"1."} and "out.bias" in names[0], names
    train(model, optimizer, 15)
    optimizer.exchange()
    hosts_are_equal(model)
    text = "fragments=4 are made of whole units"
    raises(ValueError, text, lambda: local(NONE, every=6, fragments=4))
    buffer = torch.full((3,), float(dist.get_rank()))
    model, optimizer = local(NONE, named_buffers=[("mean", buffer)])
    train(model, optimizer, EVERY)
    assert torch.equal(buffer, torch.full((3,), 1.5))


def bytes_between_hosts():
    """One shard travels, once a round, and nothing else is counted."""
    for fragments in (1, 3):
        model, optimizer = local(NONE, fragments=fragments)
        train(model, optimizer, 2 * EVERY)
        parts = [p.to_local() for p in model.parameters() if p.requires_grad]
        buckets = [bucket for reducer in optimizer.reducers for bucket in reducer.buckets]
        size, padded = sum(x.numel() for x in parts), sum(b.layout.size for b in buckets)
        stats = optimizer.stats()
        assert stats.bytes_sent == 2 * 4 * padded and size <= padded < 1.1 * size
        assert stats.steps == 2 * EVERY and abs(stats.ratio - EVERY) < 0.1 * EVERY


def policies():
    """Narrow gathers, narrow shards, offloading, gathered units, and tied ones."""
    narrow = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    kinds = (
        {"mp_policy": narrow},
        {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
        {"reshard_after_forward": False},
    )
    for of_fsdp in kinds:
        for compression in (Int8Compressor(), NONE):
            model, optimizer = local(compression, None, of_fsdp, adamw, warmup_steps=1)
            train(model, optimizer, 1 + 2 * EVERY, clip=0.5)
            hosts_are_equal(model)
    mesh = mesh_of()
    model = Tied().bfloat16()
    fully_shard(model, mesh=mesh["in"])
    optimizer = fsdp.local_steps(model, sgd(model), mesh=mesh, every=2)
    train(model, optimizer, 4)
    hosts_are_equal(model)
    fsdp.verify(optimizer)
    assert vector(model).dtype == torch.bfloat16
    assert {r.buckets[0].flat.dtype for r in optimizer.reducers} == {torch.float32}
    assert model.out.weight is model.embedding.weight


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.embedding, self.out = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.out.weight = self.embedding.weight

    def forward(self, x):
        return self.out(self.embedding(x))


def evaluated_between():
    """An evaluation gathers parameters; the next one sees what an exchange has set."""
    model, optimizer = local(NONE)
    train(model, optimizer, 2)
    seen = []
    for _ in range(2):
        with torch.no_grad():
            seen.append(loss(model, 50))
        optimizer.exchange()
    fresh, other = local(NONE)
    train(fresh, other, 2)
    other.exchange()
    with torch.no_grad():
        assert loss(fresh, 50) == seen[1] != seen[0]


def frozen_for_a_round():
    model, optimizer = local(NONE)
    train(model, optimizer, EVERY)
    model.layers[0].requires_grad_(False)
    before = [p.full_tensor() for p in model.layers[0].parameters()]
    train(model, optimizer, EVERY, EVERY)
    assert all(map(torch.equal, before, [p.full_tensor() for p in model.layers[0].parameters()]))
    model.layers[0].requires_grad_(True)
    train(model, optimizer, EVERY, 2 * EVERY)
    hosts_are_equal(model)
    for p in model.unused.parameters():
        p.requires_grad_(dist.get_rank() == 1)
    text = "parameters train that did not when the optimizer was wrapped"
    raises(RuntimeError, text, lambda: [optimizer.step() for _ in range(EVERY)])


def not_finite():
    """A NaN in one shard of one host: an error on all ranks, or all go back."""
    for compression in (NONE, FEEDBACK):
        for policy in (None, "skip"):
            model, optimizer = local(compression, nonfinite=policy)
            train(model, optimizer, EVERY)
            before, kept = vector(model), states(optimizer)
            train(model, optimizer, EVERY - 1, EVERY)
            if dist.get_rank() == 1:
                spoil(next(model.layers[1].parameters()), "nan")
            optimizer.zero_grad()
            if policy is None:
                raises(NonFiniteGradientError, "", optimizer.step)
                continue
            optimizer.step()
            assert torch.equal(vector(model), before)
            assert all(map(torch.equal, kept, states(optimizer)))
            assert optimizer.rounds == 1 and optimizer.stats().skipped == 1
            train(model, optimizer, EVERY, 9)
            hosts_are_equal(model)
    model, optimizer = local(NONE, warmup_steps=2, nonfinite="skip")
    before = vector(model)
    loss(model, 0, float("inf") if dist.get_rank() == 2 else 1.0).backward()
    optimizer.step()
    assert torch.equal(vector(model), before) and optimizer.steps_made == 1
    model, optimizer = local(NONE)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(2 * EVERY):
        optimizer.zero_grad()
        factor = float("inf") if (dist.get_rank(), step) == (3, 1) else 1.0
        scaler.scale(loss(model, step, factor)).backward()
        scaler.step(optimizer)
        scaler.update()
    hosts_are_equal(model)
    assert scaler.get_scale() == (4.0, 2.0)[dist.get_rank() // 2]


@torch.no_grad()
def spoil(x, value):
    """Set one element of this rank's shard."""
    x.to_local().view(-1)[0] = float(value)


def states(optimizer):
    """Return copies of what the compressors keep."""
    buckets = [bucket for reducer in optimizer.reducers for bucket in reducer.buckets]
    return [x.clone() for bucket in buckets for _, x in leaves(bucket.state)]


def checkpoints(folder):
    """In mid-round and between rounds, to the bit, by PyTorch's way and by each rank's own file."""
    streaming = {"fragments": 2, "delay": 1, "outer": DILOCO, "warmup_steps": 1}
    kinds = (
        ({}, NONE, adamw, (0, 2)),
        (streaming, FEEDBACK, adamw, (1, 2, EVERY + 1)),
        ({"outer": OuterSGD(0.7, 0.5)}, ChunkedTopKCompressor(chunk=64, k=8), adamw, (EVERY,)),
        ({}, PowerSGDCompressor(rank=2), sgd, (2 * EVERY + 1,)),
    )
    for place, (options, compression, make, at) in enumerate(kinds):
        for steps in at:
            made = partial(local, compression, None, None, make, **options)
            model, optimizer = made()
            train(model, optimizer, steps)
            where = folder / f"dcp-{place}-{steps}"
            dcp.save({"training": fsdp.Checkpoint(model, optimizer)}, checkpoint_id=where)
            stream = io.BytesIO()
            torch.save(optimizer.state_dict(), stream)
            stream.seek(0)
            weights = copy.deepcopy(model.state_dict())
            train(model, optimizer, 5, steps)
            again, other = made()
            dcp.load({"training": fsdp.Checkpoint(again, other)}, checkpoint_id=where)
            third, by_file = made()
            third.load_state_dict(weights)
            by_file.load_state_dict(torch.load(stream, weights_only=True))
            for resumed, by in ((again, other), (third, by_file)):
                train(resumed, by, 5, steps)
                assert torch.equal(vector(model), vector(resumed)), (options, compression, steps)
                assert by.steps_made == steps + 5 and by.rounds == optimizer.rounds
                assert by.stats() == optimizer.stats()
            optimizer.exchange()
            hosts_are_equal(model)
    saved = optimizer.state_dict()
    elsewhere = {**saved, "gradcomp": {**saved["gradcomp"], "shard": "1 of 4"}}
    raises(CheckpointError, "with another shard", lambda: optimizer.load_state_dict(elsewhere))
    text = "save and load fsdp.Checkpoint(model, optimizer)"
    raises(RuntimeError, text, lambda: get_state_dict(model, optimizer))
    raises(TypeError, "fsdp.Checkpoint takes", lambda: fsdp.Checkpoint(model, sgd(model)))


def other_hosts(folder):
    """Another number of hosts goes on from the global parameters; so does a plain model."""
    options = {"outer": DILOCO, "warmup_steps": 1}
    model, optimizer = local(FEEDBACK, None, None, adamw, **options)
    train(model, optimizer, 1 + EVERY)
    shared = vector(model)
    train(model, optimizer, EVERY - 1, 1 + EVERY)
    dcp.save({"training": fsdp.Checkpoint(model, optimizer)}, checkpoint_id=folder / "hosts")
    moments = optimizer.outer.state_dict()["state"]
    for shape in ((2, 2), (4, 1), (1, 4)):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("hosts", "in"))
        again, other = local(FEEDBACK, mesh, None, adamw, **options)
        part = fsdp.Checkpoint(again, other, whole=True)
        dcp.load({"training": part}, checkpoint_id=folder / "hosts")
        assert torch.equal(vector(again), shared), shape
        assert (other.steps_made, other.rounds) == (2 * EVERY, 1)
        assert len(other.outer.state) == len(moments)
        train(again, other, EVERY, 2 * EVERY)
        assert other.rounds == 2 and not torch.equal(vector(again), shared)
        other.exchange()
        alike(vector(again))
    plain = Transformer()
    weights = plain.state_dict()
    dcp.load({"training": {"model": weights}}, checkpoint_id=folder / "hosts")
    plain.load_state_dict(weights)
    assert torch.equal(torch.cat([p.detach().reshape(-1) for p in plain.parameters()]), shared)


def sites():
    return init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("sites", "hosts", "in"))


def three_levels():
    """Sites of two hosts, of one rank each: in every step inside of a site, rounds between them."""
    mesh = sites()
    site, across = mesh["hosts", "in"], mesh.get_group("sites")
    model = sharded(site)
    optimizer = fsdp.local_steps(model, sgd(model), mesh=mesh, every=EVERY, compression=NONE)
    torch.manual_seed(1)
    plain = Transformer()
    for p in plain.unused.parameters():
        p.requires_grad_(False)
    whole = Host(plain, mesh.get_group("hosts"))
    ours = ddp.LocalSteps(sgd(plain), None, EVERY, compression=None, process_group=across)
    for step in range(2 * EVERY + 1):
        train(model, optimizer, 1, step)
        ours.zero_grad()
        loss(whole, step).backward()
        whole.reduce()
        ours.step()
        expected = torch.cat([p.detach().reshape(-1) for p in plain.parameters()])
        assert torch.equal(vector(model), expected), step
    one, other = among_hosts(model)
    assert not torch.equal(one, other)
    for compression in (Int8Compressor(), ChunkedTopKCompressor(chunk=64, k=8)):
        model = sharded(mesh["in"])
        state = fsdp.compress(model, Int8Compressor(), mesh=site)
        how = {"mesh": mesh, "every": EVERY, "compression": compression, "bucket_bytes": 4000}
        optimizer = fsdp.local_steps(model, sgd(model), **how)
        train(model, optimizer, 2 * EVERY + 1)
        alike(vector(model), mesh.get_group("hosts"))
        one, other = among_hosts(model)
        assert not torch.equal(one, other) and state.steps == 2 * EVERY + 1
        optimizer.exchange()
        alike(vector(model))
        leads = [optimizer.reducers[0].leads(b) for b in optimizer.reducers[0].buckets]
        assert any(leads) and not all(leads)
        fsdp.verify(optimizer)
        saved = optimizer.state_dict()
        train(model, optimizer, 2, 50)
        optimizer.load_state_dict(saved)
        alike(vector(model))
    model = sharded(mesh["in"])
    optimizer = fsdp.local_steps(model, sgd(model), mesh=mesh, every=EVERY)
    raises(ValueError, "between the hosts of a site", lambda: train(model, optimizer, 1))


def momenta():
    """Adam whose momentum hosts exchange in each step; its state is saved and loaded."""
    mesh = mesh_of()
    inside, across = mesh.get_group("in"), mesh.get_group("hosts")

    def exchanged(compression, **options):
        model = sharded(mesh["in"])
        how = {"compression": compression, "warmup_steps": 2, "mesh": mesh, **options}
        return model, fsdp.MomentumExchange(model, adamw(model), **how)

    model, optimizer = exchanged(NONE)
    torch.manual_seed(1)
    plain = Transformer()
    for p in plain.unused.parameters():
        p.requires_grad_(False)
    whole = Host(plain, inside)
    named = plain.named_parameters()
    ours = ddp.MomentumExchange(adamw(plain), named, NONE, 2, process_group=across)
    for step in range(5):
        train(model, optimizer, 1, step)
        ours.zero_grad()
        loss(whole, step).backward()
        whole.reduce()
        ours.step()
        expected = torch.cat([p.detach().reshape(-1) for p in plain.parameters()])
        assert torch.equal(vector(model), expected), step
    for compression in (FEEDBACK, OneBitCompressor(), PowerSGDCompressor(rank=2)):
        model, optimizer = exchanged(compression, bucket_bytes=4000)
        train(model, optimizer, 4)
        saved = copy.deepcopy(model.state_dict()), io.BytesIO()
        torch.save(optimizer.state_dict(), saved[1])
        saved[1].seek(0)
        train(model, optimizer, 2, 4)
        hosts_are_equal(model)
        again, other = exchanged(compression, bucket_bytes=4000)
        again.load_state_dict(saved[0])
        other.load_state_dict(torch.load(saved[1], weights_only=True))
        train(again, other, 2, 4)
        assert torch.equal(vector(model), vector(again)), compression
        fsdp.verify(optimizer)
    for policy in (None, "skip"):
        model, optimizer = exchanged(FEEDBACK, nonfinite=policy)
        train(model, optimizer, 3)
        before = vector(model)
        optimizer.zero_grad()
        loss(model, 3).backward()
        if dist.get_rank() == 2:
            spoil(next(model.layers[0].parameters()).grad, "inf")
        if policy is None:
            raises(NonFiniteGradientError, "in step 4", optimizer.step)
        else:
            optimizer.step()
        assert torch.equal(vector(model), before)
        train(model, optimizer, 1, 4)
        hosts_are_equal(model)
    steps = 2 + dist.get_rank() % 2
    raises(MismatchError, "warmup_steps=3", lambda: exchanged(NONE, warmup_steps=steps))
    raises(TypeError, "Adam", lambda: fsdp.MomentumExchange(model, sgd(model), mesh=mesh))


def what_differs():
    """Errors with names, on all ranks."""
    rank, mesh = dist.get_rank(), mesh_of()
    other = init_device_mesh("cpu", (4, 1), mesh_dim_names=("hosts", "in"))
    model = sharded(mesh["in"])

    def made(model=model, mesh=mesh, optimizer=None, **options):
        return fsdp.local_steps(model, optimizer or sgd(model), mesh=mesh, **options)

    raises(TypeError, "takes a DeviceMesh", lambda: made(mesh=None))
    raises(ValueError, "of two dimensions", lambda: made(mesh=mesh["in"]))
    raises(MismatchError, "mesh: [[0, 1], [2, 3]]", lambda: made(mesh=(mesh, other)[rank % 2]))
    raises(ValueError, "pass the mesh whose last", lambda: made(sharded(other["in"])))
    raises(ValueError, "call fully_shard with the ranks of a host", lambda: made(sharded(mesh)))
    raises(ValueError, "exchanges gradients between hosts", lambda: made(sharded(None)))
    raises(TypeError, "fsdp.local_steps takes what fully_shard", lambda: made(nn.Linear(2, 2)))
    raises(TypeError, "before torch.compile", lambda: made(torch.compile(model)))
    part = Transformer()
    fully_shard(part, mesh=mesh["in"], ignored_params={part.out.bias})
    raises(ValueError, "out.bias is not sharded", lambda: made(part))
    raises(ValueError, "every", lambda: made(every=0))
    raises(MismatchError, "what is refused", lambda: made(every=(0, 3)[rank % 2]))
    text = "fsdp.compress and fsdp.local_steps would both"
    twice = sharded(mesh["in"])
    state = fsdp.compress(twice, None, mesh=mesh)
    raises(ValueError, "fsdp.local_steps and fsdp.compress would both", lambda: made(twice))
    del state
    alone = sharded(mesh["in"])
    kept = made(alone)
    raises(ValueError, text, lambda: fsdp.compress(alone, None, mesh=mesh))
    raises(TypeError, "does not take shards", lambda: ddp.LocalSteps(sgd(model)))
    raises(TypeError, "cannot be copied", lambda: copy.deepcopy(kept))
    for different in (
        {"every": 3 + rank // 2},
        {"every": 3 + rank % 2},
        {"compression": StromCompressor(tau=1.0 + rank)},
        {"bucket_bytes": 4000 + rank % 2},
        {"outer": OuterSGD(0.5 + 0.1 * (rank == 3), 0.0)},
    ):
        raises(MismatchError, "on rank", lambda how=different: local(mesh=mesh, **how))
    wider = Transformer()
    if rank == 3:
        wider.out = nn.Linear(wider.out.in_features, 2 * wider.out.out_features)
    fully_shard(wider, mesh=mesh["in"])
    raises(MismatchError, "parameter out.weight", lambda: made(wider))
    model, optimizer = local(mesh=mesh)
    train(model, optimizer, 1)
    act = optimizer.exchange if rank else partial(fsdp.verify, optimizer)
    raises(OutOfStepError, "rank 0 calls verify or ends an exchange", act)
    model, optimizer = local(mesh=mesh)
    train(model, optimizer, 1)
    if rank == 0:
        optimizer.restart()
    raises(OutOfStepError, "exchange() on all or none", optimizer.exchange)
    torch.manual_seed(1)
    model, optimizer = local(mesh=mesh)
    if rank == 3:
        with torch.no_grad():
            model.out.bias.to_local().add_(1.0)
    raises(DivergedError, "digests by rank: {1: ", lambda: train(model, optimizer, 1))
    model, optimizer = local(mesh=mesh)
    train(model, optimizer, 1)
    if rank == 3:
        optimizer.outer.param_groups[0]["params"][-1].data.add_(1.0)
    named = "parameter" if rank in (1, 3) else "another shard differ, as ranks 1, 3 tell"
    raises(DivergedError, named, lambda: fsdp.verify(optimizer))
    model, optimizer = local(mesh=mesh)
    train(model, optimizer, 2)
    if rank < 2:
        raises(OutOfStepError, "exchange", lambda: train(model, optimizer, 1, 2))
    else:
        raises(OutOfStepError, "exchange", optimizer.exchange)


def made_and_dropped():
    """A process holds as much after the fifth optimizer as after the second."""
    mesh = mesh_of()

    def made():
        model, optimizer = local(FEEDBACK, mesh)
        train(model, optimizer, EVERY)
        return [model, optimizer, *optimizer.reducers]

    leaves_nothing("fsdp.local_steps", made)


def one_fails():
    """A rank that meets an error of its own does not leave the others waiting."""
    model, optimizer = local(Int8Compressor())
    train(model, optimizer, EVERY)
    if dist.get_rank() == 1:
        optimizer.reducers[0].buckets[0].compressor = None
    raises(Exception, "", lambda: train(model, optimizer, EVERY, EVERY))


def one_ends():
    """The last part of all: a rank that is gone is an error on the others."""
    model, optimizer = local(NONE)
    train(model, optimizer, 2)
    if dist.get_rank() != 3:
        raises(RuntimeError, "", lambda: train(model, optimizer, 9))


def main():
    folder, rank, size = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    met = f"file://{folder}/met"
    dist.init_process_group("gloo", met, timeout=TIMEOUT, rank=rank, world_size=size)
    done = []
    for name in sys.argv[4:]:
        arguments = (folder,) if name in ("checkpoints", "other_hosts") else ()
        globals()[name](*arguments)
        done.append(name)
        (folder / f"{rank}.json").write_text(json.dumps(done))
    assert not [name for name in sys.modules if name.startswith("horovod.")]


if __name__ == "__main__":
    main()
