"""Verbs for matrices.

Rounding is the framework's own affair here, and differs between frameworks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from hvd_gradcomp.ops.tensors import Tensor


class Matrices(ABC):
    """Verbs for matrices."""

    @abstractmethod
    def matmul(self, x: Tensor, y: Tensor) -> Tensor:
        """[..., a, b] times [..., b, c]; leading axes are broadcast."""

    @abstractmethod
    def matmul_plus(self, x: Tensor, y: Tensor, row: Tensor) -> Tensor:
        """[a, b] times [b, c], and `row` [1, c] added to each row, in one walk where it can be."""

    @abstractmethod
    def inner(self, x: Tensor, y: Tensor) -> Tensor:
        """The sum of all products, a scalar, in an order that is the framework's."""

    @abstractmethod
    def transpose(self, x: Tensor, axes: Sequence[int]) -> Tensor:
        """Axis i of the result is axis `axes[i]` of x."""

    @abstractmethod
    def eigh(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Eigenvalues [n], ascending, and eigenvectors in columns [n, n] of a symmetric matrix."""

    @abstractmethod
    def orthogonalize(self, x: Tensor) -> Tensor:
        """Orthonormal columns that span what those of x [..., n, k] do, k <= n, in their order.

        The first j span what the first j of x do, and none points away from its own column. One
        that follows from those before it, or is 0, gives some direction that is left.
        """

    @abstractmethod
    def value_and_grad(
        self, function: Callable[..., tuple[Tensor, ...]], parameters: Sequence[Tensor]
    ) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        """`function(*parameters)`, scalars, and the derivatives of the first by each parameter.

        No verb that donates may be used within.
        """

    # -- made of others --------------------------------------------------------------------

    def project(self: Any, x: Tensor, basis: Tensor, row: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rows of x times a basis; the sum of their squares; that of their products with `row`.

        Rounded as the framework does it.

        Args:
            x: as many rows as it has, in as many axes, in any order of memory.
            basis: [length of a row, dimension].
            row: [1, length].
        """
        x = self.reshape(x, (-1, basis.shape[0]))
        beside = self.sum(self.matmul(x, self.transpose(row, (1, 0))))
        return self.matmul(x, basis), self.inner(x, x), beside

    def lift(
        self: Any,
        code: Tensor,
        basis: Tensor,
        row: Tensor,
        shape: Sequence[int],
        order: Sequence[int],
    ) -> Any:
        """A layer to `assemble`: rows of code [rows, dimension] times the basis turned, and `row`.

        The inverse of `project`, as far as there is one.

        Args:
            shape: of the layer.
            order: of its axes, in which rows run through them; the last row may run beyond.
        """
        rows = self.matmul_plus(code, self.transpose(basis, (1, 0)), row)
        return self.unturned(self.reshape(rows, (-1,)), shape, order)
