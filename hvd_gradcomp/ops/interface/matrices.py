"""Matrix ops.

Rounding depends on the framework.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from hvd_gradcomp.core.factored import FactoredMatrices, ThinMatrices
from hvd_gradcomp.ops.interface.reduction import Reduction
from hvd_gradcomp.ops.tensors import Tensor

_BIT = 2.0**-22  # of a column's largest element
_LEAST = 2.0**-120  # to divide by
_PROJECTIONS = 3


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

    def multiply_factors(
        self, x: Tensor, matrices: FactoredMatrices, factors: Tensor, transposed: bool
    ) -> Tensor:
        """Return the product M Q of each matrix with its factor, or M^T P if `transposed`.

        Rounding depends on the framework, but with the C library not.

        Args:
            x: float32 [size], has the matrices.
            matrices: in x.
            factors: one after another, float32 [columns * rank of all], or [rows * rank of all].
            transposed: multiply the transposed matrices.

        Returns:
            The products one after another.
        """
        right, left = matrices.q, matrices.p
        if transposed:
            right, left = left, right
        if self.native is not None:
            inputs = self.numbers_of(matrices), x, factors
            outputs = (self.empty((left.size,)),)
            return self.native("multiply_factors", inputs, outputs, (int(transposed),))
        pieces: dict[int, Tensor] = {}
        for numbers in matrices.alike:
            _, rows, columns, _ = matrices.matrices[numbers[0]]
            starts = [matrices.matrices[number].start for number in numbers]
            m = self.equal_matrices(x, starts, (rows, columns))
            if transposed:
                m = self.transpose(m, (0, 2, 1))
            product = self.matmul(m, self._thin(factors, right, numbers))
            pieces |= {number: product[at] for at, number in enumerate(numbers)}
        return self._in_order(pieces)

    def orthogonalize_factors(self, x: Tensor, thin: ThinMatrices) -> Tensor:
        """Return `orthogonalize` of each of many thin matrices.

        With the C library rounding does not depend on the framework. Without it a column that
        depends on those before it may also yield 0.

        Args:
            x: float32 [size], the matrices one after another.
            thin: their shapes.
        """
        if self.native is not None:
            inputs = self.numbers_of(thin), x
            return self.native("orthogonalize_factors", inputs, (self.empty((thin.size,)),))
        pieces: dict[int, Tensor] = {}
        for rank in sorted({rank for _, rank in thin.shapes}):
            groups = [group for group in thin.alike if thin.shapes[group[0]][1] == rank]
            longest = max(thin.shapes[group[0]][0] for group in groups)
            columns = []
            for group in groups:
                lying = self.transpose(self._thin(x, thin, group), (0, 2, 1))
                missing = longest - lying.shape[2]
                if missing:
                    lying = self.concat((lying, self.zeros((len(group), rank, missing))))
                columns.append(self.reshape(lying, (-1,)))
            # Zeros behind columns stay zeros, so that matrices of all lengths go together.
            lying = columns[0] if len(columns) == 1 else self.concat(columns)
            count = sum(map(len, groups))
            lying = self._orthogonal_rows(self.reshape(lying, (count, rank, longest)))
            begin = 0
            for group in groups:
                rows = thin.shapes[group[0]][0]
                some = lying[begin : begin + len(group), :, :rows]
                flat = self.reshape(self.transpose(some, (0, 2, 1)), (len(group), -1))
                pieces |= {number: flat[at] for at, number in enumerate(group)}
                begin += len(group)
        return self._in_order(pieces)

    def _orthogonal_rows(self, x: Tensor) -> Tensor:
        """Orthonormalize rows [count, k, n] by Gram-Schmidt, in few launches for all matrices.

        Of a row that depends on those before it, rounding leaves mostly what it had in common with
        them. So each is projected three times.
        """
        count, k, n = x.shape
        largest = self.reshape(self.max(self.abs(x), -1), (count, k, 1))
        x = x / self.maximum(largest, _LEAST)  # squares neither vanish nor overflow
        # A bit of another axis in each: zeros, or a row that depends on others, have a direction.
        bits = self.constants(tuple(_BIT * (i == j) for i in range(k) for j in range(k)))
        bits = self.concat((self.reshape(bits, (k, k)), self.zeros((k, n - k))))
        x, done = x + bits, None
        for number in range(k):
            row = x[:, number : number + 1, :]
            if done is not None:
                across = self.transpose(done, (0, 2, 1))
                for _ in range(_PROJECTIONS):
                    row = row - self.matmul(self.matmul(row, across), done)
            square = self.matmul(row, self.transpose(row, (0, 2, 1)))
            row = row / self.sqrt(self.maximum(square, _LEAST))
            flat = self.reshape(row, (count, -1))
            done = flat if done is None else self.concat((self.reshape(done, (count, -1)), flat))
            done = self.reshape(done, (count, number + 1, n))
        return done

    def equal_matrices(self, x: Tensor, starts: Sequence[int], shape: tuple[int, int]) -> Tensor:
        """Return matrices of one shape that begin at `starts` in a vector; [count, *shape]."""
        size = prod(shape)
        if len(starts) == 1:
            return self.reshape(x[starts[0] : starts[0] + size], (1, *shape))
        pieces = [x[start : start + size] for start in starts]
        return self.reshape(self.concat(pieces), (len(starts), *shape))

    def _thin(self, x: Tensor, thin: ThinMatrices, numbers: Sequence[int]) -> Tensor:
        """Return some matrices of a vector, which have one shape."""
        starts = [thin.starts[number] for number in numbers]
        return self.equal_matrices(x, starts, thin.shapes[numbers[0]])

    def _in_order(self, pieces: dict[int, Tensor]) -> Tensor:
        """Return numbered pieces as one vector."""
        ordered = [self.reshape(pieces[number], (-1,)) for number in range(len(pieces))]
        return self.concat(ordered) if ordered else self.zeros((0,))

    def expand_factors(
        self,
        x: Tensor,
        out: Tensor,
        matrices: FactoredMatrices,
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
            matrices: in x.
            sent: their thin factors P and Q one after another, float32 [rows * rank of all] and
                [columns * rank of all]; a matrix is P Q^T.
            mean: likewise.
            between: values of the second where there is no matrix; the first is 0 there.
        """
        if self.native is not None:
            outputs = self.writable(out), self.writable(x)
            inputs = self.numbers_of(matrices), x, *sent, *mean, between
            rest, total = self.native("expand_factors", inputs, outputs)
            return rest, total
        gaps = matrices.between(x.shape[0])

        def vector(factors: tuple[Tensor, Tensor], rest: Sequence[Tensor]) -> Tensor:
            pieces = dict(zip((start for start, _ in gaps), rest))
            for numbers in matrices.alike:
                p = self._thin(factors[0], matrices.p, numbers)
                q = self._thin(factors[1], matrices.q, numbers)
                product = self.matmul(p, self.transpose(q, (0, 2, 1)))
                pieces |= {
                    matrices.matrices[number].start: self.reshape(product[at], (-1,))
                    for at, number in enumerate(numbers)
                }
            ordered = [pieces[start] for start in sorted(pieces)]
            return self.concat(ordered) if ordered else x

        uncovered, at = [], 0
        for start, end in gaps:
            uncovered.append(between[at : at + end - start])
            at += end - start
        products = vector(sent, [x[start:end] for start, end in gaps])
        rest = self.overwrite(out, x - products)
        return rest, self.overwrite(x, vector(mean, uncovered))

    def unturned(self, flat: Tensor, shape: Sequence[int], order: Sequence[int]) -> Tensor:
        """Undo the axis order of a vector that runs through `shape` in `order`, maybe beyond."""
        flat = flat[: prod(shape)]
        if tuple(order) == tuple(range(len(order))):
            return flat
        turned = self.reshape(flat, tuple(shape[axis] for axis in order))
        return self.transpose(turned, [order.index(axis) for axis in range(len(order))])
