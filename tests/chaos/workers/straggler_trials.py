"""Rank whose steps take as long as is drawn, with local steps that have a deadline.

FOLDER PLAN, over Horovod; FOLDER PLAN RANK SIZE, over `torch.distributed`. PLAN is JSON: `seed`,
`compression` ("none" or "sparse") and `dies`, the rank that kills itself, or null.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from hvd_gradcomp import ChunkedTopKCompressor, NoneCompressor, OuterSGD
from hvd_gradcomp.method.handover import residual_of

SIZE, ROUNDS, EVERY, DEADLINE = 512, 12, 5, 0.3
COMPRESSORS = {
    "none": NoneCompressor(),
    "sparse": ChunkedTopKCompressor(chunk=64, k=4, values="float32", decay=1.0),
}


def stand_still(dice: random.Random) -> None:
    """Take some time for a step: little mostly, then seconds, or stopped by a signal."""
    luck = dice.random()
    if luck < 0.02:
        command = f"sleep {dice.uniform(0.1, 2):.2f}; kill -CONT {os.getpid()}"
        subprocess.Popen(["sh", "-c", command])
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        time.sleep(dice.uniform(0.2, 1.5) if luck < 0.06 else dice.uniform(0, 0.03))


def train(hvd: Any, plan: dict[str, Any], rank: int) -> dict[str, Any]:
    """Return the sum of this rank's gradients, what it has not sent, and the parameters."""
    dice = random.Random(f"{plan['seed']} {rank}")
    numbers = torch.Generator().manual_seed(rank)
    parameter, made = torch.nn.Parameter(torch.zeros(SIZE)), torch.zeros(SIZE)
    optimizer = hvd.LocalSteps(
        torch.optim.SGD([parameter], 1.0),
        [("w", parameter)],
        EVERY,
        outer=OuterSGD(1, 0),
        compression=COMPRESSORS[plan["compression"]],
        deadline=DEADLINE,
    )
    fatal = dice.randint(10, 40) if plan["dies"] == rank else None
    while optimizer.rounds < ROUNDS:
        stand_still(dice)
        if optimizer.steps_made == fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        parameter.grad = torch.randn(SIZE, generator=numbers)
        made += parameter.grad
        optimizer.step()
    optimizer.exchange()
    ((bucket,),) = [reducer.buckets for reducer in optimizer.all_reducers]
    occupied = torch.zeros(SIZE)
    if plan["compression"] == "sparse":
        occupied = residual_of(bucket.compressor, bucket.state)[:SIZE]
    return {
        "made": made.tolist(),
        "held": occupied.tolist(),
        "parameters": parameter.tolist(),
        "steps": optimizer.steps_made,
    }


def main(folder: str, text: str, rank: str = "", size: str = "") -> None:
    plan, result = json.loads(text), {}
    torch.set_num_threads(1)
    hvd: Any = importlib.import_module("hvd_gradcomp.torch.ddp" if rank else "hvd_gradcomp.torch")
    if rank:
        meeting = f"file://{folder}/met"
        torch.distributed.init_process_group("gloo", meeting, rank=int(rank), world_size=int(size))
    else:
        hvd.init()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # of horovodrun, before a rank has said why
    number = int(rank) if rank else hvd.rank()
    with Path(folder, f"hangs-{number}").open("w") as hangs:
        faulthandler.dump_traceback_later(150, exit=True, file=hangs)
        try:
            result = train(hvd, plan, number)
        except Exception as error:  # whichever names it
            result = {"error": f"{type(error).__name__}: {error}"}
        faulthandler.cancel_dump_traceback_later()
    Path(folder, f"{number}.json").write_text(json.dumps({**result, "at": time.time()}))
    if "error" in result:
        os._exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
