"""Checkpoints: written whole or not at all, by all ranks or by none; and loaded so.

A checkpoint is a folder. Each save makes a version in it, in which every file is written under a
temporary name, flushed and renamed; when all ranks have said that theirs is there, `current` is
replaced by a file that names the new version, and older versions are removed. So whenever a rank
dies, or a disk is full, `current` names a version that is whole.

    FOLDER/current              the version that counts, and the SHA-256 of its manifest
    FOLDER/VERSION/manifest     length and SHA-256 of each file of the version
    FOLDER/VERSION/shared       what is equal on all ranks, written by rank 0
    FOLDER/VERSION/rank-3-of-4  what belongs to one rank, in "sharded" checkpoints

A file whose bytes are not those that were written is refused before anything of it is looked at.
To load, all ranks read and check; once all have said that they can, all take over; if one cannot
after all, all go back to what they had.

"sharded" keeps each rank's part and resumes exactly, with as many ranks. "consolidated" keeps the
sum over ranks of what they had not sent yet; on loading, each of any number of ranks gets its share
of it, so the sum is the same as before.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum, auto
from pathlib import Path
from typing import Any, NamedTuple, Optional

from hvd_gradcomp.core.compressor import Compressor, brief, is_replicated
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.core.protocols import learning
from hvd_gradcomp.core.registry import known
from hvd_gradcomp.runtime import typed_json

FORMAT = 3
MODES = ("sharded", "consolidated")
_CURRENT, _MANIFEST = "current", "manifest"
_PIECE = 1 << 28  # bytes


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or is not one that can be resumed from here."""


class Ranks(NamedTuple):
    """Who saves or loads together."""

    rank: int
    size: int
    gather: Callable[[Any, Any], list[Any]]  # everybody's item of a kind, see `messages`
    broadcast: Callable[[bytes], bytes]  # rank 0's bytes, on all ranks; of as many everywhere


class Takeover(NamedTuple):
    """What is left to do once all ranks have checked what they read."""

    take: Callable[[], Any]  # puts it in place, and says what `read` returns
    undo: Callable[[], None]  # puts back what was there before, wherever `take` has come to


class _File(NamedTuple):
    """What a manifest says of a file."""

    length: int
    sha256: str


def check_mode(mode: Any) -> None:
    """Requires one of `MODES`."""
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(map(repr, MODES))}, got {mode!r}")


def agree_on(mode: Any, names: Iterable[str], ranks: Ranks) -> None:
    """What all ranks have to save alike. They all call it, before anything else.

    Args:
        mode: one of `MODES`.
        names: of the objects.
        ranks: who takes part.

    Raises:
        CheckpointError: on all ranks, if they differ.
        ValueError: there is no such mode.
    """
    everybody = ranks.gather((str(mode), sorted(names)), tuple[str, list[str]])
    first = everybody[0]
    for rank, theirs in enumerate(everybody):
        for what, mine, other in zip(("mode=", ""), first, theirs):
            if mine != other:
                raise CheckpointError(
                    f"nothing was saved: rank 0 saves {what}{mine!r}, rank {rank} {what}{other!r}. "
                    "Call save_checkpoint with the same mode= and objects on all ranks"
                )
    check_mode(mode)


def write(
    folder: str | os.PathLike[str],
    ranks: Ranks,
    shared: Callable[[], bytes],
    part: Callable[[], bytes] | None,
) -> None:
    """Writes a new version. All ranks call it.

    Args:
        folder: the checkpoint; the same on all ranks, shared between hosts or not.
        ranks: who takes part.
        shared: what is equal on all ranks; called on rank 0.
        part: what belongs to this rank; None where nothing does.

    Raises:
        CheckpointError: on all ranks, if one of them could not write; what was saved before is
            still there.
    """
    root = Path(folder)
    version = ranks.gather(uuid.uuid4().hex if ranks.rank == 0 else None, Optional[str])[0]
    there, pointer = root / version, root / f"{_CURRENT}.{version}.{ranks.rank}"
    files: dict[str, _File] = {}
    problem = None

    def abort(problems: Sequence[str | None]) -> None:
        said = [p for p in problems if p is not None]
        if said:
            # All have looked into the folder: from here on it may go.
            pointer.unlink(missing_ok=True)
            shutil.rmtree(there, ignore_errors=True)
            raise CheckpointError(
                f"nothing was saved to {root}: {'; '.join(said)}. What was saved there before is "
                "untouched"
            )

    try:
        there.mkdir(parents=True, exist_ok=True)
        if ranks.rank == 0:
            files["shared"] = _write_file(there / "shared", shared())
        if part is not None:
            name = _part_name(ranks.rank, ranks.size)
            files[name] = _write_file(there / name, part())
    except Exception as error:
        problem = _said(ranks.rank, error)
    everybody = ranks.gather((problem, files), tuple[Optional[str], dict[str, _File]])
    abort([problem for problem, _ in everybody])
    manifest = {name: file for _, theirs in everybody for name, file in theirs.items()}
    try:
        # Each rank writes the same, so that it is there on every host.
        written = _write_file(there / _MANIFEST, typed_json.packed(manifest), f".{ranks.rank}")
        _write_file(pointer, f"{version} {written.sha256}".encode())
    except Exception as error:
        problem = _said(ranks.rank, error)
    abort(ranks.gather(problem, Optional[str]))
    try:
        os.replace(pointer, root / _CURRENT)
    except OSError as error:
        problem = f"rank {ranks.rank}: {error}"
    problems = [p for p in ranks.gather(problem, Optional[str]) if p is not None]
    if problems:  # both versions are whole, and stay
        raise CheckpointError(f"{root} could not be replaced by all: {'; '.join(problems)}")
    for stale in _versions(root):
        if stale != there:
            shutil.rmtree(stale, ignore_errors=True)


def read(
    folder: str | os.PathLike[str],
    ranks: Ranks,
    load: Callable[[bytes], Any],
    prepare: Callable[[Any, Any], Takeover],
) -> Any:
    """Reads the current version. All ranks call it; only rank 0 needs to see the shared file.

    Args:
        folder: as in `write`.
        ranks: who takes part.
        load: reads the content of a file.
        prepare: takes (shared, this rank's part or None), checks it, and changes nothing.

    Returns:
        What `take` of the takeover returns.

    Raises:
        CheckpointError: on all ranks, if one of them could not read or take what it read. All are
            as they were.
    """
    root, data, takeover, result = Path(folder), b"", None, None
    problem, version, digest = None, "", ""
    try:
        version, digest = _current(root)
        if ranks.rank == 0:
            data = _checked("shared", root / version, _manifest(root / version, digest))
    except Exception as error:
        problem = _said(ranks.rank, error)
    kind = tuple[Optional[str], str, str, int]
    everybody = ranks.gather((problem, version, digest, len(data)), kind)
    _raise_any(root, [problem for problem, *_ in everybody])
    # Where a host died while it replaced its pointer, all have the version of rank 0 as well.
    _, version, digest, length = everybody[0]
    data = _broadcast(ranks, data, length)
    try:
        there = root / version
        manifest = _manifest(there, digest)
        _compare("shared", data, manifest)
        shared, own = _loaded("shared", load, data), None
        if shared["mode"] == "sharded":
            if shared["size"] != ranks.size:
                raise CheckpointError(other_size(shared["size"], ranks.size))
            name = _part_name(ranks.rank, ranks.size)
            own = _loaded(name, load, _checked(name, there, manifest))
        takeover = prepare(shared, own)
    except Exception as error:
        problem = _said(ranks.rank, error)
    _raise_any(root, ranks.gather(problem, Optional[str]))
    assert takeover is not None
    try:
        result = takeover.take()
    except Exception as error:
        problem = _said(ranks.rank, error)
    problems = ranks.gather(problem, Optional[str])
    if any(problems):
        takeover.undo()
    _raise_any(root, problems)
    return result


def _broadcast(ranks: Ranks, data: bytes, length: int) -> bytes:
    """Rank 0's bytes, piece by piece: no collective takes more than 2**31 at a time."""
    pieces = []
    for start in range(0, length, _PIECE):
        size = min(_PIECE, length - start)
        mine = data[start : start + size] if ranks.rank == 0 else bytes(size)
        pieces.append(ranks.broadcast(mine))
    return b"".join(pieces)


def formats(compressor: Compressor) -> dict[str, int]:
    """The formats of what a compressor and its parts keep, by class, where it is not the first."""
    text = repr(compressor)
    found = {name: cls.state_format for name, cls in known().items() if f"{name}(" in text}
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
    owner = learning.owner(compressor, path, steps)
    if is_replicated(compressor, path):
        return Source.SAVED
    if mode == "sharded":
        return Source.SAVED if saver in (rank, owner) else Source.HERE
    if owner is not None:
        return Source.SAVED
    return Source.START if path in compressor.reset_on_merge else Source.SHARE


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


def _current(root: Path) -> tuple[str, str]:
    """The version that counts, and the digest of its manifest."""
    try:
        text = (root / _CURRENT).read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"there is no checkpoint in {root}") from None
    if re.fullmatch(b"[0-9a-f]{32}", text):
        raise CheckpointError(
            "it was saved without checksums, by an earlier version of hvd_gradcomp, and whether it "
            "is damaged cannot be told. Go on with that version, or begin anew"
        )
    found = re.fullmatch(b"([0-9a-f]{32}) ([0-9a-f]{64})", text)
    if found is None:
        raise CheckpointError(f"{_CURRENT} is damaged, or no checkpoint")
    version, digest = found.groups()
    return version.decode(), digest.decode()


def _manifest(there: Path, digest: str) -> dict[str, _File]:
    """What is in a version, as its manifest says.

    Args:
        there: the version's folder.
        digest: of the manifest.
    """
    data = _bytes_of(there / _MANIFEST)
    if hashlib.sha256(data).hexdigest() != digest:
        raise CheckpointError(_damaged(_MANIFEST))
    return _loaded(_MANIFEST, lambda data: typed_json.unpacked(data, dict[str, _File]), data)


def _checked(name: str, there: Path, manifest: Mapping[str, _File]) -> bytes:
    """The content of a file."""
    data = _bytes_of(there / name)
    _compare(name, data, manifest)
    return data


def _compare(name: str, data: bytes, manifest: Mapping[str, _File]) -> None:
    if name not in manifest:
        raise CheckpointError(f"{name} is not in the {_MANIFEST}")
    if manifest[name] != _described(data):
        raise CheckpointError(_damaged(name))


def _damaged(name: str) -> str:
    return (
        f"{name} is damaged: its bytes are not those that were saved. Take it from a copy, or go "
        "on from another checkpoint"
    )


def _described(data: bytes) -> _File:
    return _File(len(data), hashlib.sha256(data).hexdigest())


def _write_file(path: Path, data: bytes, suffix: str = "") -> _File:
    temporary = path.with_name(f"{path.name}{suffix}.partial")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    return _described(data)


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"{path.name} is missing") from None


def _loaded(name: str, load: Callable[[bytes], Any], data: bytes) -> Any:
    try:
        return load(data)
    except Exception as error:
        said = (str(error).splitlines() or [type(error).__name__])[0][:80]
        raise CheckpointError(f"{name} is no checkpoint of this frontend: {said}") from error


def _said(rank: int, error: Exception) -> str:
    kind = "" if isinstance(error, CheckpointError) else f"{type(error).__name__}: "
    return f"rank {rank}: {kind}{error}"


def _raise_any(root: Path, problems: list[str | None]) -> None:
    said = [p for p in problems if p is not None]
    if said:
        raise CheckpointError(f"{root} cannot be resumed from: {'; '.join(said[:4])}")
