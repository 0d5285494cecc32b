"""Outer optimizer, which moves the global parameters by the mean pseudogradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hvd_gradcomp.algorithms.combined.local_steps import OuterSGD
from hvd_gradcomp.method.compressor import Compressor
from hvd_gradcomp.torch.interop.shards import local_part
from hvd_gradcomp.torch.reduce.momentum import MomentumTransfer, resolve_compressor

_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}  # dtypes of global copies

_ALIGNMENT = 16  # elements: whole words of 64 bits of any dtype

Outer = Any  # OuterSGD, or a function that makes an optimizer from a list of parameters


class OuterOptimizer:
    """Outer optimizer, whose momentum the compressor of the pseudogradients may take over.

    Args:
        outer: its settings, or what makes it from the list of global parameters.
        parameters: of the model, whose values the ranks begin with.
        compression: of the pseudogradients.
        stock: Horovod's `Compression`, if there is Horovod.

    Raises:
        TypeError: `outer` makes no optimizer, or `compression` is no compressor.
        ValueError: the momentum cannot be taken over.

    Attributes:
        copies: the global parameters, this rank's parts of them, zero at first, in float32 if the
            model's are narrower.
        optimizer: PyTorch's, over the global parameters.
        compressor: of the pseudogradients, with its momentum decided.
        momentum: of the optimizer as it was made; 0 without.
    """

    def __init__(
        self, outer: Outer, parameters: Sequence[torch.Tensor], compression: Any, stock: Any
    ) -> None:
        self.copies = neighbours([local_part(p) for p in parameters])
        self.optimizer = _optimizer_of(outer, list(self.copies))
        self.compressor: Compressor
        self.compressor, handover = resolve_compressor(compression, self.optimizer, stock)
        self.momentum = _momentum_of(self.optimizer)
        self._transfer = None if handover is None else MomentumTransfer(self.optimizer, *handover)

    def __repr__(self) -> str:
        """Describe the options, which must be equal on all ranks."""
        groups = self.optimizer.param_groups
        options = [{k: v for k, v in g.items() if k != "params"} for g in groups]
        return f"{type(self.optimizer).__name__}({options})"

    def step(self, changes: Sequence[tuple[torch.nn.Parameter, torch.Tensor | None]]) -> None:
        """Move some global parameters.

        Args:
            changes: (global parameter, mean pseudogradient), None where nothing trains.
        """
        for c, mean in changes:
            c.grad = mean
        if self._transfer is not None:
            self._transfer.check()
            self._transfer.decay()
        with torch.enable_grad():
            self.optimizer.step()
        for c, _ in changes:
            c.grad = None

    def state_tensors(self) -> list[torch.Tensor]:
        """Return the tensors that the optimizer keeps, such as its momentum."""
        states = self.optimizer.state.values()
        return [x for s in states for x in s.values() if isinstance(x, torch.Tensor)]

    def state_dict(self) -> dict[str, Any]:
        """Return the state, with the momentum that was taken over."""
        state = self.optimizer.state_dict()
        return state if self._transfer is None else self._transfer.restored(state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state of `state_dict`."""
        self.optimizer.load_state_dict(state)
        if self._transfer is not None:
            self._transfer.take()


def shaped_like(x: torch.Tensor) -> torch.nn.Parameter:
    """Return a parameter of a tensor's shape, in float32 if that is narrower; of a single zero."""
    zero = torch.zeros((), dtype=_wide_dtype(x), device=x.device)
    return torch.nn.Parameter(zero.expand(x.shape), requires_grad=False)


def neighbours(tensors: Sequence[torch.Tensor]) -> list[torch.nn.Parameter]:
    """Return zeros in the shape of each, in float32 if that is narrower, as neighbours in memory.

    So a checksum of all of them walks over few pieces of memory.
    """
    kinds = [(_wide_dtype(x), x.device) for x in tensors]
    sizes = [-(-x.numel() // _ALIGNMENT) * _ALIGNMENT for x in tensors]
    ends = dict.fromkeys(kinds, 0)
    memory: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}
    for kind in ends:
        total = sum(size for size, its_kind in zip(sizes, kinds) if its_kind == kind)
        memory[kind] = torch.zeros(total, dtype=kind[0], device=kind[1])
    copies = []
    for x, kind, size in zip(tensors, kinds, sizes):
        strides = torch.empty_like(x, device="meta").stride()
        view = memory[kind].as_strided(x.shape, strides, ends[kind])
        copies.append(torch.nn.Parameter(view))
        ends[kind] += size
    return copies


def _wide_dtype(x: torch.Tensor) -> torch.dtype:
    return _WIDE.get(x.dtype, x.dtype)


def _momentum_of(optimizer: torch.optim.Optimizer) -> float:
    """Return the momentum of an optimizer, Adam's first beta for one; 0 without."""
    options = optimizer.defaults
    return float(options.get("momentum") or next(iter(options.get("betas", ())), 0.0))


def _optimizer_of(outer: Outer, copies: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer over the global parameters.

    Raises:
        TypeError: it is neither settings nor something that makes an optimizer.
    """
    if isinstance(outer, OuterSGD):
        nesterov = bool(outer.nesterov)
        return torch.optim.SGD(copies, outer.lr, outer.momentum, nesterov=nesterov, foreach=True)
    made = outer(copies) if callable(outer) else None
    if not isinstance(made, torch.optim.Optimizer):
        raise TypeError(
            "outer= takes OuterSGD(lr=..., momentum=...), or a function that makes a "
            f"torch.optim.Optimizer from a list of parameters, got {outer!r}"
        )
    return made
