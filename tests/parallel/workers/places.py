"""Where a worker's models and batches are: the CPU, or with `pytest --device cuda` its GPU."""

from __future__ import annotations

import torch

import hvd_gradcomp.torch as hvd

_chosen = [torch.device("cpu")]


def choose(device: str) -> None:
    """To be called after `hvd.init()`; ranks share GPUs where there are too few."""
    _chosen[0] = torch.device(device)
    if device == "cuda":
        _chosen[0] = torch.device("cuda", hvd.local_rank() % torch.cuda.device_count())
        torch.cuda.set_device(_chosen[0])


def here() -> torch.device:
    """What was chosen."""
    return _chosen[0]


def arrays(tensors):
    """As NumPy's, on the host."""
    return (x.detach().cpu().to_dense().numpy() for x in tensors)
