"""Matrix ops.

Rounding depends on the framework.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from hvd_gradcomp.ops.interface.reduction import Reduction
from hvd_gradcomp.ops.tensors import Tensor


class Matrices(Reduction):
    """Matrix ops."""

    @abstractmethod
    def matmul(self, x: Tensor, y: Tensor) -> Tensor:
        """Multiply [..., a, b] by [..., b, c]; leading axes are broadcast."""

    @abstractmethod
    def matmul_plus(self, x: Tensor, y: Tensor, row: Tensor) -> Tensor:
        """Return [a, b] times [b, c] plus `row` [1, c] in each row, in one pass if possible."""

    @abstractmethod
    def inner(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the sum of all products, a scalar; the order depends on the framework."""

    @abstractmethod
    def transpose(self, x: Tensor, axes: Sequence[int]) -> Tensor:
        """Permute axes: axis i of the result is axis `axes[i]` of x."""

    @abstractmethod
    def eigh(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return eigenvalues [n], ascending, and eigenvectors [n, n], columns, of a symmetric x."""

    @abstractmethod
    def orthogonalize(self, x: Tensor) -> Tensor:
        """Return orthonormal columns with the span of those of x [..., n, k], k <= n, in order.

        The first j span the same space as the first j of x, and none points away from its own
        column. A column that is 0, or depends on those before it, yields some remaining direction.
        """

    @abstractmethod
    def value_and_grad(
        self, function: Callable[..., tuple[Tensor, ...]], parameters: Sequence[Tensor]
    ) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        """Return `function(*parameters)`, scalars, and the gradient of the first by each parameter.

        The function must not use donating ops.
        """

    # -- composite ops ---------------------------------------------------------------------

    def project(self, x: Tensor, basis: Tensor, row: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return rows of x times a basis, the sum of their squares and of products with `row`.

        Rounding depends on the framework.

        Args:
            x: any number of rows, in any number of axes, in any memory order.
            basis: [length of a row, dimension].
            row: [1, length].
        """
        x = self.reshape(x, (-1, basis.shape[0]))
        beside = self.sum(self.matmul(x, self.transpose(row, (1, 0))))
        return self.matmul(x, basis), self.inner(x, x), beside

    def lift(
        self,
        code: Tensor,
        basis: Tensor,
        row: Tensor,
        shape: Sequence[int],
        order: Sequence[int],
    ) -> Any:
        """Return a layer for `assemble`: code [rows, dimension] times the basis transposed + row.

        The inverse of `project`, as far as there is one.

        Args:
            shape: of the layer.
            order: of its axes, in which rows run through them; the last row may run beyond.
        """
        rows = self.matmul_plus(code, self.transpose(basis, (1, 0)), row)
        return self.unturned(self.reshape(rows, (-1,)), shape, order)

    def turn_tiles(
        self, x: Tensor, shape: tuple[int, int], left: Tensor, right: Tensor, back: bool
    ) -> Tensor:
        """Return each tile of a matrix multiplied from both sides, `left @ tile @ right`.

        Rounding depends on the framework, but with the C library not.

        Args:
            x: float32 [rows * columns], a matrix; or if `back`, its tiles one after another.
            shape: (rows, columns) of the matrix.
            left: float32 [height, height] of a tile.
            right: float32 [width, width].
            back: return the matrix, from tiles; else tiles, from the matrix.
        """
        if self.native is not None:
            inputs, ints = (x, left, right), (*shape, back)
            return self.native("turn_tiles", inputs, (self.empty(x.shape),), ints)
        (rows, columns), height, width = shape, left.shape[0], right.shape[0]
        down, across = rows // height, columns // width
        if not back:
            x = self.reshape(x, (down, height, across, width))
            x = self.transpose(x, (0, 2, 1, 3))
        x = self.reshape(x, (down * across, height, width))
        x = self.matmul(self.matmul(left, x), right)
        if back:
            x = self.reshape(x, (down, across, height, width))
            x = self.transpose(x, (0, 2, 1, 3))
        return self.reshape(x, (rows * columns,))

    def expand_factors(
        self,
        x: Tensor,
        out: Tensor,
        matrices: Sequence[tuple[int, int, int, int]],
        sent: tuple[Tensor, Tensor],
        mean: tuple[Tensor, Tensor],
        between: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return x less the products of `sent`, and a vector of the products of `mean`.

        Donating for x, which the second may take, and for out, which the first may. Rounding
        depends on the framework, but with the C library not.

        Args:
            x: float32 [size].
            out: float32 [size].
            matrices: (start, rows, columns, rank) of each matrix in x, in order.
            sent: their thin factors P and Q one after another, float32 [rows * rank of all] and
                [columns * rank of all]; a matrix is P Q^T.
            mean: likewise.
            between: values of the second where there is no matrix; the first is 0 there.
        """
        if self.native is not None:
            numbers = self.numbers([int(number) for matrix in matrices for number in matrix])
            outputs = self.writable(out), self.writable(x)
            inputs = numbers, x, *sent, *mean, between
            rest, total = self.native("expand_factors", inputs, outputs)
            return rest, total
        sizes = [rows * columns for _, rows, columns, _ in matrices]
        ends = [0, *(m[0] + size for m, size in zip(matrices, sizes))]
        starts = [*(m[0] for m in matrices), x.shape[0]]

        def vector(factors: tuple[Tensor, Tensor], rest: Tensor, out: Tensor) -> Tensor:
            pieces, at, row, column = [], 0, 0, 0
            for (_, rows, columns, rank), end, start in zip(matrices, ends, starts):
                pieces.append(rest[at : at + start - end])
                at += start - end
                p = self.reshape(factors[0][row : row + rows * rank], (rows, rank))
                q = self.reshape(factors[1][column : column + columns * rank], (columns, rank))
                pieces.append(self.reshape(self.matmul(p, self.transpose(q, (1, 0))), (-1,)))
                row, column = row + rows * rank, column + columns * rank
            pieces.append(rest[at : at + starts[-1] - ends[-1]])
            return self.assemble(out, pieces)

        uncovered = self.concat([x[end:start] for end, start in zip(ends, starts)])
        rest = self.overwrite(out, x - vector(sent, uncovered, self.zeros(x.shape)))
        return rest, vector(mean, between, x)

    def unturned(self, flat: Tensor, shape: Sequence[int], order: Sequence[int]) -> Tensor:
        """Undo the axis order of a vector that runs through `shape` in `order`, maybe beyond."""
        flat = flat[: prod(shape)]
        if tuple(order) == tuple(range(len(order))):
            return flat
        turned = self.reshape(flat, tuple(shape[axis] for axis in order))
        return self.transpose(turned, [order.index(axis) for axis in range(len(order))])
