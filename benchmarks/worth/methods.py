"""Ways to exchange that `make worth` compares, and the tasks that it trains."""

from __future__ import annotations

from dataclasses import dataclass

STOCK = "stock"


@dataclass(frozen=True)
class Method:
    """How the ranks of a training exchange.

    Attributes:
        title: in tables and figures.
        compressor: an expression of hvd_gradcomp's names.
        local: arguments of `LocalSteps`; empty for an exchange in each step.
        library: "" for this package over Horovod; "horovod" or "ddp" for these without it.
        hook_rank: of PyTorch's PowerSGD hook, with "ddp"; 0 for none.
        lead: steps before those that are timed, in which payloads settle.
    """

    title: str
    compressor: str = "NoneCompressor()"
    local: str = ""
    library: str = ""
    hook_rank: int = 0
    lead: int = 5


@dataclass(frozen=True)
class Training:
    """A task of `benchmarks.papers`, its optimizer, and how far it is trained.

    Attributes:
        task: "transformer" or "images".
        title: in tables and figures.
        optimizer: "adamw", or "sgd" with momentum 0.9.
        rate: of learning, constant.
        goal: the target is the loss of dense gradients after so many steps.
        methods: by key; the first is stock Horovod, uncompressed.
    """

    task: str
    title: str
    optimizer: str
    rate: float
    goal: int
    methods: dict[str, Method]


AVERAGE = "outer=OuterSGD(1, 0)"
COMMON = {
    STOCK: Method("Horovod, uncompressed", library="horovod"),
    "ddp": Method("DDP, uncompressed", library="ddp"),
    "bf16": Method("bfloat16", "BF16Compressor()"),
    "int8": Method("Int8", "Int8Compressor()"),
    "qsgd": Method("QSGD, 4 bits", "QSGDCompressor(bits=4)"),
    "power": Method("PowerSGD, rank 4", "PowerSGDCompressor(rank=4)"),
    "hook": Method("DDP's powerSGD_hook, rank 4", library="ddp", hook_rank=4, lead=15),
    "variance": Method(
        "Variance, alpha 1",
        "VarianceCompressor(alpha=1, capacity='latest', index_coding='elias_fano')",
        lead=60,
    ),
    "egc": Method("EGC, K 1,024", "EGCCompressor(K=1024, momentum={momentum})"),
    "chunked": Method("chunked top-k", "ChunkedTopKCompressor()"),
    "local": Method("LocalSteps, 15", local=f"every=15, {AVERAGE}"),
    "local-int8": Method("LocalSteps, 15, Int8", "Int8Compressor()", f"every=15, {AVERAGE}"),
    "local-int8-5": Method("LocalSteps, 5, Int8", "Int8Compressor()", f"every=5, {AVERAGE}"),
    "denser-5": Method(
        "LocalSteps, 5, chunked top-k of 1/8 in 4 bits",
        "ChunkedTopKCompressor(k=512, values='int4', decay=1)",
        f"every=5, {AVERAGE}",
    ),
    "quarter-5": Method(
        "LocalSteps, 5, chunked top-k of 1/4 in 4 bits",
        "ChunkedTopKCompressor(k=1024, values='int4', decay=1)",
        f"every=5, {AVERAGE}",
    ),
    "quarter-10": Method(
        "LocalSteps, 10, chunked top-k of 1/4 in 4 bits",
        "ChunkedTopKCompressor(k=1024, values='int4', decay=1)",
        f"every=10, {AVERAGE}",
    ),
    "denser-10": Method(
        "LocalSteps, 10, chunked top-k of 1/8 in 4 bits",
        "ChunkedTopKCompressor(k=512, values='int4', decay=1)",
        f"every=10, {AVERAGE}",
    ),
    "denser-10-late": Method(
        "LocalSteps, 10, chunked top-k of 1/8 in 4 bits, 2 steps late",
        "ChunkedTopKCompressor(k=512, values='int4', decay=1)",
        f"every=10, delay=2, {AVERAGE}",
    ),
    "denser-5-late": Method(
        "LocalSteps, 5, chunked top-k of 1/8 in 4 bits, 1 step late",
        "ChunkedTopKCompressor(k=512, values='int4', decay=1)",
        f"every=5, delay=1, {AVERAGE}",
    ),
    "sparse-5": Method("SparseLoCo, 5", "ChunkedTopKCompressor()", f"every=5, {AVERAGE}"),
    "sparse-15": Method("SparseLoCo, 15", "ChunkedTopKCompressor()", f"every=15, {AVERAGE}"),
    "dgc": Method(
        "DGC, 0.1 %, warm-up", "after(60, None, DGCCompressor(momentum={momentum}))", lead=65
    ),
}
TASKS = {
    "transformer": Training(
        "transformer", "transformer on text, AdamW", "adamw", 0.001, 420, COMMON
    ),
    "images": Training("images", "VGG on clothes, SGD with momentum", "sgd", 0.05, 300, COMMON),
}
LOOK = 30  # steps between looks at the loss; a multiple of all numbers of local steps
TIMED = 30  # steps, likewise
LIMIT = 3  # times the goal: who has not reached the target by then never does
SEPARATE = 40  # steps that are timed without any exchange
MARK = "WORTH "  # begins a worker's line with a result
