"""Tensor ops: everything that an algorithm may do to a tensor, implemented once per framework.

Rules:

* A tensor is opaque to `algorithms/`, `codecs/` and `method/patterns.py`. It takes Python's
  arithmetic, comparison and `&`, `|`, `~` operators, slicing, and the ops of `interface/`; nothing
  else.
* Integers are int64 (or uint8 for bytes), reals are float32. TensorFlow keeps int32 on the host
  even on a GPU, so int32 appears only where bytes are encoded and decoded.
* No op fuses `+` after `*`: a fused multiply-add rounds once, and then one framework would send an
  element that the other keeps.
* A *donating* op may write into its first argument. Use the result, never the argument.
* An op whose result shape depends on values needs `dynamic_shapes`; `codecs.compaction` offers the
  static counterpart for a GPU and for XLA.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

from hvd_gradcomp.ops.errors import NonFiniteGradientError as NonFiniteGradientError
from hvd_gradcomp.ops.errors import PayloadError as PayloadError
from hvd_gradcomp.ops.interface.header import Headers
from hvd_gradcomp.ops.interface.quantization import Quantization
from hvd_gradcomp.ops.interface.searching import Searching
from hvd_gradcomp.ops.tensors import Tensor as Tensor

LOGGER = logging.getLogger("hvd_gradcomp")


class Ops(Headers, Quantization, Searching):
    """Tensor ops of one framework on one device.

    Attributes:
        threshold_kernels: `ops.fused.ThresholdKernels`, or its counterpart for a GPU; None without
            kernels.
        topk_kernels: likewise for `ops.fused.TopKKernels`.
        next_level: a fused `CapacitySchedule.next_level`; None if plain ops are as good.
    """

    threshold_kernels: Any = None
    next_level: Any = None
    topk_kernels: Any = None


def ops_of(tensor: Any) -> Ops:
    """Return the ops of the framework that this tensor belongs to, without importing any other."""
    for base in type(tensor).__mro__:
        root = base.__module__.partition(".")[0]
        if root == "torch" and "torch" in sys.modules:
            from hvd_gradcomp.ops.torch import TorchOps

            return TorchOps(tensor.device)
        if root == "tensorflow" and "tensorflow" in sys.modules:
            from hvd_gradcomp.ops.tensorflow import TensorFlowOps

            return TensorFlowOps()
    raise TypeError(f"expected a torch or TensorFlow tensor, got {type(tensor).__name__}")
