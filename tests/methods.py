"""Every method of the suite, with settings that make small random gradients pass its rule.

Each test that a method has to pass is run over this list; a new method is added here once.
"""

from __future__ import annotations

from hvd_gradcomp import (
    Compressor,
    DGCCompressor,
    EGCCompressor,
    FP16Compressor,
    GradientDroppingCompressor,
    HybridCompressor,
    NoneCompressor,
    OneBitCompressor,
    QSGDCompressor,
    ScaleComCompressor,
    SparseGDCompressor,
    StromCompressor,
    TernGradCompressor,
    VarianceCompressor,
    after,
)

LINEAR: list[Compressor] = [NoneCompressor(), FP16Compressor()]
WORDS: list[Compressor] = [
    VarianceCompressor(alpha=0.5),
    VarianceCompressor(alpha=1.5, zeta=0.9, feedback_rounding=True),
    HybridCompressor(tau=0.5),
    StromCompressor(tau=0.7),
]
LARGEST: list[Compressor] = [
    SparseGDCompressor(density=0.05),
    SparseGDCompressor(density=0.02, index_coding="int32"),
    GradientDroppingCompressor(ratio=0.95),
    DGCCompressor(density=0.03, momentum=0.9),
    DGCCompressor(density=0.02, momentum=0.5, nesterov=True, clip_norm=2.0, warmup_steps=6),
    EGCCompressor(K=20, momentum=0.9, entropy_interval=3),
    EGCCompressor(K=40, bins=16, momentum=0.0, entropy_interval=1),
]
LEADER: list[Compressor] = [
    ScaleComCompressor(density=0.05),
    ScaleComCompressor(density=0.1, beta=0.5),
]
QUANTIZED: list[Compressor] = [
    QSGDCompressor(),
    QSGDCompressor(bits=3, bucket_size=48, norm="l2", seed=5),
    QSGDCompressor(bits=8, exchange="two_shot"),
    TernGradCompressor(),
    TernGradCompressor(clip=1.5, exchange="two_shot"),
    OneBitCompressor(),
    OneBitCompressor(exchange="two_shot"),
]
PHASED: list[Compressor] = [
    after(3, StromCompressor(tau=0.7), DGCCompressor(density=0.05, momentum=0.9)),
]
EVERY = LINEAR + WORDS + LARGEST + LEADER + QUANTIZED + PHASED
ONE_OF_EACH = list({type(c): c for c in reversed(EVERY)}.values())[::-1]
CLASSES = sorted(
    {type(c) for c in EVERY if type(c).__name__.endswith("Compressor")},
    key=lambda cls: cls.__name__,
)
