"""Comparison of the configuration of all ranks before the first exchange.

Ranks with different models would deadlock, or add gradients of different parameters. So each
frontend compares this rank's `describe(...)` with those of the others once, at the first step; an
error is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.core.version import __version__
from hvd_gradcomp.method import wire
from hvd_gradcomp.method.compressor import Compressor

Description = dict[str, str]

STEP = "steps made"
REFUSED, NOTHING = "what is refused", "nothing"  # by a rank, for the others to hear of
_SHOWN = 8
_SOFTWARE = ("hvd_gradcomp", "wire format", "framework", "Horovod")


class MismatchError(ValueError):
    """Mismatch between ranks: they do not train the same model in the same way."""


def describe(
    layers: Sequence[tuple[str, Sequence[int], str]],
    compressor: Compressor,
    buckets: Sequence[Layout],
    settings: str,
    *,
    framework: str,
    horovod: str,
) -> Description:
    """Describe everything that must be equal on all ranks, under names that users know.

    `framework` and `horovod` are the installed versions: "torch 2.13.0", "0.28.1".
    """
    installed = (__version__, str(wire.VERSION), framework, horovod)
    description = dict(zip(_SOFTWARE, installed))
    description |= {f"parameter {name}": f"{tuple(s)} {dtype}" for name, s, dtype in layers}
    description["compression"] = str(compressor)
    description["settings"] = settings
    description["buckets"] = ", ".join(f"{b.digest:08x}" for b in buckets)
    return description


def agree(
    descriptions: Sequence[Description], ranks: Sequence[int] | None = None, advice: str = ""
) -> None:
    """Raise an error unless the descriptions of all ranks are equal.

    Args:
        descriptions: of each rank.
        ranks: the numbers of the ranks, if these are not all ranks.
        advice: what to do, if not the advice for models that differ.

    Raises:
        MismatchError: names the differences and their ranks.
    """
    reference = descriptions[0]
    first, *_ = ranks = ranks or range(len(descriptions))
    lines = []
    for rank, other in zip(ranks, descriptions):
        if other == reference:
            continue
        different = [
            f"{key}: {reference.get(key, 'missing')} on rank {first}, {other.get(key, 'missing')} "
            f"on rank {rank}"
            for key in {**reference, **other}
            if reference.get(key) != other.get(key)
        ]
        named = [line for line in different if not line.startswith("buckets")] or different
        lines += named[:_SHOWN]
        if len(named) > _SHOWN:
            lines.append(f"and {len(named) - _SHOWN} more on rank {rank}")
    if lines:
        raise MismatchError(
            "the ranks do not train the same model in the same way:\n  "
            + "\n  ".join(lines)
            + f"\n{advice or _advice(descriptions)}."
        )


def compare(
    description: Description,
    gather: Callable[[Any, Any], list[Any]],
    ranks: Sequence[int] | None,
    refusal: Exception | None,
    advice: str = "",
) -> None:
    """Compare the descriptions of all ranks, which all call it, also those that refuse to go on.

    Args:
        description: that of this rank.
        gather: gathers an item of some type from every rank.
        ranks: the numbers of the ranks, if these are not all ranks.
        refusal: error with which this rank refuses; None if it does not.
        advice: what to do if they differ; see `agree`.

    Raises:
        MismatchError: on all ranks, if the descriptions differ, or some ranks alone refuse.
        Exception: the one with which this rank refuses, if all ranks refuse.
    """
    every = gather({**description, REFUSED: str(refusal or NOTHING)}, Description)
    _raise_refusal(every, ranks, refusal)
    agree(every, ranks, advice)


def _raise_refusal(
    descriptions: Sequence[Description], ranks: Sequence[int] | None, refusal: Exception | None
) -> None:
    """Raise an error if some rank refuses to go on; the texts may differ between ranks.

    Args:
        descriptions: of each rank, with the text of its refusal under `REFUSED`.
        ranks: the numbers of the ranks, if these are not all ranks.
        refusal: of this rank; None if it does not refuse.

    Raises:
        MismatchError: if some ranks refuse, and others do not.
        Exception: the refusal of this rank, if all refuse.
    """
    texts = [description[REFUSED] for description in descriptions]
    if NOTHING not in texts:
        assert refusal is not None
        raise refusal
    advice = "Fix what is refused, and pass the same to all ranks"
    agree([{REFUSED: text} for text in texts], ranks, advice)


def _advice(descriptions: Sequence[Description]) -> str:
    reference = descriptions[0]
    if all({**other, STEP: ""} == {**reference, STEP: ""} for other in descriptions):
        return (
            "Load a checkpoint on all ranks, by hvd.load_checkpoint, or on one and call "
            "hvd.broadcast_optimizer_state(optimizer, root_rank) on all"
        )
    if all(d.get(k) == reference.get(k) for d in descriptions for k in _SOFTWARE):
        return (
            "Build the same model, with the same names, and pass the same compression= on all ranks"
        )
    return "Install the same versions on all hosts"
