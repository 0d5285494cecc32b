"""Adam whose second moment is fixed, so that its momentum may come from an exchange."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hvd_gradcomp.torch.interop.shards import local_part
from hvd_gradcomp.torch.local.warmup import dense_gradient
from hvd_gradcomp.torch.reduce.bucket import as_real

_FIRST, _SECOND = "exp_avg", "exp_avg_sq"  # as PyTorch's Adam calls them
_ADAMS = (torch.optim.Adam, torch.optim.AdamW)


class FixedVarianceAdam:
    """Adam's update by an exchanged momentum and the variance of the last warm-up step.

    Args:
        optimizer: an `Adam` or `AdamW`, which has stepped in the warm-up.
        warmup_steps: their number.

    Raises:
        TypeError: it is another optimizer.
        ValueError: its options do not allow a fixed variance.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, warmup_steps: int) -> None:
        _require_adam(optimizer)
        self._optimizer, self._warmup_steps = optimizer, warmup_steps

    def local_momenta(self, parameters: Sequence[torch.nn.Parameter]) -> list[torch.Tensor]:
        """Return this rank's gradients, added to the momenta that all ranks have."""
        groups = {p: group for group in self._optimizer.param_groups for p in group["params"]}
        momenta = []
        for p in parameters:
            gradient, group = dense_gradient(p), groups[p]
            if p.requires_grad and not self._decoupled(group):
                gradient = gradient.add(local_part(p), alpha=float(group["weight_decay"]))
            first = local_part(self._moments(p)[_FIRST])
            momenta.append(torch.lerp(first, gradient, 1.0 - group["betas"][0]))
        return momenta

    @torch.no_grad()
    def update(self, momenta: Mapping[torch.nn.Parameter, torch.Tensor]) -> None:
        """Update the parameters that train by their exchanged momenta."""
        for group in self._optimizer.param_groups:
            for p in group["params"]:
                if p in momenta and p.requires_grad:
                    self._update(local_part(p), self._moments(p), group, momenta[p])

    def _update(
        self,
        p: torch.Tensor,
        state: dict[str, torch.Tensor],
        group: dict[str, Any],
        momentum: torch.Tensor,
    ) -> None:
        (b1, b2), lr = group["betas"], float(group["lr"])
        state["step"] += 1
        first, variance = local_part(state[_FIRST]), as_real(local_part(state[_SECOND]))
        first.copy_(momentum)
        if self._decoupled(group):
            p.mul_(1.0 - lr * group["weight_decay"])
        # Adam takes a complex parameter as two real ones.
        correction = math.sqrt(1.0 - b2**self._warmup_steps)
        root = variance.sqrt().div_(correction).add_(group["eps"])
        # Without a second moment what a quantizer adds would be divided by epsilon.
        root.masked_fill_(variance == 0, math.inf)
        rate = lr / (1.0 - b1 ** float(state["step"]))
        as_real(p).addcdiv_(as_real(first), root, value=-rate)

    def _moments(self, p: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        """Return the optimizer's state of a parameter, zeros where it has none yet."""
        state: dict[str, torch.Tensor] = self._optimizer.state[p]
        if _FIRST not in state:
            state["step"] = torch.tensor(0.0)
            state[_FIRST], state[_SECOND] = torch.zeros_like(p), torch.zeros_like(p)
        return state

    def _decoupled(self, group: dict[str, Any]) -> bool:
        """Return True if weight decay is AdamW's."""
        adamw = isinstance(self._optimizer, torch.optim.AdamW)
        return bool(group.get("decoupled_weight_decay", adamw))


def _require_adam(optimizer: torch.optim.Optimizer) -> None:
    """Check that an optimizer is Adam or AdamW, with options that a fixed variance allows.

    Raises:
        TypeError: it is another one.
        ValueError: it keeps the largest variance, or maximizes.
    """
    if not isinstance(optimizer, _ADAMS):
        raise TypeError(
            "MomentumExchange takes torch.optim.Adam or AdamW, got "
            f"{type(optimizer).__name__}: with SGD give DistributedOptimizer a compressor that "
            "corrects momentum, such as DGCCompressor()"
        )
    for group in optimizer.param_groups:
        wrong = [name for name in ("amsgrad", "maximize", "capturable") if group.get(name)]
        if wrong:
            raise ValueError(f"MomentumExchange does not take Adam with {wrong[0]}=True")
