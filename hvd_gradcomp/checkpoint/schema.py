"""Schema of the compressor state in a checkpoint, the same for all frontends.

A saved exchange is described by `describe`, and holds each bucket's tensors by their path, from
`leaves`. "sharded" states hold those of one rank; "consolidated" ones the sums over ranks. Tensors
are packed and restored by `reducer_state`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.method.compressor import Compressor

FORMAT = 5  # of a saved state; changes when its tensors, or their meaning, change


class CheckpointError(RuntimeError):
    """Checkpoint could not be written, or cannot be resumed from here."""


def describe(compressor: Compressor, layouts: Sequence[Layout], steps: int) -> dict[str, Any]:
    """Return the description of an exchange, which `check_exchange` checks."""
    return {
        "format": FORMAT,
        "compressor": repr(compressor),
        "shown": str(compressor),
        "steps": steps,
        "buckets": [{"digest": x.digest, "names": x.names} for x in layouts],
    }


def check_exchange(saved: Any, compressor: Compressor, layouts: Sequence[Layout]) -> None:
    """Check that a saved exchange belongs to this compressor and these buckets.

    Raises:
        CheckpointError: naming the difference.
    """
    if not isinstance(saved, dict) or "format" not in saved:
        raise CheckpointError("what was saved under 'gradcomp' is no state of hvd_gradcomp")
    if saved["format"] != FORMAT:
        raise CheckpointError(
            f"the compressor's state has format {saved['format']!r}, this version reads {FORMAT}: "
            "resume with the version of hvd_gradcomp that saved it"
        )
    if saved["compressor"] != repr(compressor):
        raise CheckpointError(
            "it is of another compressor. Use the same compression= to resume: it was made with "
            f"{saved['shown']}, here is {compressor}"
        )
    if [b["digest"] for b in saved["buckets"]] != [layout.digest for layout in layouts]:
        old = {name for b in saved["buckets"] for name in b["names"]}
        new = {name for layout in layouts for name in layout.names}
        differing = sorted(old ^ new) or ["shapes, dtypes, bucket_bytes or the order of parameters"]
        raise CheckpointError(f"it is of another model; different: {', '.join(differing[:8])}")


CONSOLIDATED = 'Save with mode="consolidated" to change that'


def check_hosts(then: int | None, now: int | None, remedy: str = CONSOLIDATED) -> None:
    """Check that the same ranks held a sharded state.

    Args:
        then, now: number of hosts that exchange with `hierarchical=True`; None without.
        remedy: for the message.

    Raises:
        CheckpointError: other ranks held it, so some residuals would be lost.
    """
    if then != now:
        saved, here = ("hierarchical=False" if n is None else f"{n} hosts" for n in (then, now))
        raise CheckpointError(
            f"it was saved sharded with {saved}, here it is {here}, and other ranks compress: "
            f"what they had kept back would be lost. {remedy}"
        )


def other_size(then: int, now: int, remedy: str = CONSOLIDATED) -> str:
    """Explain why another number of ranks cannot load a sharded state, and what to do."""
    return (
        f"it was saved sharded by {then} ranks, and {now} are here: what each of them had kept "
        f"back would be lost. {remedy}"
    )
