"""The section of the page on bytes at the papers' sizes; no number of ours is typed."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.papers.parts import NOT_RUN, Measured, middle, times
from benchmarks.papers.sizes import ANSWER, CASES, Case, Sizes, dense

TITLE = "Bytes at the papers' sizes"
NEAR = 1.3  # a factor up to which two ratios count as equal
Row = dict[str, Any]
Amounts = Callable[[Row], tuple[float, ...]]


@dataclass(frozen=True)
class Printed:
    """What a paper prints beside a case.

    Attributes:
        ratios: as printed; with a server those of the worker with a code and of the others. Empty
            if the paper has no number.
        where: the table.
        small: part and row of the training with the same method on the small network.
        counted: returns the bytes that the paper's number holds, as far as we can tell.
        why: what these bytes are, and where the rest of a difference comes from.
        beside: whether this is another setting than the paper's, in no tally.
    """

    ratios: tuple[float, ...]
    where: str
    small: tuple[str, str]
    counted: Amounts | None = None
    why: str = ""
    beside: bool = False


def piece(row: Row, name: str) -> float:
    """Return the bytes of a piece, of the rank that sends most of it."""
    return float(max(row["pieces"].get(name, [0])))


def code_and_last_values(row: Row) -> tuple[float, ...]:
    return (piece(row, "code") + piece(row, "last layer's values"),)


def code_and_share_of_indices(row: Row) -> tuple[float, ...]:
    """Count what `code_and_last_values` does, and the leader's indices, shared out over ranks."""
    indices = statistics.fmean(row["pieces"]["indices"])
    return (code_and_last_values(row)[0] + indices,)


def quarter_code_and_innovation(row: Row) -> tuple[float, ...]:
    """Count one number a position of the code, and a tenth of all selected values."""
    others = piece(row, "innovation's values") + piece(row, "last layer's values") / 10
    return others + piece(row, "code") / 4, others


def code_and_first_layer(row: Row) -> tuple[float, ...]:
    first = piece(row, WHOLE)
    return first + piece(row, "code"), first


def values(row: Row) -> tuple[float, ...]:
    return (piece(row, "values"),)


def vectors_and_six_bytes(row: Row) -> tuple[float, ...]:
    """Count biases and batch norms whole, and six bytes for a thousandth of all other elements."""
    return (4 * row["vectors"] + 6 * 0.001 * (row["parameters"] - row["vectors"]),)


def words(row: Row) -> tuple[float, ...]:
    """Count 32 bits for each element that was sent."""
    return (dense(row) / row["settings"]["ratio"],)


WHOLE = "layers sent whole"
RING = (
    "The number is that of the code and the last layer's values alone, in float32. The first "
    "layer, which the text sends whole, is larger than all of it, and the leader's indices, which "
    "the text says are counted, are not in it either."
)
RING_101 = (
    "Here the code and the last layer's values are less than what is printed, which is near "
    "again with the leader's indices, a quarter of them for each rank; the first layer, which the "
    "text sends whole, is not in it."
)
SERVER = (
    "Difference between both kinds of workers in the paper: one float32 for 16 selected values, "
    "a quarter of the code that its Table I has. The others' bytes are near the values, without "
    "indices, of a tenth of what is selected in each layer, the last one included. Not in it: the "
    "first layer, nine tenths of the last one, all indices, our signs and scales."
)
SERVER_101 = (
    SERVER + " For a network 1.7 times as large the paper prints less for these workers than for "
    "ResNet-50, 0.010 MB beside 0.012: no one rule gives both."
)
TABLE_IV = "For the same network, the same 0.1 % and the same code Table VI prints {other}. "
VARIANCE = (
    "The paper counts elements, each as a word of 32 bits. Ours take a sign, three bits of "
    "exponent and a packed index."
)
PRINTED: dict[str, Printed] = {
    "ring-2": Printed((3193,), "Table VI", ("lgc", "ring-2"), code_and_last_values, RING),
    "form-2": Printed(
        (3193,),
        "Table VI",
        ("", ""),
        code_and_last_values,
        "No signs, one scale, and the first layer coded as the others are: what is left are the "
        "indices.",
        beside=True,
    ),
    "server-2": Printed(
        (5709, 8616), "Table VI", ("lgc", "server-2"), quarter_code_and_innovation, SERVER
    ),
    "dgc-2": Printed(
        (1000,),
        "Table VI",
        ("lgc", "dgc-2"),
        values,
        "The paper counts the values of 0.1 %, in float32, and no indices.",
    ),
    "ring-4": Printed((2297,), "Table VI", ("lgc", "ring-4"), code_and_share_of_indices, RING_101),
    "form-4": Printed((2297,), "Table VI", ("", ""), code_and_share_of_indices, beside=True),
    "server-4": Printed(
        (8095, 17000), "Table VI", ("lgc", "server-4"), quarter_code_and_innovation, SERVER_101
    ),
    "scalecom-4": Printed((), "", ("lgc", "scalecom-4")),
    "dgc-4": Printed(
        (1000,),
        "Table VI",
        ("lgc", "dgc-4"),
        values,
        "The paper counts the values of 0.1 %, in float32, and no indices.",
    ),
    "ring-8": Printed(
        (202,),
        "Table IV",
        ("lgc", "ring-8"),
        None,
        TABLE_IV.format(other="3,193x")
        + "Its 202x is near our bytes with 1 % selected (the next row).",
    ),
    "ring-8-percent": Printed((202,), "Table IV", ("", ""), beside=True),
    "server-8": Printed(
        (386, 2800),
        "Table IV",
        ("", ""),
        None,
        TABLE_IV.format(other="5,709x and 8,616x") + "See the next row.",
    ),
    "server-8-percent": Printed(
        (386, 2800),
        "Table IV",
        ("", ""),
        code_and_first_layer,
        "What the paper prints is as much as the first layer takes whole, and, for the worker with "
        "a code, that and a code of 1 %. No innovation, last layer or index would be in it.",
        beside=True,
    ),
    "scalecom-8": Printed(
        (96,),
        "Table IV",
        ("lgc", "scalecom-8"),
        None,
        "The number is ScaleCom's own, at about 1 % (the next row); LGC's 0.1 % sends a tenth.",
        beside=True,
    ),
    "scalecom-8-percent": Printed((96,), "Table IV", ("", ""), values),
    "dgc-8": Printed(
        (277,),
        "Table IV",
        ("", ""),
        vectors_and_six_bytes,
        "277x is what biases and batch norms take whole, and 6 bytes for each of 0.1 % of all "
        "other elements. Ours selects in these small layers too.",
    ),
    "egc-4": Printed(
        (1052,),
        "Table II",
        ("egc", "egc-4"),
        values,
        "The paper counts elements. Ours are float32 and indices.",
    ),
    **{
        f"variance-{name}-{policy}": Printed(
            (ratio,), where, ("variance", row), words, VARIANCE, policy == "latest"
        )
        for name, where, ratio, small in (
            ("cifar-sgd", "Table 1", 383.6, "sgd/variance-2"),
            ("cifar-adam", "Table 1", 913.4, "adam/variance-2"),
            ("imagenet-sgd", "Table 2", 990.7, ""),
        )
        for policy, row in (("largest", small), ("latest", small and f"{small}-coded"))
    },
}

HEAD = """## {title}

{within} of {numbers} ratios that the papers print are reached within a factor of {near} if all our
bytes count; {alike} are if only those count that the paper's number seems to hold. Below the table
is which bytes make the difference.

A row is a step in the network that the paper trained: its shapes, ranks and settings. `here` are
all bytes that a rank hands to collectives for others, indices and headers included, the mean over
ranks. With a server they are those of the worker that sends a code, and those of the others; the
server's answer is left out, as in the paper. `counted alike` are only those of our bytes that the
paper's number seems to hold. `small` is the training of the same method above.

`make papers ARGS="--parts bytes"`: {done} of {all} rows were counted, without training, on tensors
without data. LGC's steps are those in which codes travel. EGC and Variance send as many elements as
their papers say, the same share of each bucket in each step. Networks have 1,000 classes if not
said otherwise: 25.56 million parameters are the 102.2 MB that LGC's Table VI prints for ResNet-50
on CIFAR-10; its 170 MB for ResNet-101 are that network with 10 classes. Both have the first layer
of ImageNet, 7 x 7.

What the papers say they count:

- LGC (section VI-A): bytes of the gradients over bytes that a node sends. With a server it has two
  numbers: of the worker that sends a code and its innovation, and of all others. Downlinks are left
  out. Indices are packed by DEFLATE, and counted (section V-A).
- EGC (section V-A) and Variance (section 6): parameters over parameters sent. Indices are left out;
  Variance has them in a word of 32 bits with the value.

"""


@dataclass(frozen=True)
class Compared:
    """A case beside what its paper prints.

    Attributes:
        case: what was counted.
        printed: what the paper has.
        row: the count; None if there is none.
        ours: ratios of all bytes.
        alike: ratios of the bytes that the paper's number holds; empty if nobody knows.
    """

    case: Case
    printed: Printed
    row: Row | None
    ours: tuple[float, ...]
    alike: tuple[float, ...]

    @property
    def pairs(self) -> list[tuple[float, float]]:
        """Return our ratios, each with the printed one; empty if one is missing."""
        return [*zip(self.ours, self.printed.ratios)]

    @property
    def differs(self) -> bool:
        """Return True if a ratio of ours is further from the printed one than the factor."""
        return not all(near(*pair) for pair in self.pairs)

    def verdicts(self) -> list[tuple[bool, bool]]:
        """Tell of each printed number if all our bytes are no more, and if those counted alike."""
        if self.printed.beside:
            return []
        alike = self.alike or self.ours
        return [
            (ours * NEAR >= paper, ours * NEAR >= paper or near(other, paper))
            for (ours, paper), other in zip(self.pairs, alike)
        ]


def compare(sizes: Sizes) -> list[Compared]:
    """Compare all cases."""
    compared = []
    for case in CASES:
        printed, row = PRINTED[case.key], sizes[case.key]
        counted = printed.counted(row) if row and printed.counted else ()
        alike = tuple(dense(row) / amount for amount in counted) if row else ()
        compared.append(Compared(case, printed, row, sizes.of_workers(case.key), alike))
    return compared


def within(sizes: Sizes) -> list[str]:
    """Return a line for the summary of the page; none if nothing was counted."""
    verdicts = [verdict for one in compare(sizes) for verdict in one.verdicts()]
    if not verdicts:
        return []
    fewer, alike = (sum(column) for column in zip(*verdicts))
    return [
        f"{fewer} of {len(verdicts)} printed ratios are reached within a factor of {NEAR} by all "
        f"bytes that we send, {alike} by those alone that the paper's number seems to hold"
    ]


def section(every: Iterable[Measured], sizes: Sizes) -> str:
    """Return the section; empty if nothing was counted."""
    compared = compare(sizes)
    if not any(one.row for one in compared):
        return ""
    trainings = {measured.part.name: measured for measured in every}
    lines = [
        f"| method | network | ranks | paper | small: {small_parameters(trainings)} parameters | "
        "here | counted alike |\n|---|---|---|---|---|---|---|"
    ]
    for one in compared:
        printed = one.printed
        paper = f"{joined(printed.ratios)} ({printed.where})" if printed.ratios else ""
        cells = [one.case.title, one.case.network, str(one.case.ranks), paper]
        cells += [small(trainings, printed), joined(one.ours) or NOT_RUN, joined(one.alike)]
        lines.append(f"| {' | '.join(cells)} |")
    verdicts = [verdict for one in compared for verdict in one.verdicts()]
    text = HEAD.format(
        title=TITLE,
        done=sum(one.row is not None for one in compared),
        all=len(CASES),
        near=NEAR,
        numbers=len(verdicts),
        within=sum(fewer for fewer, _ in verdicts),
        alike=sum(alike for _, alike in verdicts),
    )
    reasons: dict[str, str] = {}
    for one in compared:
        repeated = one.printed.beside and one.printed.why in reasons.values()
        if one.row and one.pairs and one.differs and not repeated:
            title = f"{one.case.title}, {one.case.network}, {one.case.ranks} ranks"
            reasons[f"{title}: {bytes_of(one.row)}"] = one.printed.why
    listed = [f"- {head} {why}".rstrip() for head, why in reasons.items()]
    return text + "\n".join(lines) + "\n\n" + "\n".join(listed) + "\n\n"


def near(ours: float, paper: float) -> bool:
    return max(ours / paper, paper / ours) <= NEAR


def small_parameters(trainings: dict[str, Measured]) -> str:
    """Return the number of parameters of the small network."""
    measured = trainings.get("lgc")
    results = measured["ring-2"] if measured else []
    return f"{results[0]['parameters']:,}" if results else "?"


def small(trainings: dict[str, Measured], printed: Printed) -> str:
    """Return what was measured in the training of the small network."""
    part, key = printed.small
    measured = trainings.get(part)
    results = measured[key] if measured and key else []
    if not results:
        return ""
    rows = results[0]["by_rank"] if part == "lgc" else [middle(results, "ratio")]
    return " / ".join(dict.fromkeys(times(ratio) for ratio in rows))


def joined(ratios: Sequence[float]) -> str:
    return " / ".join(times(ratio) for ratio in ratios)


def bytes_of(row: Row) -> str:
    """Describe the bytes of a step: the sum, and all pieces but the smallest."""
    ranks = len(row["steps"][-1])
    answer = row["pieces"].get(ANSWER, [0])[0]
    senders = [1] if answer else [*range(ranks)]
    whole = statistics.fmean(row["steps"][-1][rank] for rank in senders)
    shares = {
        name: statistics.fmean(sizes[rank] for rank in senders)
        for name, sizes in row["pieces"].items()
    }
    ordered = sorted(shares.items(), key=lambda item: -item[1])
    pieces = ", ".join(f"{name} {size:,.0f}" for name, size in ordered if size >= whole / 100)
    who = "the worker with a code sends" if answer else "a rank sends"
    text = f"{who} {whole:,.0f} bytes: {pieces}."
    return text + (f" The server's answer is {answer:,} more." if answer else "")
