"""The parts by name, with their shares of the time."""

from __future__ import annotations

from benchmarks.gpu import checks, launches, replicas, sharded
from benchmarks.gpu.part import Part

PARTS: dict[str, Part] = {
    "kernels": checks.tests("kernels", 20),
    "fsdp": sharded.sharded(12),
    "local": replicas.local_steps(10),
    "training": replicas.training(22),
    "exchange": replicas.exchange(12),
    "steps": launches.launches(12),
    "reads": checks.tests("reads", 10),
    "horovod": checks.tests("horovod", 2),
}
