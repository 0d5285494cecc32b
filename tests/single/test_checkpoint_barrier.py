"""Reasons that ranks give each other when one of them saves alone, whichever thread is first."""

from __future__ import annotations

from concurrent.futures import Future
from threading import Timer
from types import SimpleNamespace

import numpy as np
import pytest

from hvd_gradcomp.checkpoint.schema import CheckpointError
from hvd_gradcomp.runtime.step_header import Kind, StepHeader
from hvd_gradcomp.tensorflow import checkpoint_barrier


@pytest.mark.parametrize("first", ["a message", "the barrier"])
def test_a_reply_is_read_before_errors_that_come_earlier(first, monkeypatch, one_rank):
    """The rank that told why ends its run, and what else it was to answer fails at once."""
    begin, ended, reply = Future(), Future(), Future()
    futures = iter([ended, reply])
    syncs = [SimpleNamespace(name=name, size=3) for name in "ab"]
    process_set = SimpleNamespace(process_set_id=77, ranks=[0, 1], size=lambda: 2)
    alive = [SimpleNamespace(process_set=process_set, sync=sync) for sync in syncs]
    monkeypatch.setattr(checkpoint_barrier, "living", alive)
    monkeypatch.setattr(checkpoint_barrier, "summed", lambda *arguments: begin)
    monkeypatch.setattr(checkpoint_barrier, "submitted", lambda *arguments: next(futures))
    monkeypatch.setattr(checkpoint_barrier, "PATIENCE", 1.0)

    def shut_down():
        for future in (ended, begin) if first == "a message" else (begin, ended):
            future.set_exception(RuntimeError("Horovod has been shut down"))

    table = np.array([StepHeader(Kind.STEP, step=3), StepHeader(Kind.ABSENT)])
    timers = Timer(1.2, shut_down), Timer(1.5, reply.set_result, [table])
    for timer in timers:
        timer.start()
    with pytest.raises(CheckpointError, match="rank 0 waits in step 3"):
        checkpoint_barrier.barrier(process_set)
    for timer in timers:
        timer.join()
