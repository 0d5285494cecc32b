"""Comparison of what the ranks of `torch.distributed` are about to train, before the first step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvd_gradcomp.core.layers import Layer
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.method.compressor import Compressor
from hvd_gradcomp.runtime import config_check
from hvd_gradcomp.torch.comm.c10d import ProcessGroup
from hvd_gradcomp.torch.reduce.backend import GroupBackend
from hvd_gradcomp.torch.reduce.claims import Claim


def agree(
    group: ProcessGroup,
    transport: GroupBackend,
    layers: Sequence[Layer],
    compressor: Compressor,
    layouts: Sequence[Layout],
    settings: str,
    refused: Exception | None,
    claim: Claim | None,
) -> None:
    """Compare the ranks' descriptions; all ranks call it, also those that refuse to train.

    Args:
        group: the ranks.
        transport: of the exchange.
        layers: that are exchanged.
        compressor: of the layers.
        layouts: of the buckets.
        settings: that must be equal on all ranks.
        refused: error with which this rank refuses; None if it does not.
        claim: of this rank to the layers, which ends if any rank refuses.

    Raises:
        MismatchError: on all ranks, if they do not train the same model in the same way.
        Exception: the one with which this rank refuses, if all ranks refuse.
    """
    description = config_check.describe(
        layers,
        compressor,
        layouts,
        settings,
        framework=f"torch {torch.__version__.partition('+')[0]}",
        horovod=transport.version,
    )
    try:
        config_check.compare(description, group.gather_objects, group.ranks, refused)
    except BaseException:
        if claim is not None:
            claim.drop()
        raise
