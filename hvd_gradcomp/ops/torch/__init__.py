"""The verbs in PyTorch.

On a CPU a large bucket is worked through in tiles that stay in the second-level cache, and
comparisons go through float32, where ATen has vector code (`a > b` into bool has none: measured
4 times slower than comparing in place and converting).

On CUDA no verb waits for the device. What the host must know (how many elements the ranks wanted)
is copied to pinned memory and read one step later; a payload that does not check out adds nothing
to the result of its step and raises at the next step, before anything else is sent.
"""

from __future__ import annotations

from hvd_gradcomp.ops.torch.bitpack import Bytewise
from hvd_gradcomp.ops.torch.creation import Making
from hvd_gradcomp.ops.torch.elementwise import Elementwise
from hvd_gradcomp.ops.torch.header import Framing
from hvd_gradcomp.ops.torch.host import Control
from hvd_gradcomp.ops.torch.indexing import Placing
from hvd_gradcomp.ops.torch.matrices import Matrices
from hvd_gradcomp.ops.torch.quantization import Coding
from hvd_gradcomp.ops.torch.reduction import Ordering
from hvd_gradcomp.ops.torch.searching import Searching


class TorchOps(
    Making, Elementwise, Placing, Ordering, Matrices, Bytewise, Searching, Framing, Coding, Control
):
    """Eager PyTorch on one device.

    Args:
        device: where buckets live.
        static: keep to the verbs that a GPU and a compiler need, also on a CPU. The tests use it
            to hold both ways to the same bytes.
        kernels: take the passes in Triton; needs `static` where the device is no GPU. None takes
            them on CUDA where Triton can be loaded.
    """
