"""Comparison of the ranks of local steps, over PyTorch's transports."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from hvd_gradcomp.runtime.config_check import Description
from hvd_gradcomp.torch.local.tensor_exchange import RankSync
from hvd_gradcomp.torch.local.wrapped_optimizer import refuse_thawed, thawed

REMEDY = "Give all ranks the same parameters at first, by broadcast_parameters or a seed"


class TensorRankChannel:
    """Comparison of ranks that train parameters; see `RankChannel`.

    Args:
        sync: of the ranks.
        settings: that must be equal on all ranks, by their names.
        inner: the inner optimizer.
        parameters: that are exchanged.
    """

    noun = "parameters"
    remedy = (
        f"{REMEDY}, and call restart() on all of them after setting parameters in mid-training. A "
        "module that writes to its own parameters in forward makes them differ too"
    )

    def __init__(
        self,
        sync: RankSync,
        settings: Description,
        inner: torch.optim.Optimizer,
        parameters: Sequence[torch.nn.Parameter],
    ) -> None:
        self._settings, self._sync = settings, sync
        self._inner, self._known = inner, set(parameters)

    def compare_settings(self, refusal: Exception | None) -> None:
        self._sync.compare_settings(self._settings, refusal)

    def start_gather(self, row: Sequence[int]) -> Callable[[], dict[int, list[int]]]:
        return self._sync.start_gather(row)

    def fault(self, number: int, moved: int) -> int:
        """Return the number of parameters that train, and are not exchanged."""
        del number, moved
        return thawed(self._inner, self._known)

    def refuse_faults(self, faults: Mapping[int, int]) -> None:
        refuse_thawed(faults)
