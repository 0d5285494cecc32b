"""Checkpoints: written whole or not at all, by all ranks or by none.

A checkpoint is a folder. Each save makes a version in it, in which every file is written under a
temporary name, flushed and renamed; when all ranks have said that theirs is there, `current` is
replaced by a file that names the new version, and older versions are removed. So whenever a rank
dies, or a disk is full, `current` names a version that is whole.

    FOLDER/current              the version that counts
    FOLDER/VERSION/shared       what is equal on all ranks, written by rank 0
    FOLDER/VERSION/rank-3-of-4  what belongs to one rank, in "sharded" checkpoints

"sharded" keeps each rank's part and resumes exactly, with as many ranks. "consolidated" keeps the
sum over ranks of what they had not sent yet; on loading, each of any number of ranks gets its share
of it, so the sum is the same as before.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import uuid
from collections.abc import Callable, Sequence
from enum import Enum, auto
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from hvd_gradcomp.aggregator import Compressor, brief, is_replicated, kinds
from hvd_gradcomp.layout import Layout

FORMAT = 3
MODES = ("sharded", "consolidated")
_CURRENT = "current"
_PIECE = 1 << 28  # bytes


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or is not one that can be resumed from here."""


class Ranks(NamedTuple):
    """Who saves or loads together."""

    rank: int
    size: int
    gather: Callable[[Any], list[Any]]  # everybody's small object, on all ranks
    broadcast: Callable[[bytes], bytes]  # rank 0's bytes, on all ranks; of as many everywhere


def check_mode(mode: Any) -> None:
    """Requires one of `MODES`."""
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(map(repr, MODES))}, got {mode!r}")


def write(
    folder: str | os.PathLike[str],
    ranks: Ranks,
    shared: Callable[[BinaryIO], None],
    part: Callable[[BinaryIO], None] | None,
) -> None:
    """Writes a new version. All ranks call it.

    Args:
        folder: the checkpoint; the same on all ranks, shared between hosts or not.
        ranks: who takes part.
        shared: writes what is equal on all ranks; called on rank 0.
        part: writes what belongs to this rank; None where nothing does.

    Raises:
        CheckpointError: on all ranks, if one of them could not write; what was saved before is
            still there.
    """
    root = Path(folder)
    version = ranks.gather(uuid.uuid4().hex if ranks.rank == 0 else None)[0]
    there, pointer = root / version, root / f"{_CURRENT}.{version}.{ranks.rank}"
    problem = None
    try:
        there.mkdir(parents=True, exist_ok=True)
        if ranks.rank == 0:
            _write_file(there / "shared", shared)
        if part is not None:
            _write_file(there / _part_name(ranks.rank, ranks.size), part)
        _write_file(pointer, lambda file: file.write(version.encode()))
    except Exception as error:
        problem = f"rank {ranks.rank}: {type(error).__name__}: {error}"
    problems = [p for p in ranks.gather(problem) if p is not None]
    if problems:
        # All have looked into the folder: from here on it may go.
        pointer.unlink(missing_ok=True)
        shutil.rmtree(there, ignore_errors=True)
        raise CheckpointError(
            f"nothing was saved to {root}: {'; '.join(problems)}. What was saved there before is "
            "untouched"
        )
    try:
        os.replace(pointer, root / _CURRENT)
    except OSError as error:
        problem = f"rank {ranks.rank}: {error}"
    problems = [p for p in ranks.gather(problem) if p is not None]
    if problems:  # both versions are whole, and stay
        raise CheckpointError(f"{root} could not be replaced by all: {'; '.join(problems)}")
    for stale in _versions(root):
        if stale != there:
            shutil.rmtree(stale, ignore_errors=True)


def read(
    folder: str | os.PathLike[str],
    ranks: Ranks,
    load: Callable[[BinaryIO], Any],
    apply: Callable[[Any, Any], Any],
) -> Any:
    """Reads the current version. All ranks call it; only rank 0 needs to see the shared file.

    Args:
        folder: as in `write`.
        ranks: who takes part.
        load: reads one file.
        apply: takes (shared, this rank's part or None), checks it, and puts it in place.

    Returns:
        What `apply` returns.

    Raises:
        CheckpointError: on all ranks, if one of them could not read or take what it read.
    """
    root, data, result = Path(folder), b"", None
    problem = version = None
    try:
        version = _current(root)
        if ranks.rank == 0:
            data = _read_file(root / version / "shared", lambda file: file.read())
    except Exception as error:
        problem = _said(ranks.rank, error)
    everybody = ranks.gather((problem, version, len(data)))
    _raise_any(root, [problem for problem, _, _ in everybody])
    # Where a host died while it replaced its pointer, all have the version of rank 0 as well.
    _, version, length = everybody[0]
    data = _broadcast(ranks, data, length)
    try:
        shared = _loaded("shared", lambda: load(io.BytesIO(data)))
        result = apply(shared, _part_of(root / str(version), ranks, shared, load))
    except Exception as error:
        problem = _said(ranks.rank, error)
    _raise_any(root, ranks.gather(problem))
    return result


def _broadcast(ranks: Ranks, data: bytes, length: int) -> bytes:
    """Rank 0's bytes, piece by piece: no collective takes more than 2**31 at a time."""
    pieces = []
    for start in range(0, length, _PIECE):
        size = min(_PIECE, length - start)
        mine = data[start : start + size] if ranks.rank == 0 else bytes(size)
        pieces.append(ranks.broadcast(mine))
    return b"".join(pieces)


def _part_of(there: Path, ranks: Ranks, shared: Any, load: Callable[[BinaryIO], Any]) -> Any:
    if shared["mode"] != "sharded":
        return None
    if shared["size"] != ranks.size:
        raise CheckpointError(other_size(shared["size"], ranks.size))
    return _read_file(there / _part_name(ranks.rank, ranks.size), load)


def formats(compressor: Compressor) -> dict[str, int]:
    """The formats of what a compressor and its parts keep, by class, where it is not the first."""
    text = repr(compressor)
    found = {c.__name__: c.state_format for c in kinds(Compressor) if f"{c.__name__}(" in text}
    return {name: number for name, number in found.items() if number > 1}


def check_exchange(saved: Any, compressor: Compressor, layouts: Sequence[Layout]) -> None:
    """Whether a saved exchange is one of this compressor and these buckets.

    Raises:
        CheckpointError: naming what is different.
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
            f"{brief(saved['compressor'])}, here is {compressor}"
        )
    for name, here in formats(compressor).items():
        then = saved.get("formats", {}).get(name, 1)
        if then != here:
            raise CheckpointError(
                f"what {name} keeps is in format {then}, this version reads {here}: resume with "
                "the version of hvd_gradcomp that saved it, or begin anew"
            )
    if [b["digest"] for b in saved["buckets"]] != [layout.digest for layout in layouts]:
        old = {name for b in saved["buckets"] for name in b["names"]}
        new = {name for layout in layouts for name in layout.names}
        differing = sorted(old ^ new) or ["shapes, dtypes, bucket_bytes or the order of parameters"]
        raise CheckpointError(f"it is of another model; different: {', '.join(differing[:8])}")


class Source(Enum):
    """Where a tensor of a state comes from when a saved state is taken back."""

    SAVED = auto()
    SHARE = auto()  # of the sum that was saved
    START = auto()  # what it was before the first step
    HERE = auto()  # it stays


def source_of(
    compressor: Compressor, path: str, steps: int, mode: str, saver: int, rank: int
) -> Source:
    """Where the tensor that `leaves` calls so comes from.

    Args:
        compressor: whose state it is.
        path: as `leaves` has it.
        steps: that were made when it was saved.
        mode: of the checkpoint.
        saver: the rank that saved it.
        rank: the rank that takes it.
    """
    owner = compressor.owner(path, steps)
    if is_replicated(compressor, path):
        return Source.SAVED
    if mode == "sharded":
        return Source.SAVED if saver in (rank, owner) else Source.HERE
    if owner is not None:
        return Source.SAVED
    return Source.START if path in compressor.begins_anew else Source.SHARE


def check_hosts(then: int | None, now: int | None) -> None:
    """Whether a sharded state was kept by the same ranks.

    Args:
        then, now: how many hosts exchange with `hierarchical=True`; None without.

    Raises:
        CheckpointError: it was not, so what some had kept back would be lost.
    """
    if then != now:
        ways = ["hierarchical=False" if n is None else f"{n} hosts" for n in (then, now)]
        raise CheckpointError(
            f"it was saved sharded with {ways[0]}, here it is {ways[1]}, and other ranks compress: "
            'what they had kept back would be lost. Save with mode="consolidated" to change that'
        )


def other_size(then: int, now: int) -> str:
    """Why a sharded state cannot be taken by another number of ranks."""
    return (
        f"it was saved sharded by {then} ranks, and {now} are here: what each of them had kept "
        'back would be lost. Save with mode="consolidated" to resume with another number'
    )


def _part_name(rank: int, size: int) -> str:
    return f"rank-{rank}-of-{size}"


def _versions(root: Path) -> list[Path]:
    """Ours alone: whatever else lies in the folder is the user's."""
    return [p for p in root.iterdir() if re.fullmatch("[0-9a-f]{32}", p.name) and p.is_dir()]


def _current(root: Path) -> str:
    try:
        return (root / _CURRENT).read_text()
    except FileNotFoundError:
        raise CheckpointError(f"there is no checkpoint in {root}") from None


def _write_file(path: Path, content: Callable[[BinaryIO], Any]) -> None:
    temporary = path.with_name(f"{path.name}.partial")
    with temporary.open("wb") as file:
        content(file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _read_file(path: Path, load: Callable[[BinaryIO], Any]) -> Any:
    def read() -> Any:
        with path.open("rb") as file:
            return load(file)

    return _loaded(path.name, read)


def _loaded(name: str, load: Callable[[], Any]) -> Any:
    try:
        return load()
    except FileNotFoundError:
        raise CheckpointError(f"{name} is missing") from None
    except Exception as error:
        said = (str(error).splitlines() or [type(error).__name__])[0][:80]
        raise CheckpointError(f"{name} is damaged, or no checkpoint: {said}") from error


def _said(rank: int, error: Exception) -> str:
    kind = "" if isinstance(error, CheckpointError) else f"{type(error).__name__}: "
    return f"rank {rank}: {kind}{error}"


def _raise_any(root: Path, problems: list[str | None]) -> None:
    said = [p for p in problems if p is not None]
    if said:
        raise CheckpointError(f"{root} cannot be resumed from: {'; '.join(said[:4])}")
