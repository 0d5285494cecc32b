"""Conversion of numbers to bytes, and of codes to bits."""

from __future__ import annotations

import torch

from hvd_gradcomp.ops import Tensor
from hvd_gradcomp.ops.torch.base import DTYPES, WORD, Base, low_word

_compiling = getattr(getattr(torch, "compiler", None), "is_compiling", lambda: False)


class BitPacking(Base):
    """Ops that convert numbers to bytes, and codes to bits."""

    def to_bytes(self, x: Tensor, dtype: str) -> Tensor:
        narrow = low_word(x) if dtype == "uint32" else x.to(DTYPES[dtype])
        return narrow.contiguous().view(torch.uint8)

    def from_bytes(self, x: Tensor, dtype: str) -> Tensor:
        if dtype in ("int8", "uint8"):
            return x.view(DTYPES[dtype]).to(torch.int64)
        if _compiling():  # which cannot look where a tensor lies in its storage
            x = x.clone(memory_format=torch.contiguous_format)
        elif dtype not in ("uint32", "float32") or not _whole_words(x):
            x = x.contiguous()
        if dtype == "uint32":
            return x.view(torch.int32).to(torch.int64) & WORD
        return x.view(DTYPES[dtype])

    def length(self, x: Tensor) -> int:
        return x.shape[-1]


def _whole_words(x: Tensor) -> bool:
    """Return True if the bytes can be viewed as 32-bit words in place."""
    return x.stride(-1) == 1 and not any(n % 4 for n in (*x.stride()[:-1], x.storage_offset()))
