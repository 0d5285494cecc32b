"""Methods that learn, as if they had: what their compressed phase costs does not depend on what."""

from __future__ import annotations

from typing import Any

import torch

from hvd_gradcomp.algorithms.lgc import LGCCompressor
from hvd_gradcomp.foundation.layout import Layout
from hvd_gradcomp.ops.torch import TorchOps

STEP = 10_000  # by which everything is learned


def state_of(compressor: Any, ops: TorchOps, layout: Layout, state: Any) -> Any:
    """A state as it is at `STEP`, in the compressed phase, with random bases."""
    if isinstance(compressor, LGCCompressor):
        start = ops.host(STEP - compressor.train_steps)
        return state._replace(start=start, ready=ops.host(1))
    generator = torch.Generator().manual_seed(1)
    bases = []
    for cut in compressor.slices(layout):
        for _ in range(cut.groups):
            noise = torch.randn(
                cut.length, cut.room, generator=generator, dtype=torch.float32, device="cpu"
            )
            bases.append(torch.linalg.qr(noise).Q.reshape(-1))
    start = ops.host(STEP - compressor.sample_steps)
    return state._replace(start=start, basis=torch.cat(bases).to(ops.device))
