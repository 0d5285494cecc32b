"""Ways to exchange that are compared: those of PyTorch, and ours."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Method:
    """Exchange of a training's ranks.

    Attributes:
        title: in tables and figures.
        compressor: of ours, an expression of hvd_gradcomp's names; "" for none.
        local: arguments of `ddp.local_steps`, with `rate` for the highest rate of learning, and
            `warmup` for the steps of its warm-up; "" for an exchange in each step.
        passes: whose gradients are added up before an exchange and a step.
        peer: of PyTorch, "powerSGD_hook" or "PostLocalSGDOptimizer".
        inner: "muon" in the place of the recipe's optimizer, for matrices.
        lead: steps before those that are timed, in which payloads settle.
        sure: three seeds, since it is recommended or refuted.
        dense_first: the steps of the rate's warm-up are uncompressed.
    """

    title: str
    compressor: str = ""
    local: str = ""
    passes: int = 1
    peer: str = ""
    inner: str = ""
    lead: int = 5
    sure: bool = False

    @property
    def dense_first(self) -> bool:
        return "warmup" in self.local + self.compressor or self.peer == "PostLocalSGDOptimizer"

    @property
    def timed(self) -> int:
        """Steps to time: whole rounds."""
        rare = bool(self.local) or self.peer == "PostLocalSGDOptimizer"
        return 2 * PERIOD if rare else max(8, self.passes)


PERIOD = 15
EIGHTH = "ChunkedTopKCompressor(k=512, values='int4', decay=1)"
QUARTER = "ChunkedTopKCompressor(k=1024, values='int4', decay=1)"
FIRST = "warmup_steps=warmup"
NESTEROV = "outer=OuterSGD(0.7, 0.9)"
DENSE = "dense"
METHODS = {
    DENSE: Method("dense", sure=True),
    "accumulate-4": Method("gradients of 4 steps", passes=4, sure=True),
    "accumulate-16": Method("gradients of 16 steps", passes=16),
    "post-local": Method("PostLocalSGDOptimizer, every 15", peer="PostLocalSGDOptimizer", lead=10),
    "hook": Method("powerSGD_hook, rank 4", peer="powerSGD_hook", lead=15),
    "bf16": Method("bfloat16", "BF16Compressor()"),
    "int8": Method("Int8", "Int8Compressor()"),
    "qsgd": Method("QSGD, 4 bits", "QSGDCompressor(bits=4)", sure=True),
    "power": Method("PowerSGD, rank 4", "PowerSGDCompressor(rank=4)"),
    "variance": Method("Variance, alpha 1", "VarianceCompressor(alpha=1, moments='step')", lead=60),
    "egc": Method("EGC, K 1,024", "EGCCompressor(K=1024, momentum={momentum})"),
    "dgc": Method(
        "DGC, 0.1 %, dense first",
        "after({warmup}, None, DGCCompressor(momentum={momentum}))",
        lead=15,
    ),
    "chunked": Method("chunked top-k, 1/64", "ChunkedTopKCompressor()"),
    "local": Method("every 15, averaged", local="every=15", sure=True),
    "local-first": Method("every 15, averaged, dense first", local=f"every=15, {FIRST}"),
    "local-int8": Method("every 15, averaged, Int8", "Int8Compressor()", "every=15", sure=True),
    "local-int8-5": Method("every 5, averaged, Int8", "Int8Compressor()", "every=5", sure=True),
    "eighth-5": Method("every 5, averaged, 1/8 in 4 bits", EIGHTH, "every=5", sure=True),
    "eighth-15": Method("every 15, averaged, 1/8 in 4 bits", EIGHTH, "every=15"),
    "quarter-5": Method("every 5, averaged, 1/4 in 4 bits", QUARTER, "every=5"),
    "sparse-15": Method("every 15, averaged, SparseLoCo", "ChunkedTopKCompressor()", "every=15"),
    "nesterov": Method("every 15, Nesterov", local=f"every=15, {NESTEROV}"),
    "nesterov-first": Method(
        "every 15, Nesterov, dense first", local=f"every=15, {NESTEROV}, {FIRST}", sure=True
    ),
    "nesterov-int8": Method(
        "every 15, Nesterov, dense first, Int8",
        "Int8Compressor()",
        f"every=15, {NESTEROV}, {FIRST}",
        sure=True,
    ),
    "nesterov-eighth": Method(
        "every 15, Nesterov, dense first, 1/8 in 4 bits",
        EIGHTH,
        f"every=15, {NESTEROV}, {FIRST}",
    ),
    "quadratic": Method(
        "quadratic rule from 5, averaged, Int8",
        "Int8Compressor()",
        "every=QuadraticRule(rate * 5 ** .5, base=5)",
    ),
    "muon": Method("dense, Muon", inner="muon"),
    "muon-local": Method(
        "every 15, Nesterov, dense first, Muon, 2 bits",
        "ChunkedTopKCompressor(k=4096, values='int2', decay=1)",
        f"every=15, {NESTEROV}, {FIRST}",
        inner="muon",
    ),
}
PLAIN = (DENSE, "accumulate-4", "accumulate-16")  # nothing is compressed, and replicas stay equal
MAIN = (  # methods of the larger models
    DENSE, "accumulate-4", "post-local", "hook", "qsgd", "local-int8", "local-int8-5",
    "eighth-5", "nesterov-int8",
)  # fmt: skip
