"""Matrix ops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar

import torch

from hvd_gradcomp.ops import Tensor
from hvd_gradcomp.ops.torch.base import Base
from hvd_gradcomp.ops.torch.blocks import Axes, Blocks, Lifted

F = TypeVar("F", bound=Callable[..., Any])


def _without_autocast(method: F) -> F:
    """Decorate an op that autocast would round: users run backward, or exchange, inside of it."""

    @wraps(method)
    def call(self: Base, *args: Any) -> Any:
        with torch.autocast("cuda" if self.device.type == "cuda" else "cpu", enabled=False):
            return method(self, *args)

    return call  # type: ignore[return-value]


class Matrices(Base):
    """Matrix ops."""

    @_without_autocast
    def matmul(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.matmul(x, y)

    @_without_autocast
    def matmul_plus(self, x: Tensor, y: Tensor, row: Tensor) -> Tensor:
        return torch.addmm(row, x, y)

    def inner(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.dot(x.reshape(-1), y.reshape(-1))

    def transpose(self, x: Tensor, axes: Sequence[int]) -> Tensor:
        return x.permute(tuple(axes))

    def eigh(self, x: Tensor) -> tuple[Tensor, Tensor]:
        values, vectors = torch.linalg.eigh(x)
        return values, vectors

    def orthogonalize(self, x: Tensor) -> Tensor:
        q, r = torch.linalg.qr(x)
        turned = (torch.diagonal(r, dim1=-2, dim2=-1) < 0).to(q.dtype).unsqueeze(-2)
        return q * (1.0 - 2.0 * turned)

    def equal_matrices(self, x: Tensor, starts: Sequence[int], shape: tuple[int, int]) -> Tensor:
        apart = {end - start for start, end in zip(starts, starts[1:])}
        if len(apart) != 1:
            return super().equal_matrices(x, starts, shape)
        strides = (*apart, shape[1], 1)  # at equal distances, no copy is needed
        return x[starts[0] :].as_strided((len(starts), *shape), strides)

    @_without_autocast
    def value_and_grad(
        self, function: Callable[..., tuple[Tensor, ...]], parameters: Sequence[Tensor]
    ) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        with torch.enable_grad():
            leaves = [parameter.detach().requires_grad_() for parameter in parameters]
            values = function(*leaves)
            gradients = torch.autograd.grad(values[0], leaves)
        return tuple(value.detach() for value in values), list(gradients)

    @_without_autocast
    def project(self, x: Tensor, basis: Tensor, row: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        blocks = self._blocks(x, basis.shape[0])
        return blocks.project(x, basis, row) if blocks else super().project(x, basis, row)

    def lift(
        self, code: Tensor, basis: Tensor, row: Tensor, shape: Sequence[int], order: Sequence[int]
    ) -> Any:
        lying = torch.empty(tuple(shape), dtype=torch.float32, device="meta").permute(tuple(order))
        blocks = self._blocks(lying, basis.shape[0])
        if blocks:
            return Lifted(blocks, code, basis, row)
        return super().lift(code, basis, row, shape, order)

    def _blocks(self, x: Tensor, length: int) -> Blocks | None:
        """Return the blocks of a layer in memory like x, in rows of a length; None if none fit."""
        return None if self.native is None else Blocks.of(self.native, Axes.of(x), length)
