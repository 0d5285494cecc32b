"""Every method of the suite, with settings that make small random gradients pass its rule.

Each test that a method has to pass is run over this list; a new method is added here once.
"""

from __future__ import annotations

from hvd_gradcomp import (
    Compressor,
    FP16Compressor,
    HybridCompressor,
    NoneCompressor,
    StromCompressor,
    VarianceCompressor,
)

LINEAR: list[Compressor] = [NoneCompressor(), FP16Compressor()]
SPARSE: list[Compressor] = [
    VarianceCompressor(alpha=0.5),
    VarianceCompressor(alpha=1.5, zeta=0.9, feedback_rounding=True),
    HybridCompressor(tau=0.5),
    StromCompressor(tau=0.7),
]
EVERY = LINEAR + SPARSE
CLASSES = sorted({type(c) for c in EVERY}, key=lambda cls: cls.__name__)
