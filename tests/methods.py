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
    GradiVeQCompressor,
    HybridCompressor,
    LGCCompressor,
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
# What these learn is rounded by the framework and the machine, so it has no golden bytes; and they
# need more steps than others to go through their phases.
LEARNED: list[Compressor] = [
    GradiVeQCompressor(ratio=4, warmup_steps=20, sample_steps=30, compress_steps=60),
    GradiVeQCompressor(
        loss_threshold=0.1,
        warmup_steps=10,
        sample_steps=40,
        compress_steps=70,
        resample_loss=0.95,
        sampling="qsgd",
        feedback=True,
    ),
    LGCCompressor(alpha=0.05, full_steps=40, train_steps=80, ae_lr=0.005, momentum=0.9),
    LGCCompressor(
        alpha=0.05, full_steps=20, train_steps=60, ae_lr=0.005, momentum=0.0, feedback="paper"
    ),
    LGCCompressor(
        "parameter_server", alpha=0.05, full_steps=40, train_steps=80, ae_lr=0.005, momentum=0.9
    ),
    LGCCompressor(
        "parameter_server",
        alpha=0.05,
        full_steps=20,
        train_steps=60,
        ae_lr=0.005,
        common_rank=0,
        index_coding="delta",
        feedback="paper",
        momentum=0.5,
        retrain_loss=50.0,
    ),
]
EVERY = LINEAR + WORDS + LARGEST + LEADER + QUANTIZED + PHASED
ONE_OF_EACH = list({type(c): c for c in reversed(EVERY)}.values())[::-1]
# One for each way to exchange, which is all that knows of how many ranks there are, and of MPI.
ONE_OF_EACH_EXCHANGE = [LINEAR[0], WORDS[0], LARGEST[3], LEADER[0], *QUANTIZED[2:4], PHASED[0]]
CLASSES = sorted(
    {type(c) for c in EVERY + LEARNED if type(c).__name__.endswith("Compressor")},
    key=lambda cls: cls.__name__,
)


def methods_by(kind: str, ranks: int) -> list[Compressor]:
    """What goes through a TensorFlow frontend; by `fit` on two ranks all methods.

    The others share one method of each collective, on gloo and on MPI.
    """
    if kind == "fit" and ranks == 2:
        return ONE_OF_EACH
    if ranks == 4:
        return [WORDS[0], QUANTIZED[2]] if kind == "fit" else [LINEAR[0], LEADER[0], PHASED[0]]
    return [LINEAR[0], LARGEST[3], LEADER[0]] if kind == "graph" else ONE_OF_EACH[:4]


def learned_by(kind: str, ranks: int) -> list[Compressor]:
    """Settings of the methods that learn; each framework goes through each method.

    The parameter server takes longest to trace, and a basis knows of no ranks.
    """
    if kind == "torch":
        return LEARNED if ranks == 2 else LEARNED[::2]
    if kind == "graph":
        return LEARNED[1::4]
    return LEARNED[:4:2] if ranks == 2 else LEARNED[2:3]
