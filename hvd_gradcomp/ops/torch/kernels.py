"""Calls of the C kernels with PyTorch's tensors, by the convention of `c/calls.h`."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import torch

from hvd_gradcomp.ops import PayloadError, Tensor

_DTYPES = {torch.uint8: 1, torch.int64: 2, torch.float32: 3, torch.bool: 4}
_TYPECODES = {"q": 2, "B": 4}  # an array of numbers costs less than a tensor
_NO_MEMORY, _BEYOND = -1, -2


class Kernels:
    """Kernels of a C library, with as many threads as PyTorch takes.

    Args:
        library: as `ops.native` loads it.
    """

    def __init__(self, library: Any) -> None:
        self.library = library
        self.reverse = library.reverse
        self._numbers: dict[str, int] = {}
        self._call = library.kernel_call
        # Reused: fresh pages cost as much as a kernel.
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._scratch = 0, 0  # its address and size

    def __call__(
        self,
        name: str,
        inputs: Sequence[Tensor | array[int]],
        outputs: Sequence[Tensor | array[int]],
        ints: Sequence[int] = (),
        floats: Sequence[float] = (),
    ) -> None:
        """Run a kernel.

        Args:
            name: in the table of `c/calls.c`, which says what the kernel takes and gives.
            inputs: on the host, with contiguous rows; arrays of "q" are int64, of "B" bool.
            outputs: likewise; may be inputs where the kernel writes in place.
            ints, floats: further arguments.

        Raises:
            PayloadError: an index points outside of the bucket.
            ValueError: the arguments do not fit together.
        """
        if name not in self._numbers:
            self._numbers[name] = self.library.kernel_number(name.encode())
        buffers = array("q", [n for x in (*inputs, *outputs) for n in _buffer(x)])
        integers, reals = array("q", ints), array("d", floats)
        counts = len(inputs), len(outputs), len(integers), len(reals)
        while True:
            scratch, room = self._scratch
            sizes = array("q", (*counts, room, torch.get_num_threads()))
            needed = self._call(
                self._numbers[name],
                buffers.buffer_info()[0],
                sizes.buffer_info()[0],
                integers.buffer_info()[0],
                reals.buffer_info()[0],
                scratch,
            )
            if needed <= 0:
                break
            self._memory = torch.empty(needed, dtype=torch.uint8, device="cpu")
            self._scratch = self._memory.data_ptr(), needed
        if needed == _BEYOND:
            raise PayloadError(
                "an index points outside of its bucket, or does not ascend: a payload is damaged"
            )
        if needed == _NO_MEMORY:
            raise MemoryError("no memory to compress a bucket with")
        if needed:
            raise ValueError(f"{name}: {self.library.kernel_error().decode()}")


def _buffer(x: Tensor | array[int]) -> tuple[int, ...]:
    """Return the numbers of a struct `buffer`."""
    if isinstance(x, array):
        return x.buffer_info()[0], _TYPECODES[x.typecode], 1, 1, len(x), 0, -1
    rank, dtype = x.dim(), _DTYPES[x.dtype]
    if rank == 2:
        return x.data_ptr(), dtype, 2, *x.shape, x.stride(0) * x.element_size(), -1
    return x.data_ptr(), dtype, rank, 1, x.numel(), 0, -1


def walkable(x: Tensor) -> Tensor:
    """Return x with rows that C can traverse: contiguous, a multiple of 4 bytes apart."""
    apart = x.stride(0) * x.element_size(), x.storage_offset() * x.element_size()
    aligned = x.stride(1) == 1 and not any(number % 4 for number in apart)
    return x if aligned else x.contiguous()
