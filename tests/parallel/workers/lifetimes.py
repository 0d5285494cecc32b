"""Counts of what a process holds while models are made, trained and dropped, again and again."""

from __future__ import annotations

import gc
import os
import weakref

CYCLES = 5


def referenced():
    """Return the open descriptors, the threads, and the groups of `torch.distributed`."""
    from torch.distributed import distributed_c10d

    folders = "/proc/self/fd", "/proc/self/task"
    return *(len(os.listdir(folder)) for folder in folders), len(distributed_c10d._world.pg_map)


def leaves_nothing(name, make):
    """Calls `make` so often; from the second time on a process must hold no more.

    Args:
        make: trains three steps, and returns what must not live on.
    """
    print("lifetimes of", name, flush=True)  # the last one is what hangs, should one hang
    counts, alive = [], []
    for _ in range(CYCLES):
        alive += [weakref.ref(item) for item in make()]
        gc.collect()
        counts.append(referenced())
        living = [type(item()).__name__ for item in alive if item() is not None]
        assert not living, (name, living)
    # It may hold less, once the groups of earlier models are collected; then not more again.
    for before, after in zip(counts[1:], counts[2:]):
        more = [now > then for then, now in zip(before, after)]
        assert not any(more), (name, "descriptors, threads, groups:", counts)
