"""Every method of the suite, with settings that make small random gradients pass its rule.

Each test that a method has to pass is run over these lists; a new method is added to its family
here, once. A test that is about one of them takes it by its name.
"""

from __future__ import annotations

from collections.abc import Iterable

from examples.extending.power_iteration import PowerIterationCompressor
from examples.extending.random_stretch import RandomStretchCompressor
from hvd_gradcomp import (
    ACPSGDCompressor,
    BF16Compressor,
    ChunkedTopKCompressor,
    Compressor,
    DeMoCompressor,
    DGCCompressor,
    EFSignSGDCompressor,
    EGCCompressor,
    FP8Compressor,
    FP16Compressor,
    GradientDroppingCompressor,
    GradiVeQCompressor,
    HybridCompressor,
    Int8Compressor,
    LGCCompressor,
    NaturalCompressor,
    NoneCompressor,
    OkTopKCompressor,
    OneBitCompressor,
    PowerSGDCompressor,
    QSGDCompressor,
    RandomKCompressor,
    ScaleComCompressor,
    SignumCompressor,
    SparseGDCompressor,
    StromCompressor,
    TernGradCompressor,
    VarianceCompressor,
    after,
    balanced,
    robust,
)
from hvd_gradcomp.codecs.sparse import SparseCompressor, StepInputs
from hvd_gradcomp.method import wire
from hvd_gradcomp.method.compressor import Context


def encode_step(compressor, ops, layout, level, step, gradient, state):
    """A step's payload of a sparse method, and the state after it."""
    context = Context(layout, 0, 1, step)
    return compressor.encode(level, StepInputs(compressor, ops, context, gradient, state))


def decode_step(compressor, ops, layout, payloads, out):
    """The sum of a sparse method's payloads, as received."""
    if isinstance(compressor, SparseCompressor):
        context = Context(layout, 0, payloads.bodies.shape[0], 0)
        header = wire.Header(0, 0, 0, payloads.level.index, 0, 0)
        _, bodies = compressor.check_bodies(ops, context, payloads.level, header, payloads.bodies)
        payloads = payloads._replace(bodies=bodies)
    return compressor.decode_sum(ops, layout, payloads, out)


NONE = NoneCompressor()
FP16 = FP16Compressor()
VARIANCE = VarianceCompressor(alpha=0.5)
VARIANCE_FED_BACK = VarianceCompressor(alpha=1.5, zeta=0.9, feedback_rounding=True)
HYBRID = HybridCompressor(tau=0.5)
STROM = StromCompressor(tau=0.7)
STROM_LATEST = StromCompressor(tau=0.7, capacity="latest")
VARIANCE_INT32 = VarianceCompressor(alpha=0.5, index_coding="int32")
HYBRID_INT32 = HybridCompressor(tau=0.5, capacity="latest", index_coding="int32")
SPARSE_GD = SparseGDCompressor(density=0.05)
SPARSE_GD_INT32 = SparseGDCompressor(density=0.02, index_coding="int32")
DROPPING = GradientDroppingCompressor(ratio=0.95)
DGC = DGCCompressor(density=0.03, momentum=0.9)
DGC_WARMED_UP = DGCCompressor(
    density=0.02, momentum=0.5, nesterov=True, clip_norm=2.0, warmup_steps=6
)
EGC = EGCCompressor(K=20, momentum=0.9, entropy_interval=3)
EGC_PLAIN = EGCCompressor(K=40, bins=16, momentum=0.0, entropy_interval=1)
EGC_INT32 = EGCCompressor(K=40, momentum=0.9, entropy_interval=3, index_coding="int32")
SCALECOM = ScaleComCompressor(density=0.05)
SCALECOM_FILTERED = ScaleComCompressor(density=0.1, beta=0.5)
QSGD = QSGDCompressor()
QSGD_BY_NORM = QSGDCompressor(bits=3, bucket_size=48, norm="l2", seed=5)
QSGD_TWO_SHOT = QSGDCompressor(bits=8, exchange="two_shot")
TERNGRAD = TernGradCompressor()
TERNGRAD_TWO_SHOT = TernGradCompressor(clip=1.5, exchange="two_shot")
ONEBIT = OneBitCompressor()
ONEBIT_TWO_SHOT = OneBitCompressor(exchange="two_shot")
TWO_PHASES = after(3, StromCompressor(tau=0.7), DGCCompressor(density=0.05, momentum=0.9))

LINEAR: list[Compressor] = [NONE, FP16]
WORDS: list[Compressor] = [VARIANCE, VARIANCE_FED_BACK, HYBRID, STROM, STROM_LATEST, VARIANCE_INT32]
LARGEST: list[Compressor] = [
    SPARSE_GD,
    SPARSE_GD_INT32,
    DROPPING,
    DGC,
    DGC_WARMED_UP,
    EGC,
    EGC_PLAIN,
    EGC_INT32,
]
LEADER: list[Compressor] = [SCALECOM, SCALECOM_FILTERED]
QUANTIZED: list[Compressor] = [
    QSGD,
    QSGD_BY_NORM,
    QSGD_TWO_SHOT,
    TERNGRAD,
    TERNGRAD_TWO_SHOT,
    ONEBIT,
    ONEBIT_TWO_SHOT,
]
PHASED: list[Compressor] = [TWO_PHASES]
# What these learn is rounded by the framework and the machine, so it has no golden bytes; and they
# need more steps than others to go through their phases.
GRADIVEQ = GradiVeQCompressor(ratio=4, warmup_steps=20, sample_steps=30, compress_steps=60)
GRADIVEQ_BY_LOSS = GradiVeQCompressor(
    loss_threshold=0.1,
    warmup_steps=10,
    sample_steps=40,
    compress_steps=70,
    resample_loss=0.95,
    sampling="qsgd",
    feedback=True,
)
LGC = LGCCompressor(alpha=0.05, full_steps=40, train_steps=80, ae_lr=0.005, momentum=0.9)
LGC_AS_PRINTED = LGCCompressor(
    alpha=0.05, full_steps=20, train_steps=60, ae_lr=0.005, momentum=0.0, feedback="paper"
)
LGC_SERVER = LGCCompressor(
    "parameter_server", alpha=0.05, full_steps=40, train_steps=80, ae_lr=0.005, momentum=0.9
)
LGC_SERVER_AS_PRINTED = LGCCompressor(
    "parameter_server",
    alpha=0.05,
    full_steps=20,
    train_steps=60,
    ae_lr=0.005,
    common_rank=0,
    index_coding="int32",
    feedback="paper",
    momentum=0.5,
    retrain_loss=50.0,
)
LEARNED: list[Compressor] = [
    GRADIVEQ,
    GRADIVEQ_BY_LOSS,
    LGC,
    LGC_AS_PRINTED,
    LGC_SERVER,
    LGC_SERVER_AS_PRINTED,
]
# Of no family, and in no package but the one of docs/extending.md.
OUTSIDE: list[Compressor] = [
    PowerIterationCompressor(),
    PowerIterationCompressor(rank=1, seed=3),
    RandomStretchCompressor(every=16),
    RandomStretchCompressor(every=2, seed=3),
]
# The methods of today whose payloads are equal on all frameworks to the bit; and those that
# multiply matrices, which rounds by framework and machine.
CHUNKED = ChunkedTopKCompressor(chunk=64, k=8)  # its state keeps the memory of gradients
OK_TOPK = OkTopKCompressor(density=0.05, exchange="two_shot")
TODAY: list[Compressor] = [
    BF16Compressor(exchange="allgather"),
    BF16Compressor("stochastic", "two_shot", feedback=True, seed=3),
    FP8Compressor(block_size=32, exchange="allgather"),
    FP8Compressor(power_of_two=True, exchange="two_shot", feedback=True),
    Int8Compressor(exchange="two_shot", feedback=True),
    Int8Compressor(rounding="stochastic", block_size=32, exchange="allgather"),
    CHUNKED,
    ChunkedTopKCompressor(chunk=32, k=4, values="int8", decay=1.0, mean="contributors"),
    ChunkedTopKCompressor(chunk=32, k=4, values="sign", max_norm=1.0),
    ChunkedTopKCompressor(chunk=32, k=4, values="int8", exchange="two_shot"),
    RandomKCompressor(density=0.25),
    RandomKCompressor(density=0.125, feedback=False, seed=3),
    EFSignSGDCompressor(),
    SignumCompressor(),
    NaturalCompressor("two_shot"),
    OK_TOPK,
    OkTopKCompressor(density=0.05, values="int8", exchange="two_shot", max_norm=1.0),
    OkTopKCompressor(density=0.05, values="int2", exchange="allgather"),
]
# Sparse methods with rounded values, or with plain indices.
ROUNDED: list[Compressor] = [
    SparseGDCompressor(density=0.05, values="int8"),
    SparseGDCompressor(density=0.05, index_coding="int32", values="bfloat16"),
    GradientDroppingCompressor(ratio=0.95, values="int4"),
    DGCCompressor(density=0.05, momentum=0.9, index_coding="int32", values="int2"),
    DGCCompressor(density=0.05, momentum=0.5, nesterov=True, warmup_steps=6, values="sign"),
    EGCCompressor(K=20, momentum=0.9, entropy_interval=3, values="int4"),
    EGCCompressor(K=20, momentum=0.0, entropy_interval=3, values="bfloat16"),
    ScaleComCompressor(density=0.05, values="int8"),
    ScaleComCompressor(density=0.1, beta=0.5, values="int2"),
]
INT32: list[Compressor] = [
    HYBRID_INT32,
    StromCompressor(tau=0.7, index_coding="int32"),
    SparseGDCompressor(density=0.02, index_coding="int32"),
    ScaleComCompressor(density=0.05, index_coding="int32"),
]
PRODUCTS: list[Compressor] = [
    PowerSGDCompressor(rank=3, min_ratio=1.0),
    ACPSGDCompressor(rank=2, min_ratio=1.0),
    DeMoCompressor(chunk=8, k=6),
    DeMoCompressor(chunk=8, k=4, values="int4", signed=False),
]
# Each rank's payload is decoded by itself.
ROBUST: list[Compressor] = [
    robust(None, "median"),
    robust(ChunkedTopKCompressor(chunk=64, k=8), "clip"),
    robust(QSGDCompressor(bits=4), "median"),
]
# What a sparse method sends goes by owners.
BALANCED: list[Compressor] = [
    balanced(StromCompressor(tau=0.7), "two_shot"),
    balanced(VARIANCE, "two_shot", "bfloat16"),
    balanced(HYBRID_INT32, "two_shot", slack=2.0),
    balanced(DGCCompressor(density=0.05, momentum=0.9, warmup_steps=6, clip_norm=1.0), "two_shot"),
]
EVERY = LINEAR + WORDS + LARGEST + LEADER + QUANTIZED + PHASED


def one_of_each(methods: Iterable[Compressor]) -> list[Compressor]:
    """Keep the first setting of each class."""
    by_class: dict[type, Compressor] = {}
    for one in methods:
        by_class.setdefault(type(one), one)
    return list(by_class.values())


ONE_OF_EACH, ONE_OF_TODAY = one_of_each(EVERY), one_of_each(TODAY)
# One for each way to exchange, which is all that knows of how many ranks there are, and of MPI.
ONE_OF_EACH_EXCHANGE = [NONE, VARIANCE, DGC, SCALECOM, QSGD_TWO_SHOT, TERNGRAD, TWO_PHASES]
CLASSES = sorted(
    {
        type(c)
        for c in EVERY + TODAY + PRODUCTS + LEARNED
        if type(c).__name__.endswith("Compressor")
    },
    key=lambda cls: cls.__name__,
)


def methods_by(kind: str, ranks: int) -> list[Compressor]:
    """What goes through a TensorFlow frontend; by `fit` on two ranks all methods.

    The others share one method of each collective, on gloo and on MPI.
    """
    if kind == "fit" and ranks == 2:
        return ONE_OF_EACH
    if ranks == 4:
        return [VARIANCE, QSGD_TWO_SHOT] if kind == "fit" else [NONE, SCALECOM, TWO_PHASES]
    return [NONE, DGC, SCALECOM] if kind == "graph" else [NONE, FP16, VARIANCE, HYBRID]


def learned_by(kind: str, ranks: int) -> list[Compressor]:
    """Settings of the methods that learn; each framework goes through each method.

    The parameter server takes longest to trace, and a basis knows of no ranks.
    """
    if kind == "torch":
        return LEARNED if ranks == 2 else [GRADIVEQ, LGC, LGC_SERVER]
    if kind == "graph":
        return [GRADIVEQ_BY_LOSS, LGC_SERVER_AS_PRINTED]
    return [GRADIVEQ, LGC] if ranks == 2 else [LGC]
