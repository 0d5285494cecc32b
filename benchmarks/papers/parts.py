"""Parts of `make papers`: rows that are trained, and claims that are held against them."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

NOT_RUN = "not run"
AS_GOOD, NEAR = 0.5, 1.5  # points of accuracy behind what is claimed: it holds, or its direction
FRACTION = 5  # a ratio in the direction of the paper's is at least one of so many parts of it
BATCH = 64  # of all ranks together
Result = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """One training, but for its seed.

    Attributes:
        key: what it is called in a part.
        title: what the page calls it.
        compressor: an expression of hvd_gradcomp's names. `{0}`, `{1}` are steps of its phases.
        paper: what the paper has in its place.
        task: "images", "text", "transformer" (embeddings of standard deviation 0.02) or
            "transformer-1" (of 1, PyTorch's own).
        optimizer: "sgd" (with momentum), "plain" (SGD without), "adam" or "adamw".
        schedule: of the learning rate: "halved" at each fifth, "constant", "cosine" (a tenth of the
            steps of linear warm-up, then down to a tenth of the rate), or "corrected" as in Kuang
            et al. 2019, section IV.B.
        moments: whether the moments of single samples are tracked.
        phases: where one phase of the compressor ends and the next begins, as shares of all steps.
        watch: what looks at the gradients, a name of `watching.WATCHES`.
        length: of the training, in lengths of those of the other parts.
        base: the row that it is compared with.
        hook_rank: of PyTorch's PowerSGD hook, which then takes the compressor's place; 0: none.
        local: arguments of `LocalSteps`, as they are written; empty for an exchange in each step.
        momenta: arguments of `MomentumExchange`; empty for an exchange of gradients.
    """

    key: str
    title: str
    compressor: str = "NoneCompressor()"
    paper: str = ""
    ranks: int = 2
    task: str = "images"
    optimizer: str = "sgd"
    rate: float = 0.05
    schedule: str = "halved"
    moments: bool = False
    phases: tuple[float, ...] = ()
    watch: str = ""
    length: float = 1.0
    base: str = ""
    hook_rank: int = 0
    local: str = ""
    momenta: str = ""

    @property
    def settings(self) -> dict[str, Any]:
        """Return the settings that the result depends on, for JSON."""
        left_out = {"key", "title", "paper", "base"}
        left_out |= {"length"} if self.length == 1 else set()  # rows of before have neither
        left_out |= {"hook_rank"} if self.hook_rank == 0 else set()
        left_out |= set() if self.local else {"local"}
        left_out |= set() if self.momenta else {"momenta"}
        kept = {name: value for name, value in asdict(self).items() if name not in left_out}
        return {**kept, "phases": [*self.phases]}

    def at(self, scale: Scale) -> Scale:
        """The scale of this row where that of its part is `scale`."""
        return Scale(round(scale.images * self.length), scale.epochs)

    def lengths(self, scale: Scale) -> list[int]:
        """Steps of each phase but the last."""
        ends = [max(1, round(share * scale.steps)) for share in self.phases]
        return [end - begin for begin, end in zip([0, *ends], ends)]


@dataclass(frozen=True)
class Scale:
    """Length of each training."""

    images: int = 6400
    epochs: int = 4

    @property
    def steps(self) -> int:
        return self.epochs * (self.images // BATCH)


AT_LENGTH = Scale(50_000, 8)


@dataclass(frozen=True)
class Claim:
    """A sentence of a paper beside what was found.

    Attributes:
        text: what is claimed.
        paper: its number there.
        ours: the number here.
        holds: whether it holds; None where it was not run.
        why: the reason where it does not hold.
        weaker: whether that which is claimed is seen nonetheless, in its direction: accuracy
            within `NEAR` points of the claim's, a ratio of one part in `FRACTION` of the paper's.
    """

    text: str
    paper: str
    ours: str
    holds: bool | None
    why: str = ""
    weaker: bool = False


@dataclass(frozen=True)
class Part:
    """A paper, or advice of this project."""

    name: str
    title: str
    settings: str
    rows: tuple[Row, ...]
    claims: Callable[[Measured], list[Claim]]
    draw: Callable[[Measured, Any], None]
    columns: tuple[tuple[str, Callable[[list[Result]], str]], ...] = ()
    source: str = "paper"  # what claims come from

    def row(self, key: str) -> Row:
        return next(row for row in self.rows if row.key == key)


class Measured:
    """Measurements of a part, in a file of its own that is written after each row."""

    def __init__(self, part: Part, folder: Path) -> None:
        self.part, self.path = part, folder / f"{part.name}.json"
        self.content: dict[str, Any] = {"rows": []}
        if self.path.exists():
            self.content = json.loads(self.path.read_text())

    @property
    def length(self) -> str:
        """Tell how long these trainings are."""
        return f"{(self.scale or Scale()).steps:,} steps"

    @property
    def scale(self) -> Scale | None:
        """That the rows were made with."""
        return Scale(**self.content["scale"]) if "scale" in self.content else None

    def add(self, row: Row, scale: Scale, seed: int, result: Result) -> None:
        """Keeps a result, in the place of an older one, and writes the file anew."""
        kept = [old for old in self.content["rows"] if (old["key"], old["seed"]) != (row.key, seed)]
        new = {"key": row.key, "seed": seed, "settings": row.settings, "result": result}
        places = [one.key for one in self.part.rows]
        kept = [old for old in kept if old["key"] in places]
        rows = sorted([*kept, new], key=lambda one: (places.index(one["key"]), one["seed"]))
        self.content = {**self.content, "scale": asdict(scale), "rows": rows}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fresh = self.path.with_suffix(".new")
        lines = ",\n".join(f"  {json.dumps(one)}" for one in rows)
        rest = {name: value for name, value in self.content.items() if name != "rows"}
        fresh.write_text(f'{json.dumps(rest)[:-1]}, "rows": [\n{lines}\n]}}\n')
        os.replace(fresh, self.path)

    def seeds(self, key: str) -> dict[int, Result]:
        """Results of a row by seed, where its settings are still those of the file."""
        settings = self.part.row(key).settings
        return {
            one["seed"]: one["result"]
            for one in self.content["rows"]
            if one["key"] == key and one["settings"] == settings
        }

    def __getitem__(self, key: str) -> list[Result]:
        return [*self.seeds(key).values()]

    def middle(self, key: str, name: str = "score") -> float | None:
        """The median over seeds; None where it was not run."""
        return middle(self[key], name)

    def away(self, key: str, other: str = "") -> float | None:
        """By how much a row is above another, or the one it is compared with."""
        here, base = self.middle(key), self.middle(other or self.part.row(key).base)
        return None if here is None or base is None else here - base

    @property
    def cpu_minutes(self) -> float | None:
        """Return the minutes of a seed on two cores; None if a row was never run."""
        every = [middle(self[row.key], "cpu_s") for row in self.part.rows]
        known = [seconds for seconds in every if seconds is not None]
        return sum(known) / 120 if len(known) == len(every) else None


def middle(results: Iterable[Result], name: str) -> float | None:
    known = [r[name] for r in results if r.get(name) is not None]
    return statistics.median(known) if known else None


def formatted(value: float | None, form: str) -> str:
    return NOT_RUN if value is None else form.format(value)


def times(value: float | None) -> str:
    return NOT_RUN if value is None else f"{value:,.1f}x" if value < 100 else f"{value:,.0f}x"


def lost(results: list[Result]) -> str:
    """A column: the share of the energy that a learned method leaves out."""
    value = middle(results, "lost")
    return "" if value is None else f"{value:.2f}"
