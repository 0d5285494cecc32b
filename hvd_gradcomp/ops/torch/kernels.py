"""Calls of the C kernels with PyTorch's tensors, by the convention of `c/calls.h`."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from hvd_gradcomp.ops import PayloadError, Tensor

_DTYPES = {torch.uint8: 1, torch.int64: 2, torch.float32: 3, torch.bool: 4}
_TYPECODES = {"q": 2, "B": 4}  # an array of numbers costs less than a tensor
_NO_MEMORY, _BEYOND = -1, -2


class Kernels:
    """Kernels of a C library, with as many threads as PyTorch takes.

    Args:
        library: as `ops.native` loads it.

    Attributes:
        memory: temporaries of the kernels, uint8; as large as the largest need so far.
    """

    def __init__(self, library: Any) -> None:
        self.library = library
        self.reverse = library.reverse
        self._numbers: dict[str, int] = {}
        self._call = library.kernel_call
        # Reused: fresh pages cost as much as a kernel.
        self.memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._scratch = 0, 0  # its address and size

    def __call__(
        self,
        name: str,
        inputs: Sequence[Tensor | array[int] | Rows],
        outputs: Sequence[Tensor | array[int]],
        ints: Sequence[int] = (),
        floats: Sequence[float] = (),
    ) -> Any:
        """Run a kernel.

        Args:
            name: in the table of `c/calls.c`, which says what the kernel takes and gives.
            inputs: on the host; arrays of "q" are int64. A tensor that is not contiguous is copied.
            outputs: contiguous; they may be inputs where the kernel writes in place. Arrays are of
                one number: of "q" int64, of "B" bool.
            ints, floats: further arguments.

        Returns:
            The outputs, a single one by itself; Python's bool and int for arrays.

        Raises:
            PayloadError: an index points outside of the bucket.
            ValueError: the arguments do not fit together.
        """
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = self.library.kernel_number(name.encode())
        # The list keeps copies alive until the kernel has run.
        tensors = [x.contiguous() if isinstance(x, torch.Tensor) else x for x in inputs]
        described: list[int] = []
        for x in tensors:
            described += _buffer(x)
        for x in outputs:
            described += _buffer(x)
        buffers = array("q", described)
        integers, reals = array("q", ints), array("d", floats)
        counts = len(inputs), len(outputs), len(integers), len(reals)
        while True:
            scratch, size = self._scratch
            sizes = array("q", (*counts, size, torch.get_num_threads()))
            needed = self._call(
                number,
                buffers.buffer_info()[0],
                sizes.buffer_info()[0],
                integers.buffer_info()[0],
                reals.buffer_info()[0],
                scratch,
            )
            if needed <= 0:
                break
            self.memory = torch.empty(needed, dtype=torch.uint8, device="cpu")
            self._scratch = self.memory.data_ptr(), needed
        if needed == _BEYOND:
            raise PayloadError(
                "an index points outside of its bucket, or does not ascend: a payload is damaged"
            )
        if needed == _NO_MEMORY:
            raise MemoryError("no memory to compress a bucket with")
        if needed:
            raise ValueError(f"{name}: {self.library.kernel_error().decode()}")
        if len(outputs) == 1:
            return _result(outputs[0])
        return [_result(x) for x in outputs]


class Rows(NamedTuple):
    """Input that need not be contiguous."""

    tensor: Tensor

    @classmethod
    def of(cls, x: Tensor) -> Rows:
        """Return x, or a copy unless its rows are contiguous and whole words apart."""
        stride = x.stride()
        apart = x.storage_offset() | (stride[0] if len(stride) > 1 else 0)
        aligned = stride[-1] == 1 and apart * x.element_size() % 4 == 0
        return cls(x if aligned else x.clone(memory_format=torch.contiguous_format))


def _buffer(x: Any) -> tuple[int, ...]:
    """Return the numbers of a struct `buffer` for a tensor, an array or `Rows`."""
    kind = type(x)
    if kind is array:
        address, length = x.buffer_info()
        return address, _TYPECODES[x.typecode], 1, 1, length, 0, -1
    apart = kind is Rows
    x = x.tensor if apart else x
    dtype, shape = _DTYPES[x.dtype], x.shape
    if len(shape) == 2:
        rows, length = shape
        stride = (x.stride(0) if apart else length) * x.element_size()
        return x.data_ptr(), dtype, 2, rows, length, stride, -1
    return x.data_ptr(), dtype, len(shape), 1, x.numel(), 0, -1


def _result(x: Tensor | array[int]) -> Any:
    """Return an output; the number in an array."""
    if type(x) is not array:
        return x
    return bool(x[0]) if x.typecode == "B" else x[0]
