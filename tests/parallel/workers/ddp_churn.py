"""Trains by local steps over `torch.distributed` as ranks die, leave and join; see `test_churn`.

Each process writes what it saw to `FOLDER/process-<pid>.jsonl`: nothing that is tested carries it.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hvd_gradcomp import NoneCompressor, OuterSGD, SparseGDCompressor
from hvd_gradcomp.method.handover import residual_of
from hvd_gradcomp.torch import ddp
from hvd_gradcomp.torch.reduce import reducer_state
from tests.parallel.workers.results import digest
from tests.parallel.workers.survival import Diary

COMPRESSORS = {"sparse": SparseGDCompressor(density=0.1), "none": NoneCompressor()}


def batch_of(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(16, 8, generator=generator)
    return x, torch.stack([x.sum(1), x[:, :4].sum(1)], 1)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def residuals(optimizer: Any) -> list[torch.Tensor]:
    residuals = [residual_of(b.compressor, b.state) for r in optimizer.reducers for b in r.buckets]
    return [r for r in residuals if r is not None]


def norm(optimizer: Any) -> float:
    return float(sum(reducer_state.squares(r) for r in optimizer.reducers) ** 0.5)


def plant(
    plan: dict[str, Any],
    elastic: ddp.Elastic,
    optimizer: Any,
    state: ddp.ElasticState,
    diary: Diary,
) -> None:
    """Die at a place in the program, after some steps, on some ranks of the first generation."""

    def due() -> bool:
        if optimizer.steps_made < plan["step"]:
            return False
        return plan.get("joins") or (state.lost == [] and dist.get_rank() in plan["kills"])

    def around(thing: Any, name: str, after: bool = False) -> None:
        usual = getattr(thing, name)

        def dies(*args: Any, **options: Any) -> Any:
            if not after and due():
                die()
            result = usual(*args, **options)
            if due():
                diary.note("dies", norm=norm(optimizer))
                die()
            return result

        setattr(thing, name, dies)

    rounds = optimizer._rounds
    fragments, warmup = rounds.fragments, rounds.warmup
    places = {
        "in the exchange": (fragments[-1].exchange, "finish"),  # it has sent part of what it has
        "before it confirms": (state, "confirm"),
        "after it has confirmed": (state, "confirm", True),
        "between exchanges": (optimizer, "zero_grad"),
        "in the warm-up": (warmup and warmup.exchange, "finish"),
        "while it is given the state": (state, "_hand_out"),
        "before it connects": (elastic._rendezvous, "store_of"),
        "while it connects": (state.group, "reopen"),
    }
    around(*places[plan["at"]])


def main(folder: str, endpoint: str, text: str) -> None:
    plan = json.loads(text)
    Path(folder, f"pid-{plan['id']}").write_text(str(os.getpid()))
    logging.basicConfig(level=logging.INFO)
    torch.set_num_threads(1)
    torch.manual_seed(os.getpid())  # all begin differently
    diary = Diary(folder)
    elastic = ddp.Elastic(
        endpoint,
        min_ranks=plan.get("min", 1),
        max_ranks=plan.get("ranks"),
        patience=plan.get("patience", 2.0),
        timeout=plan.get("timeout", 60.0),
    )
    if plan.get("polite"):
        signal.signal(signal.SIGTERM, lambda *_: elastic.leave())
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 2))
    model[2].bias.requires_grad_(False)  # differs as well at first, and is in the inner optimizer
    inner = torch.optim.Adam(model.parameters(), lr=0.01)
    optimizer = ddp.LocalSteps(
        inner,
        model.named_parameters(),
        every=plan.get("every", 4),
        outer=OuterSGD(*plan.get("outer", (1.0, 0.0))),
        compression=COMPRESSORS[plan.get("compression", "sparse")],
        named_buffers=model.named_buffers(),
        warmup_steps=plan.get("warmup", 0),
        fragments=plan.get("fragments", 1),
        delay=plan.get("delay", 0),
    )
    scheduler = torch.optim.lr_scheduler.ExponentialLR(inner, 0.999)
    state = ddp.ElasticState(model, optimizer, scheduler=scheduler, note=os.getpid())
    if "at" in plan:
        plant(plan, elastic, optimizer, state, diary)
    steps, pause = plan["steps"], plan.get("pause", 0.02)
    part = state.part

    def parts() -> Any:
        noted("part")
        return part()

    state.part = parts  # type: ignore[method-assign]

    def noted(event: str, **more: Any) -> None:
        diary.note(
            event,
            step=optimizer.steps_made,
            rounds=optimizer.rounds,
            rank=dist.get_rank() if dist.is_initialized() else None,
            size=dist.get_world_size() if dist.is_initialized() else None,
            norm=norm(optimizer),
            kept=sum(float(r.double().sum()) for r in residuals(optimizer)),
            **more,
        )

    @elastic.run
    def train(state: ddp.ElasticState) -> str:
        noted("start", lost=state.lost, mean=optimizer.reducers[0].postscale)

        def goes_on() -> bool:
            stop = Path(folder, "stop")  # has a step that no rank has reached
            if plan.get("stops"):
                return not stop.exists() or optimizer.steps_made < int(stop.read_text() or steps)
            return optimizer.steps_made < steps or dist.get_world_size() < plan.get("until", 0)

        while goes_on():
            at = optimizer.steps_made
            if plan.get("raises") == at and dist.get_rank() == 1:
                raise RuntimeError("this rank has failed, and not because of gloo")
            if plan.get("early") == at and dist.get_rank() == 1:
                return "early"
            time.sleep(pause)
            x, y = batch_of(at, dist.get_rank())
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            scheduler.step()
            noted("step", loss=loss.item())
        optimizer.exchange()
        return "finished"

    message, problem = None, None
    try:
        message = train(state)
        if message == "early":
            until = time.monotonic() + 40
            while len([*Path(folder).glob("ended-*")]) < 2 and time.monotonic() < until:
                time.sleep(0.05)
            train(state)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    Path(folder, f"ended-{plan['id']}").touch()
    x, y = batch_of(-1, -1)
    noted(
        "end",
        said=message,
        problem=problem,
        lost=state.lost,
        scheduled=scheduler.last_epoch,
        rate=inner.param_groups[0]["lr"],
        loss=nn.functional.mse_loss(model.eval()(x), y).item(),
        replica=digest(x.detach().numpy() for x in model.state_dict().values()),
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
