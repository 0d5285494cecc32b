"""Detection of calls by `torch.distributed.checkpoint`, which handles plain optimizers only.

Its `get_state_dict` lets an optimizer without state step once, with zero gradients and a learning
rate of zero; and of an optimizer's state it keeps only "state" and "param_groups".
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable
from typing import Any

from hvd_gradcomp.method.compressor import leaves

LOGGER = logging.getLogger("hvd_gradcomp")
_CHECKPOINT = "torch.distributed.checkpoint."
_FRAMES = 8  # between it and us: PyTorch's wrappers of a method


def from_checkpoint() -> bool:
    """Return True if `torch.distributed.checkpoint` called the method that calls this."""
    frame = sys._getframe(1)
    for _ in range(_FRAMES):
        if frame.f_back is None:
            return False
        frame = frame.f_back
        if str(frame.f_globals.get("__name__")).startswith(_CHECKPOINT):
            return True
    return False


def warn_of_loss(buckets: Iterable[Any]) -> None:
    """Warn that it leaves compressor state out of a checkpoint, if there is any."""
    if any(True for bucket in buckets for _ in leaves(bucket.state)):
        LOGGER.warning(
            "torch.distributed.checkpoint leaves out of an optimizer's state what its compressor "
            "keeps, which differs on each rank: save that beside it, by hvd.save_checkpoint, or as "
            "optimizer.state_dict()['gradcomp'] under a name with the rank in it, such as "
            "f'gradcomp/{hvd.rank()}', and give it back by optimizer.load_state_dict"
        )
