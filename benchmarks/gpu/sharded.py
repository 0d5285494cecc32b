"""Part that trains what `fully_shard` has sharded (FSDP2), by a hook and with local steps.

There are two replicas of one shard each. Then FSDP2 gathers and scatters nothing (PyTorch 2.13,
`foreach_reduce` and `unshard` return where the shard dimension is 1), and all that travels goes
between replicas. So two ranks can share one GPU over gloo, which takes CUDA tensors for the
collectives that are left: allreduce for hybrid sharding itself, allgather, alltoall, allreduce and
broadcast for our programs. NCCL refuses two ranks on one GPU; with two GPUs it is NCCL.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch.distributed.device_mesh import init_device_mesh

from benchmarks.fsdp import STOCK, Training
from benchmarks.gpu.models import sizes
from benchmarks.gpu.part import Part, Row, Setting
from benchmarks.gpu.ranks import RANKS, measured, names_of, require_equal, timed
from benchmarks.gpu.replicas import steps_of
from benchmarks.worth.methods import EIGHTH

METHODS = (
    STOCK,
    "QSGDCompressor(bits=4)",
    "local(Int8Compressor(), every=5)",
    f"local({EIGHTH}, every=5)",
    "ChunkedTopKCompressor()",
    "PowerSGDCompressor(rank=4)",
    "VarianceCompressor(alpha=1, moments='step')",
    "NoneCompressor()",
)


def sharded(share: float) -> Part:
    """Return the part."""

    def names(setting: Setting) -> list[str]:
        backend = "nccl" if not setting.is_small and setting.devices >= RANKS else "gloo"
        return names_of(METHODS, [(backend, RANKS)])

    def measure(setting: Setting, names: list[str], deadline: float) -> Iterator[Row]:
        return measured(setting, names, deadline, trained)

    return Part(share, names, measure)


def trained(setting: Setting, method: str) -> Row:
    """Return times and bytes of some steps by one method.

    Raises:
        AssertionError: replicas differ.
    """
    mesh = init_device_mesh(setting.device, (RANKS, 1), mesh_dim_names=("hosts", "inside"))
    training = Training(method, mesh, *sizes(setting))
    parameters = [*training.model.parameters()]
    row = timed(training.step, training.bytes_sent, steps_of(setting), setting.device)
    require_equal([p.to_local() for p in parameters])
    return row
