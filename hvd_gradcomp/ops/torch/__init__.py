"""Tensor ops in PyTorch.

On a CPU a large bucket is processed in tiles that stay in the second-level cache, and comparisons
go through float32, where ATen has vector code (`a > b` into bool has none: measured 4 times slower
than comparing in place and converting).

On CUDA no op waits for the device. Numbers that the host needs (how many elements the ranks wanted)
are copied to pinned memory and read one step later. A payload that fails its checks adds nothing
to the result of its step, and raises at the next step, before anything else is sent.
"""

from __future__ import annotations

from hvd_gradcomp.ops.torch.bitpack import BitPacking
from hvd_gradcomp.ops.torch.creation import Creation
from hvd_gradcomp.ops.torch.elementwise import Elementwise
from hvd_gradcomp.ops.torch.header import Headers
from hvd_gradcomp.ops.torch.host import HostControl
from hvd_gradcomp.ops.torch.indexing import Indexing
from hvd_gradcomp.ops.torch.matrices import Matrices
from hvd_gradcomp.ops.torch.quantization import Quantization
from hvd_gradcomp.ops.torch.reduction import Reduction
from hvd_gradcomp.ops.torch.searching import Searching


class TorchOps(
    Creation,
    Headers,
    Quantization,
    BitPacking,
    Matrices,
    Reduction,
    Indexing,
    Elementwise,
    Searching,
    HostControl,
):
    """Eager PyTorch ops on one device.

    Args:
        device: where buckets live.
        static: keep to the ops that a GPU and a compiler need, also on a CPU. The tests use it to
            compare both variants byte by byte.
        kernels: use the fused kernels in Triton; needs `static` unless the device is a GPU. None
            uses them on CUDA if Triton can be loaded.
    """
