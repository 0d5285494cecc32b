"""Base of all PyTorch ops."""

from __future__ import annotations

import importlib.util
import sys
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch

from hvd_gradcomp.core.row_groups import RowGroups
from hvd_gradcomp.ops import LOGGER, Ops, Tensor
from hvd_gradcomp.ops.fused import ThresholdKernels, TopKKernels
from hvd_gradcomp.ops.native import library
from hvd_gradcomp.ops.torch.kernels import Kernels, Rows

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "int64": torch.int64,
    "int32": torch.int32,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "bool": torch.bool,
}
_Kind = tuple[torch.dtype, int]  # dtype and elements of a tensor
WORD = 0xFFFFFFFF
TILE = 1 << 18  # elements: few enough to stay in cache, enough to amortize the calls
HEAD = 64  # bytes before a body, at most
CAPABILITY = (8, 0)  # the minimum; the lowest that tests compile kernels for
TRITON = (3, 6)  # the minimum; in older versions a denormal quotient is 0
_IN_TRITON = (
    *("group_maxima", "group_squares", "group_means", "group_norms", "clipped_maxima"),
    *("encode_levels", "add_levels", "encode_signs", "add_signs"),
)


class Base(Ops):
    """Base of all PyTorch ops: the device, reused memory, and the pending errors of a GPU."""

    in_place = True

    def __init__(
        self,
        device: torch.device | str = "cpu",
        static: bool = False,
        kernels: bool | None = None,
    ) -> None:
        self.device = torch.device(device)
        self.on_host = self.device.type == "cpu"
        self.dynamic_shapes = self.on_host and not static
        loaded = library() if self.dynamic_shapes else None
        self.native = None if loaded is None else Kernels(loaded)
        self.threshold_kernels: Any = ThresholdKernels(self) if self.native is not None else None
        self.topk_kernels: Any = TopKKernels(self) if self.native is not None else None
        self.kernels: Any = None
        self.quantizers: Any = None  # the kernels that quantize every element
        self.word_kernels: Any = None  # the kernels that code ascending indices
        if _has_kernels(self.device) if kernels is None else kernels:
            from hvd_gradcomp.ops.triton.common import Common
            from hvd_gradcomp.ops.triton.elias_fano import WordKernels
            from hvd_gradcomp.ops.triton.quantizers import Quantizers
            from hvd_gradcomp.ops.triton.threshold import ThresholdKernels as TritonThreshold
            from hvd_gradcomp.ops.triton.topk import TopKKernels as TritonTopK

            self.kernels, self.threshold_kernels = Common(self), TritonThreshold(self)
            self.topk_kernels, self.quantizers = TritonTopK(self), Quantizers(self)
            self.word_kernels = WordKernels(self)
            for op in _IN_TRITON:  # they replace the interface's
                setattr(self, op, getattr(self.quantizers, op))
            for op in ("encode_words", "decode_words"):
                setattr(self, op, getattr(self.word_kernels, op))
        self._numbers: dict[tuple[Any, str], array[int]] = {}  # by `numbers_of`
        self._spreads: dict[tuple[RowGroups, int], tuple[Tensor, ...]] = {}  # by `_by_group`
        self._tables: dict[tuple[Any, str], Tensor] = {}
        self._constants: dict[tuple[float, ...], Tensor] = {}
        self._pool: dict[torch.dtype, list[Tensor]] = {}
        self._lent: dict[torch.dtype, int] | None = None  # tensors lent by each pool, in a tile
        self._stream: Any = None  # CUDA: the stream of the last ops
        self._copied: Any = None  # CUDA: the event after the newest copy to the host
        self._pending: list[tuple[Sequence[str], Tensor, type[Exception]]] = []
        self._headless: Tensor | None = None  # see `body`
        self._kept: dict[int, _Kind] = {}  # what ops must not write to, by its address
        self._spare: dict[_Kind, list[Tensor]] = {}  # to write to instead
        self._count: Counter[_Kind] = Counter()  # tensors kept now
        self._peak: Counter[_Kind] = Counter()  # the most tensors kept at one time

    # -- a step that may be rolled back --------------------------------------------------------

    def snapshot(self, tensors: Iterable[Tensor]) -> None:
        """Protect tensors until `release_snapshot`: donating ops write elsewhere."""
        for x in tensors:
            place, kind = _place(x), (x.dtype, x.numel())
            if x.numel() > 1 and place not in self._kept:
                self._kept[place] = kind
                self._count[kind] += 1
                self._peak[kind] = max(self._peak[kind], self._count[kind])

    def release_snapshot(self, kept: Iterable[Tensor], now: Iterable[Tensor]) -> None:
        """End `snapshot`; tensors that are not in use now become memory for later steps.

        At most as many as were kept: ops that do not donate take none, and leave one in each step.
        """
        used = {_place(x) for x in now}
        for x in kept:
            kind = self._kept.pop(_place(x), None)
            if kind is None:
                continue
            self._count[kind] -= 1
            if _place(x) in used:
                continue
            spare = self._spare.setdefault(kind, [])
            if len(spare) < self._peak[kind]:
                spare.append(x)

    def release_spare(self) -> None:
        """Release the memory that is kept for the states of later steps."""
        self._spare.clear()

    def spare_memory(self) -> list[Tensor]:
        """Return the memory that is kept for the states of later steps."""
        return [x for some in self._spare.values() for x in some]

    def reused_memory(self) -> list[Tensor]:
        """Return tables and temporaries that are kept for later steps."""
        temporaries = [x for some in self._pool.values() for x in some]
        tables = [*self._tables.values(), *self._constants.values()]
        spreads = [x for some in self._spreads.values() for x in some]
        kernels = [] if self.native is None else [self.native.memory]
        payload = [] if self._headless is None else [self._headless]
        return [*temporaries, *tables, *spreads, *kernels, *payload]

    def writable(self, x: Tensor) -> Tensor:
        """Return memory for a donating op: x, or uninitialized memory like x if x is kept."""
        if not self._kept or _place(x) not in self._kept:
            return x
        spare = self._spare.get((x.dtype, x.numel()))
        if not spare:
            return torch.empty_like(x)
        out = spare.pop()  # a view would keep another tensor alive, which counts as a reference
        return out if out.shape == x.shape else out.view(x.shape)

    def writable_copy(self, x: Tensor) -> Tensor:
        """Return `writable(x)` with the content of x, for ops that write to a part."""
        out = self.writable(x)
        return out if out is x else out.copy_(x)

    def take_turn(self) -> None:
        """Make the next ops wait, on a GPU, for ops that were issued on another stream.

        The memory that ops and kernels reuse is shared by all buckets.
        """
        if self.device.type == "cuda":
            here = torch.cuda.current_stream(self.device)
            if self._stream is not None and self._stream != here:
                here.wait_stream(self._stream)
            self._stream = here

    # -- pending errors of a GPU ---------------------------------------------------------------

    def raise_found(self) -> None:
        """Raise the errors that a GPU has found in this step; waits for it."""
        if self._copied is not None:
            self._copied.synchronize()
            self._raise_pending()

    def require_async(self, facts: Iterable[tuple[Sequence[str], Tensor, type[Exception]]]) -> None:
        """Require staged facts, like `require`: (messages, bool [messages, world], error) each."""
        if not self.on_host:
            self._pending += facts
            return
        for fact in facts:
            raise_false(*fact)

    def _raise_pending(self) -> None:
        pending, self._pending = self._pending, []
        for messages, holds, error in pending:
            raise_false(messages, holds, error)

    # -- inputs and outputs of kernels ---------------------------------------------------------

    def numbers(self, values: Sequence[Any]) -> array[int]:
        return array("q", values)  # costs less than a tensor

    def numbers_of(self, static: Any, field: str = "numbers") -> array[int]:
        key = (static, field)
        if key not in self._numbers:
            self._numbers[key] = array("q", getattr(static, field))
        return self._numbers[key]

    def rows(self, x: Tensor) -> Rows:
        return Rows.of(x)

    def traversable(self, x: Tensor) -> bool:
        return x.dtype == torch.float32 and x.is_contiguous()

    def extent(self, n: int) -> int:
        return n

    def empty(self, shape: Sequence[int], dtype: str = "float32") -> Tensor:
        """Return memory regardless of PyTorch's default device and dtype."""
        return torch.empty(shape, dtype=DTYPES[dtype], device=self.device)

    def flag(self) -> array[int]:
        return array("B", (0,))

    def number(self) -> array[int]:
        return array("q", (0,))

    # -- memory --------------------------------------------------------------------------------

    def body(self, size: int, front: int = 0) -> Tensor:
        """Return memory for a body, with space in front for its frame if that comes next."""
        self._headless = self.empty((HEAD + front + size,), "uint8")
        return self._headless[HEAD + front :]

    def before(self, last: Tensor, size: int) -> Tensor | None:
        memory, self._headless = self._headless, None
        if memory is None or not len(last) or size > len(memory) - len(last):
            return None  # nothing has no address
        start = len(memory) - len(last)
        return memory[start - size :] if memory[start:].data_ptr() == last.data_ptr() else None

    def from_host(self, values: Sequence[Any], dtype: torch.dtype) -> Tensor:
        """Copy numbers from the host, by pinned memory: a copy from other memory would wait."""
        pinned = torch.tensor(values, dtype=dtype, device="cpu", pin_memory=not self.on_host)
        return pinned.to(self.device, non_blocking=True)

    def _scratch(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor | None:
        """Return memory for a temporary of one tile, lent until the next tile; None outside tiles.

        Fresh memory of this size returns to the system when it is freed, and the page faults of the
        next allocation cost more than the arithmetic.
        """
        if self._lent is None:
            return None
        dtype = dtype or x.dtype
        used = self._lent.get(dtype, 0)
        self._lent[dtype] = used + 1
        pool = self._pool.setdefault(dtype, [])
        if used == len(pool):
            pool.append(torch.empty(TILE, dtype=dtype, device=self.device))
        size = x.shape[0]
        return pool[used] if size == TILE else pool[used][:size]


@cache
def _triton_runs(device: torch.device) -> bool:
    """Return True if a test kernel runs on the GPU; else log a warning with the reason."""
    try:
        import triton

        from hvd_gradcomp.ops.triton.common import Common

        have = tuple(int(number) for number in triton.__version__.split(".")[:2])
        if torch.version.cuda is None:
            raise RuntimeError("kernels are for GPUs of NVIDIA's")
        if torch.cuda.get_device_capability(device) < CAPABILITY:
            raise RuntimeError("kernels need compute capability {}.{}".format(*CAPABILITY))
        if have < TRITON:
            raise RuntimeError("kernels need Triton {}.{}".format(*TRITON))
        kernels = Common(SimpleNamespace(device=device))
        kernels.check_finite(torch.zeros(1, dtype=torch.float32, device=device), "elements")
    except Exception as error:  # no C compiler, say, or a driver that is too old
        LOGGER.warning("%s goes without kernels, and is slower: %s", device, error)
        return False
    return True


def _has_kernels(device: torch.device) -> bool:
    """Return True if a device runs kernels; loading Triton after TensorFlow ends the process."""
    if device.type != "cuda":
        return False
    if "triton" not in sys.modules and (
        "tensorflow" in sys.modules or importlib.util.find_spec("triton") is None
    ):
        return False
    return _triton_runs(device)


def _place(x: Tensor) -> int:
    """Return the address of a tensor's storage."""
    return x.untyped_storage().data_ptr()


def low_word(x: Tensor) -> Tensor:
    """Return the low 32 bits of int64 in [0, 2**32) as int32: a narrowing cast is modulo 2**32."""
    return x.to(torch.int32)


def raise_false(messages: Sequence[str], holds: Tensor, error: type[Exception]) -> None:
    """Raise the first message that does not hold for all ranks; `holds` is [messages, world]."""
    if bool(holds.all()):
        return
    for message, fact in zip(messages, holds):
        if not bool(fact.all()):
            ranks = (~fact).nonzero().view(-1).tolist()
            raise error(message.replace("{ranks}", ", ".join(map(str, ranks))))
