"""Writes the table of all methods into `docs/algorithms/index.md`.

    python -m docs.methods

A row names a method, its page, what travels, and the optimizer that it is for. The other columns
come from the code. State is counted in the tensors of a bucket. Bytes are those that the method
states for the shapes of a model; where gradients decide them, they are those that
`benchmarks.ranks` has counted on that model. `tests/single/test_docs.py` holds the page to this.

A row also names the training that measured the method's default settings.
`tests/single/test_defaults.py` holds the code, that training, the docstring and the page together.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import NamedTuple

import hvd_gradcomp as gc
from hvd_gradcomp.codecs.sparse import SparseCompressor
from hvd_gradcomp.core.cost_model import Exchange, dense_exchange
from hvd_gradcomp.core.layers import Layer
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.method.compressor import Compressor, leaves
from hvd_gradcomp.method.handover import Handover, takes_momentum
from hvd_gradcomp.ops.torch import TorchOps
from hvd_gradcomp.planning.assignment import assign
from hvd_gradcomp.planning.methods import ExchangeMethod, Local, Momentum
from hvd_gradcomp.tuning.models import resnet50

PAGE = Path(__file__).parent / "algorithms" / "index.md"
COUNTED = Path(__file__).parent / "measured" / "ranks.json"
BEGIN, END = "<!-- table of docs.methods -->", "<!-- end of the table -->"
HOSTS = (2, 16, 128)
WORDS = {
    ("allreduce",): "allreduce",
    ("allreduce", "allreduce"): "two allreduces",
    ("allgather",): "allgather",
    ("alltoall", "allgather"): "two-shot",
    ("broadcast", "allreduce"): "broadcast, allreduce",
}
MOMENTA = "../fewer-exchanges.md#momenta-instead-of-gradients"
ANY, SGD, PLAIN_SGD, ADAM = "any", "SGD", "SGD without momentum", "Adam rather than SGD"
SPARSE = f"SGD; with Adam, [momenta]({MOMENTA})"
TAKES_OVER = "SGD, whose momentum it takes over"


class Measured(NamedTuple):
    """Training with a method's default settings.

    Attributes:
        file: in `docs/measured`.
        key: of the row there, or its `method`.
        unlike: settings in which the row differs from the defaults; "after" for uncompressed first
            steps. The page speaks of each.
    """

    file: str
    key: str
    unlike: tuple[str, ...] = ()


class Method(NamedTuple):
    """Row of the table.

    Attributes:
        code: how it is written; `compressor` is made of it, if none is given.
        page: of the method, from the page of the table.
        travels: what each host sends.
        optimizer: that it is for.
        counted: key in `docs/measured/ranks.json`, if gradients decide its bytes.
        exchange: names of the collectives, if neither its class nor its settings say them.
        in_step: local steps, or momenta; None for gradients.
        convolutions: the shapes are those of ResNet-50's convolutions, since it takes no others.
        measured: a training with the method's default settings, for one row of each method. If no
            row has one, docstring and page say "not measured".
        chosen: why the row has other settings than the defaults; the page of the table says it.
    """

    code: str
    page: str
    travels: str
    optimizer: str
    counted: str = ""
    exchange: str = ""
    in_step: ExchangeMethod | None = None
    convolutions: bool = False
    measured: Measured | None = None
    chosen: str = ""

    @property
    def settings(self) -> ExchangeMethod:
        """Return the method with the settings of the row."""
        return self.in_step or ExchangeMethod(eval(self.code, vars(gc)))

    @property
    def instance(self) -> Compressor:
        """Return the compressor, with a momentum if it takes one over."""
        compressor = self.settings.compressor
        if takes_momentum(compressor):
            assert isinstance(compressor, Handover)
            return compressor.corrected(0.9, False)
        return compressor


TODAY = "papers/today.json"
IN_GRADIENTS_UNIT = "a threshold is in the unit of gradients: this one fits those of this GPT"
METHODS = (
    Method("NoneCompressor()", "dense.md", "all elements", ANY, measured=Measured(TODAY, "none")),
    Method("FP16Compressor()", "dense.md", "16 bits an element", ANY),
    Method(
        "BF16Compressor()",
        "narrow.md",
        "16 bits an element",
        ANY,
        measured=Measured(TODAY, "bf16"),
    ),
    Method(
        "Int8Compressor()", "narrow.md", "8 bits an element", ANY, measured=Measured(TODAY, "int8")
    ),
    Method(
        "FP8Compressor()", "narrow.md", "8 bits an element", ANY, measured=Measured(TODAY, "fp8")
    ),
    Method(
        "NaturalCompressor()",
        "signs.md",
        "9 bits: a power of two, unbiased",
        ANY,
        measured=Measured(TODAY, "natural"),
    ),
    Method(
        "QSGDCompressor(bits=4)",
        "qsgd.md",
        "4 bits an element, unbiased",
        ANY,
        measured=Measured(TODAY, "qsgd"),
    ),
    Method(
        "TernGradCompressor()",
        "terngrad.md",
        "2 bits an element, unbiased",
        ANY,
        measured=Measured(TODAY, "terngrad"),
    ),
    Method(
        "OneBitCompressor()",
        "onebit.md",
        "signs, two means a column",
        ANY,
        measured=Measured(TODAY, "onebit"),
    ),
    Method(
        "EFSignSGDCompressor()",
        "signs.md",
        "signs, a mean a layer",
        SGD,
        measured=Measured(TODAY, "ef-sign"),
    ),
    Method(
        "SignumCompressor()",
        "signs.md",
        "signs of the momentum; the majority decides",
        PLAIN_SGD,
        measured=Measured(TODAY, "signum"),
    ),
    Method(
        "PowerSGDCompressor(rank=4)",
        "powersgd.md",
        "two thin factors of each matrix",
        ANY,
        measured=Measured(TODAY, "power"),
    ),
    Method(
        "ACPSGDCompressor(rank=4)",
        "powersgd.md",
        "one thin factor, in turn",
        ANY,
        measured=Measured(TODAY, "acp"),
    ),
    Method(
        "GradiVeQCompressor(ratio=8)",
        "gradiveq.md",
        "coefficients of principal components; of convolutions alone",
        ANY,
        exchange="allreduce",
        convolutions=True,
        measured=Measured("papers-long/gradiveq.json", "ratio-8", ("warmup_steps",)),
    ),
    Method(
        "LGCCompressor()",
        "lgc.md",
        "a learned code of the largest velocities; the first layer whole",
        TAKES_OVER,
        counted="lgc",
        exchange="broadcast, allreduce",
        measured=Measured("papers-long/lgc.json", "ring-2", ("full_steps", "train_steps")),
    ),
    Method(
        "VarianceCompressor(alpha=2)",
        "variance.md",
        "unambiguous elements",
        ADAM,
        counted="variance",
        measured=Measured("papers/variance.json", "adam/variance-2"),
    ),
    Method(
        "HybridCompressor(tau=0.00174)",
        "hybrid.md",
        "the same, above a threshold",
        ADAM,
        counted="hybrid",
        measured=Measured("papers/variance.json", "adam/hybrid-0.1"),
        chosen=IN_GRADIENTS_UNIT,
    ),
    Method(
        "StromCompressor(tau=0.333)",
        "strom.md",
        "elements above a threshold",
        ADAM,
        counted="strom",
        measured=Measured("papers/variance.json", "adam/strom-0.1"),
        chosen=IN_GRADIENTS_UNIT,
    ),
    Method(
        "SparseGDCompressor()",
        "sparse-gd.md",
        "the largest 0.1 % of each layer",
        SPARSE,
        measured=Measured("papers-long/lgc.json", "sparse-2", ("after",)),
    ),
    Method(
        "GradientDroppingCompressor()",
        "gradient-dropping.md",
        "the largest 1 % of the model",
        SPARSE,
        measured=Measured("papers-long/egc.json", "dropping-2"),
    ),
    Method(
        "DGCCompressor()",
        "dgc.md",
        "the largest 0.1 % of each layer's velocities",
        TAKES_OVER,
        measured=Measured("papers-long/lgc.json", "fixed"),
    ),
    Method(
        "EGCCompressor(K=1024)",
        "egc.md",
        "the same, as many as a layer's entropy says",
        TAKES_OVER,
        counted="egc",
        measured=Measured("papers-long/egc.json", "egc-2"),
    ),
    Method("ScaleComCompressor()", "scalecom.md", "one rank's choice of 1 %, on all ranks", SPARSE),
    Method(
        "ChunkedTopKCompressor()",
        "chunked-topk.md",
        "the largest 64 of each 4,096, in 2 bits",
        SPARSE,
        measured=Measured(TODAY, "chunked"),
    ),
    Method(
        "ChunkedTopKCompressor(exchange='auto')",
        "chunked-topk.md",
        "the same, chosen again by owners",
        SPARSE,
        chosen="owners pass on fewer elements, so they need a larger `k`",
    ),
    Method(
        "OkTopKCompressor()",
        "ok-topk.md",
        "the largest 1 % of a bucket, chosen again",
        SPARSE,
        measured=Measured("balanced.json", "OkTopKCompressor()"),
    ),
    Method(
        "RandomKCompressor()",
        "signs.md",
        "one random element in 128",
        SGD,
        measured=Measured(TODAY, "random-k"),
    ),
    Method(
        "DeMoCompressor()",
        "demo.md",
        "the momentum's largest components",
        PLAIN_SGD,
        measured=Measured(TODAY, "demo"),
    ),
    Method(
        "balanced(DGCCompressor())",
        "balanced.md",
        "what a sparse method sends, chosen again by owners",
        "that of the method",
        counted="dgc, balanced",
        exchange="allgather, two-shot",
        measured=Measured(
            "balanced.json",
            "balanced(VarianceCompressor(alpha=2.0), 'two_shot', 'float32', slack=1.25)",
            ("inner", "exchange"),
        ),
    ),
    Method(
        "robust(QSGDCompressor(bits=4))",
        "robust.md",
        "what the method sends; no rank counts more than the median one",
        "that of the method",
        measured=Measured("robust.json", "robust(NoneCompressor(), 'clip')", ("inner",)),
    ),
    Method(
        "MomentumExchange(OneBitCompressor())",
        MOMENTA,
        "Adam's momentum, by any compressor",
        "Adam, AdamW",
        in_step=Momentum(gc.OneBitCompressor()),
        measured=Measured("papers/local.json", "momenta-onebit", ("warmup_steps",)),
    ),
    Method(
        "local_steps(...)",
        "../fewer-exchanges.md",
        "an eighth of the parameters' change every 5 steps, in 4 bits",
        ANY,
        in_step=Local(),
        measured=Measured("worth.json", "eighth-5"),
    ),
    Method(
        "local_steps(..., compression=Int8Compressor())",
        "../fewer-exchanges.md",
        "all of the change, in 8 bits",
        ANY,
        in_step=Local(gc.Int8Compressor()),
        chosen="no residual, and [as near](../fewer-exchanges.md#which-setting) to dense gradients",
    ),
    Method(
        "local_steps(..., compression=None)",
        "../fewer-exchanges.md",
        "all of the change, in 32 bits",
        ANY,
        in_step=Local(None),
        chosen="for comparison",
    ),
    Method(
        "local_steps(..., **sparse_loco())",
        "../fewer-exchanges.md",
        "every 4 steps the largest 64 of each 4,096 elements, in 2 bits",
        ANY,
        in_step=Local(**gc.sparse_loco()),
        measured=Measured("papers/local.json", "sparse-4"),
    ),
    Method(
        "local_steps(..., **diloco())",
        "../fewer-exchanges.md#outer-momentum",
        "all of the change every 15 steps",
        ANY,
        in_step=Local(**gc.diloco()),
        measured=Measured("papers/outer.json", "0.02-constant/nesterov-later"),
    ),
)


def transformer(blocks: int = 4, width: int = 128, words: int = 1000) -> list[Layer]:
    """Return the layers of the GPT that `benchmarks.ranks` counts on."""
    matrices = {
        "qkv": (3 * width, width),
        "out": (width, width),
        "up": (4 * width, width),
        "down": (width, 4 * width),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "words.weight": (words, width),
        "places.weight": (64, width),
    }
    for block in range(blocks):
        for norm in "01":
            shapes[f"blocks.{block}.norms.{norm}.weight"] = (width,)
            shapes[f"blocks.{block}.norms.{norm}.bias"] = (width,)
        for name, shape in matrices.items():
            shapes[f"blocks.{block}.{name}.weight"] = shape
            shapes[f"blocks.{block}.{name}.bias"] = shape[:1]
    shapes |= {"norm.weight": (width,), "norm.bias": (width,)}
    return [(name, shape, "float32") for name, shape in shapes.items()]


def elements() -> int:
    """Return the number of parameters of the GPT."""
    return sum(prod(shape) for _, shape, _ in transformer())


def convolutions() -> list[Layer]:
    """Return the convolutions of ResNet-50."""
    return [(name, shape, "float32") for name, shape in resnet50() if len(shape) == 4]


def buckets(
    compressor: Compressor, layers: Sequence[Layer], ranks: int
) -> list[tuple[Compressor, Layout]]:
    """Return the buckets of a model, one for each compressor that a layer is assigned to."""
    grouped: dict[Compressor, list[Layer]] = {}
    for layer, chosen in zip(layers, assign(compressor, layers, ranks)):
        grouped.setdefault(chosen, []).append(layer)
    return [
        (
            chosen,
            Layout(tuple(n for n, *_ in some), tuple(s for _, s, _ in some), block=chosen.block),
        )
        for chosen, some in grouped.items()
    ]


def exchanges(method: Method, ranks: int) -> list[Exchange] | None:
    """Return the exchanges of the model's buckets; None if gradients decide what travels."""
    if method.counted or method.convolutions:
        return None
    stated = [
        chosen.exchange_of(layout, ranks)
        for chosen, layout in buckets(method.instance, transformer(), ranks)
    ]
    assert not method.instance.varies_in_size and None not in stated, method.code
    return [exchange for exchange in stated if exchange is not None]


def fewer(method: Method, ranks: int) -> float:
    """Return how many times fewer bytes a host receives in a step than with dense gradients."""
    stated = exchanges(method, ranks)
    if stated is not None:
        received = sum(exchange.received(ranks) for exchange in stated)
        return method.settings.every * dense_exchange(elements()).received(ranks) / received
    if method.convolutions:
        compressor = method.instance
        assert isinstance(compressor, gc.GradiVeQCompressor)
        layouts = [layout for _, layout in buckets(compressor, convolutions(), ranks)]
        courses = [compressor.course(layout, ranks) for layout in layouts]
        return sum(course.dense for course in courses) / sum(course.step for course in courses)
    counted = json.loads(COUNTED.read_text())
    row = next(row for row in counted["rows"] if row["key"] == method.counted)
    return counted["dense"][str(ranks)] / row["bytes"][str(ranks)]


def kinds(method: Method) -> str:
    """Return the names of the collectives, on two hosts and on more."""
    if method.exchange:
        return method.exchange
    if isinstance(method.instance, SparseCompressor):
        return "allgather"
    names: dict[str, None] = {}
    for ranks in HOSTS[:2]:
        chosen, layout = buckets(method.instance, transformer(), ranks)[0]
        exchange = chosen.exchange_of(layout, ranks)
        assert exchange is not None, method.code
        names[WORDS[tuple(kind.removesuffix("16") for kind, _ in exchange.collectives)]] = None
    return ", ".join(names)


def state(method: Method) -> tuple[float, float]:
    """Count the state: bytes for each element that the method takes, and bytes besides."""
    if method.convolutions:
        size, count = _state_of(method.instance, convolutions())
        return size / count, 0.0
    (small, few), (large, many) = (
        _state_of(method.instance, transformer(blocks)) for blocks in (4, 8)
    )
    each = (large - small) / (many - few)
    besides = small - each * few
    if isinstance(method.in_step, Local):  # the global parameters, and the outer momentum
        each += 8 if method.in_step.outer.momentum else 4
    return each, besides


def _state_of(compressor: Compressor, layers: Sequence[Layer]) -> tuple[int, int]:
    """Return the bytes of the state before the first step, and the elements that it is for.

    Layers that are sent dense are left out: they keep the momentum that the optimizer would keep.
    """
    ops, size, count = TorchOps(), 0, 0
    for chosen, layout in buckets(compressor, layers, HOSTS[1]):
        if chosen.compresses or not compressor.compresses:
            tensors = [x for _, x in leaves(chosen.start(ops, layout, HOSTS[1]))]
            size += sum(x.numel() * x.element_size() for x in tensors)
            count += layout.elements
    return size, count


# -- the table -------------------------------------------------------------------------------------


def _ratio(method: Method, ranks: int) -> str:
    """Format a ratio to three digits above 100, else two; counted ones in italics."""
    ratio = fewer(method, ranks)
    text = f"{float(f'{ratio:.3g}'):,.0f}" if ratio >= 99.5 else f"{ratio:.2g}"
    return f"*{text}*" if method.counted else text


def _state(method: Method) -> str:
    each, besides = state(method)
    text = f"{each:.2g}"
    return f"{text}, and {besides / 1e6:.1f} MB" if besides > 1e5 else text


def table() -> str:
    """Return the table, in Markdown."""
    ratios = [f"{ranks} hosts" for ranks in HOSTS]
    heads = ["method", "what travels", "exchange", *ratios, "state, bytes / parameter", "optimizer"]
    right = {*ratios, heads[-2]}
    lines = [heads, ["--:" if head in right else "---" for head in heads]]
    lines += [
        [
            f"[`{method.code.replace('Compressor(', '(')}`]({method.page})",
            method.travels,
            kinds(method),
            *(_ratio(method, ranks) for ranks in HOSTS),
            _state(method),
            method.optimizer,
        ]
        for method in METHODS
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def not_defaults() -> str:
    """Return a list of the rows with other settings than the defaults, and why, in Markdown."""
    return "\n".join(
        f"  - `{method.code.replace('Compressor(', '(')}`: {method.chosen}."
        for method in METHODS
        if method.chosen
    )


def updated(page: str) -> str:
    """Return the text of the page with the table of today between its marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    text = f"{table()}\n\n- **Settings** are the defaults, but for these:\n{not_defaults()}"
    return f"{before}{BEGIN}\n\n{text}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text()))
