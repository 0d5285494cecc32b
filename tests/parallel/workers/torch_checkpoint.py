"""Stops and resumes: with as many ranks, with others, and from what cannot be resumed from."""

from __future__ import annotations

import logging
import pickle
import resource
import shutil
import signal
import sys
from pathlib import Path

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import hvd_gradcomp.torch as hvd
from hvd_gradcomp.method.handover import correction_of, residual_of
from hvd_gradcomp.torch.interop import safetensors_file
from tests.methods import (
    DGC_WARMED_UP,
    EGC,
    EVERY,
    GRADIVEQ_BY_LOSS,
    LEARNED,
    LGC_SERVER,
    OUTSIDE,
    VARIANCE,
)
from tests.parallel.workers.results import digest, errors_of, finish, flipped, forged


def build(compressor=None, outputs=10, **options):
    torch.manual_seed(1)
    convolutions = (nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Conv2d(6, 6, 3), nn.ReLU())
    model = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(96, outputs))
    plain = torch.optim.Adam(model.parameters(), lr=0.01)
    if compressor is not None and correction_of(compressor) is not None:
        plain = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.0)
    names = model.named_parameters()
    return model, hvd.DistributedOptimizer(
        plain, names, compression=compressor, bucket_bytes=4096, **options
    )


def train(model, optimizer, first, last):
    for step in range(first, last):
        generator = torch.Generator().manual_seed(1000 * step + hvd.rank())
        x = torch.randn(8, 1, 8, 8, generator=generator)
        y = torch.randint(0, 10, (8,), generator=generator)
        optimizer.zero_grad()
        (20 * nn.functional.cross_entropy(model(x), y)).backward()
        optimizer.step()


def everything(model, optimizer):
    """A digest of parameters, the optimizer's state, what the compressor keeps and the counts."""
    state = optimizer.state_dict()
    tensors = [v for s in state["state"].values() for v in s.values() if torch.is_tensor(v)]
    tensors += [x for b in state["gradcomp"]["buckets"] for x in b["state"].values()]
    tensors += [torch.tensor([*state["gradcomp"]["counters"].values()])]
    return digest([p.detach().numpy() for p in model.parameters()] + tensors)


def stopped(compressor, steps, folder):
    """Digests without a stop and with one."""
    whole = build(compressor)
    train(*whole, 0, steps)
    model, optimizer = build(compressor)
    train(model, optimizer, 0, steps // 2)
    hvd.save_checkpoint(folder, model=model, optimizer=optimizer, epoch=steps // 2)
    model, optimizer = build(compressor)
    rest = hvd.load_checkpoint(folder, model=model, optimizer=optimizer)
    train(model, optimizer, rest["epoch"], steps)
    return [everything(*whole), everything(model, optimizer)]


# -- with another number of ranks ---------------------------------------------------------------


def mass(optimizer):
    """The sum over ranks of what is kept, in float64, layer by layer."""
    flat = []
    for bucket in optimizer._gradcomp.buckets:
        kept = residual_of(bucket.compressor, bucket.state)
        if kept is not None:
            flat.append(kept.double())
    total = hvd.allreduce(torch.cat(flat), op=hvd.Sum) if flat else torch.zeros(1)
    return total.tolist()


def moved(methods, folder, steps):
    """Resumes what another number of ranks has saved, if any has; trains; saves."""
    result = {}
    for place, compressor in enumerate(methods):
        model, optimizer = build(compressor)
        path, first = Path(folder, str(place)), 0
        if (path / "current").exists():
            rest = hvd.load_checkpoint(path, model=model, optimizer=optimizer)
            first = rest["epoch"]
        before = mass(optimizer)
        train(model, optimizer, first, first + steps)
        objects = {"model": model, "optimizer": optimizer, "epoch": first + steps}
        hvd.save_checkpoint(path, mode="consolidated", **objects)
        parameters = digest([p.detach().numpy() for p in model.parameters()])
        result[repr(compressor)] = [before, mass(optimizer), parameters]
    return result


# -- faults -------------------------------------------------------------------------------------


def faults(folder):
    """What is said, on this rank, of checkpoints that cannot be written or resumed from."""
    compressor = hvd.DGCCompressor(density=0.1, momentum=0.0)
    good = Path(folder, "good")
    model, optimizer = build(compressor)
    train(model, optimizer, 0, 3)
    hvd.save_checkpoint(good, model=model, optimizer=optimizer, epoch=3)
    saved = everything(model, optimizer)
    train(model, optimizer, 3, 5)

    def full_disk():
        if hvd.rank() == 1:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
        try:
            hvd.save_checkpoint(good, model=model, optimizer=optimizer, epoch=5)
        finally:
            limits = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    def load(where, other=compressor, outputs=10, **more):
        objects = dict(zip(("model", "optimizer"), build(other, outputs)))
        train(*objects.values(), 0, 1)
        before = everything(*objects.values())
        try:
            return hvd.load_checkpoint(where, **objects, **more)
        except Exception:
            unharmed.append(everything(*objects.values()) == before)
            train(*objects.values(), 1, 2)  # and goes on
            raise

    def copy(name, rank, change):
        path = Path(folder, name)
        if hvd.rank() == rank:
            shutil.copytree(good, path)
            change(path / (path / "current").read_text().split()[0])
        hvd.barrier()
        return path

    def truncated(path):
        part = path / "rank-1-of-2"
        part.write_bytes(part.read_bytes()[:-300])

    def other_format(path):
        part = safetensors_file.unpacked((path / "rank-0-of-2").read_bytes())
        part["optimizer"]["format"] = 3
        forged(path, "rank-0-of-2", safetensors_file.packed(part))

    def hostile(path):
        forged(path, "shared", pickle.dumps(Hostile(Path(folder, "ran"))))

    class Refusing:
        """Loads on no rank but the first."""

        def __init__(self):
            self.state = 0

        def state_dict(self):
            return {"state": self.state}

        def load_state_dict(self, state):
            self.state = state["state"]
            if hvd.rank() == 1 and self.state:
                raise ValueError("not here")

    unharmed = []
    refusing = Refusing()
    odd = Path(folder, "odd")
    refusing.state = 1
    objects = dict(zip(("model", "optimizer"), build(compressor)))
    hvd.save_checkpoint(odd, refusing=refusing, **objects)
    refusing.state = 0
    raised = errors_of(
        {
            "full disk": full_disk,
            "nowhere": lambda: load(Path(folder, "nowhere")),
            "truncated": lambda: load(copy("truncated", 1, truncated)),
            "missing": lambda: load(copy("missing", 0, lambda p: (p / "rank-0-of-2").unlink())),
            "other format": lambda: load(copy("format", 0, other_format)),
            "foreign": lambda: load(
                copy("foreign", 0, lambda p: forged(p, "shared", b"no checkpoint"))
            ),
            "hostile": lambda: load(copy("hostile", 0, hostile)),
            "not on one rank": lambda: load(odd, refusing=refusing),
            "unknown": lambda: hvd.save_checkpoint(good, model=model, thing=Path(folder)),
            "another compressor": lambda: load(good, hvd.StromCompressor(tau=1.0)),
            "another model": lambda: load(good, outputs=11),
            "another object": lambda: load(good, scheduler=object()),
            "mode": lambda: hvd.save_checkpoint(good, mode="whole", model=model),
            "two modes": lambda: hvd.save_checkpoint(
                good, mode=("sharded", "consolidated")[hvd.rank()], optimizer=optimizer
            ),
        }
    )
    target = build(compressor)
    train(*target, 0, 1)
    before = everything(*target)
    flips = flipped(
        good,
        hvd.rank(),
        lambda: hvd.load_checkpoint(good, model=target[0], optimizer=target[1]),
        hvd.barrier,
        times=12,
    )
    again, resumed = build(compressor)
    rest = hvd.load_checkpoint(good, model=again, optimizer=resumed)
    kept = everything(again, resumed) == saved and rest == {"epoch": 3}
    names = sorted(p.name for p in good.rglob("*") if p.is_file())
    return {
        "raised": raised,
        "kept": kept,
        "files": names,
        "unharmed": unharmed,
        "refusing": refusing.state,
        "ran": Path(folder, "ran").exists(),
        "flips": flips,
        "as before flips": everything(*target) == before,
    }


def asked_by_torch():
    """`torch.distributed.checkpoint` makes no exchange, and what it leaves out is said."""
    messages, digests = [], []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    for gets_state in (False, True):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
        plain = torch.optim.SGD(model.parameters(), lr=0.01)  # has no state, so is made to step
        optimizer = hvd.DistributedOptimizer(
            plain, model.named_parameters(), compression=hvd.StromCompressor(tau=0.05)
        )
        train(model, optimizer, 0, 3)
        optimizer.zero_grad()
        if gets_state:
            logging.getLogger("hvd_gradcomp").addHandler(handler)
            weights, state = get_state_dict(model, optimizer)
            set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
            logging.getLogger("hvd_gradcomp").removeHandler(handler)
        made = hvd.compression_stats(optimizer).steps
        train(model, optimizer, 3, 6)
        digests.append([made, everything(model, optimizer)])
    return {"digests": digests, "said": messages}


class Hostile:
    """What leaves a file behind where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def main(folder: str, what: str, steps: str) -> None:
    """`stopped` and `faults` with 2 ranks, `moved` with any number."""
    hvd.init()
    torch.set_num_threads(1)
    here = Path(folder)
    if what == "moved":
        result = moved(
            [VARIANCE, DGC_WARMED_UP, EGC, GRADIVEQ_BY_LOSS, LGC_SERVER],
            here.parent / "checkpoints",
            int(steps),
        )
    else:
        methods = EVERY + OUTSIDE + (LEARNED if int(steps) >= 200 else [])
        pairs = {
            repr(c): stopped(c, int(steps), here / f"stopped-{place}")
            for place, c in enumerate(methods)
        }
        result = {"pairs": pairs, "faults": faults(folder), "asked": asked_by_torch()}
    finish(hvd, folder, result)


if __name__ == "__main__":
    main(*sys.argv[1:4])
