"""Atomic checkpoints: all ranks save or load a complete checkpoint, or none does.

A checkpoint is a folder. Each save creates a version in it, where every file is written under a
temporary name, flushed and renamed; when all ranks have confirmed their files, `current` is
replaced by a file that names the new version, and older versions are removed. So whenever a rank
dies, or a disk is full, `current` names a complete version.

    FOLDER/current              the current version, and the SHA-256 of its manifest
    FOLDER/VERSION/manifest     length and SHA-256 of each file of the version
    FOLDER/VERSION/shared       replicated data, written by rank 0
    FOLDER/VERSION/rank-3-of-4  data of one rank, in "sharded" checkpoints

A file whose checksum differs is rejected before it is parsed. To load, all ranks read and check;
once all have confirmed, all commit; if one fails after all, all roll back.

"sharded" keeps each rank's part and resumes exactly, with the same number of ranks. "consolidated"
keeps the sum over ranks of the residuals; on loading, each of any number of ranks gets an equal
share, so the sum is preserved.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional

from hvd_gradcomp.checkpoint.schema import CheckpointError, other_size
from hvd_gradcomp.core import validate
from hvd_gradcomp.runtime import typed_json

MODES = ("sharded", "consolidated")
_CURRENT, _MANIFEST = "current", "manifest"
_PIECE = 1 << 28  # bytes


class Ranks(NamedTuple):
    """Group of ranks that save or load together."""

    rank: int
    size: int
    gather: Callable[[Any, Any], list[Any]]  # (item, type) to all ranks' items; see `typed_json`
    broadcast: Callable[[bytes], bytes]  # returns rank 0's bytes; equally many on all ranks


class Takeover(NamedTuple):
    """Commit and rollback of a load, once all ranks have checked their data."""

    take: Callable[[], Any]  # commits, and returns the result of `read`
    undo: Callable[[], None]  # rolls back, however far `take` got


class _File(NamedTuple):
    """Entry of a file in a manifest."""

    length: int
    sha256: str


def check_mode(mode: Any) -> None:
    """Raise a ValueError unless the mode is one of `MODES`."""
    if mode not in MODES:
        raise ValueError(f"mode {validate.not_among(mode, MODES)}")


def agree_on(mode: Any, names: Iterable[str], ranks: Ranks) -> None:
    """Check that all ranks save with the same mode and objects. All ranks call it first.

    Args:
        mode: one of `MODES`.
        names: of the objects.
        ranks: the participants.

    Raises:
        CheckpointError: on all ranks, if they differ.
        ValueError: the mode is unknown.
    """
    everybody = ranks.gather((str(mode), sorted(names)), tuple[str, list[str]])
    first = everybody[0]
    for rank, values in enumerate(everybody):
        for what, expected, other in zip(("mode=", ""), first, values):
            if expected != other:
                raise CheckpointError(
                    f"nothing was saved: rank 0 saves {what}{expected!r}, rank {rank} {what}"
                    f"{other!r}. Call save_checkpoint with the same mode= and objects on all ranks"
                )
    check_mode(mode)


def write(
    folder: str | os.PathLike[str],
    ranks: Ranks,
    shared: Callable[[], bytes],
    part: Callable[[], bytes] | None,
) -> None:
    """Write a new version. All ranks call it.

    Args:
        folder: the checkpoint; the same on all ranks, shared between hosts or not.
        ranks: the participants.
        shared: returns the replicated data; called on rank 0.
        part: returns this rank's data; None if there is none.

    Raises:
        CheckpointError: on all ranks, if one of them could not write; the previous version is
            kept.
    """
    root = Path(folder)
    version = ranks.gather(uuid.uuid4().hex if ranks.rank == 0 else None, Optional[str])[0]
    version_folder, pointer = root / version, root / f"{_CURRENT}.{version}.{ranks.rank}"
    files: dict[str, _File] = {}
    problem = None

    def abort(problems: Sequence[str | None]) -> None:
        messages = [p for p in problems if p is not None]
        if messages:
            # All ranks are done with the folder, so it may be removed.
            pointer.unlink(missing_ok=True)
            shutil.rmtree(version_folder, ignore_errors=True)
            raise CheckpointError(
                f"nothing was saved to {root}: {'; '.join(messages)}. What was saved there before "
                "is untouched"
            )

    try:
        version_folder.mkdir(parents=True, exist_ok=True)
        if ranks.rank == 0:
            files["shared"] = _write_file(version_folder / "shared", shared())
        if part is not None:
            name = _part_name(ranks.rank, ranks.size)
            files[name] = _write_file(version_folder / name, part())
    except Exception as error:
        problem = _message(ranks.rank, error)
    everybody = ranks.gather((problem, files), tuple[Optional[str], dict[str, _File]])
    abort([problem for problem, _ in everybody])
    manifest = {name: file for _, files in everybody for name, file in files.items()}
    try:
        # Each rank writes the same manifest, so that every host has it.
        written = _write_file(
            version_folder / _MANIFEST, typed_json.dumps(manifest), f".{ranks.rank}"
        )
        _write_file(pointer, f"{version} {written.sha256}".encode())
    except Exception as error:
        problem = _message(ranks.rank, error)
    abort(ranks.gather(problem, Optional[str]))
    try:
        os.replace(pointer, root / _CURRENT)
    except OSError as error:
        problem = f"rank {ranks.rank}: {error}"
    problems = [p for p in ranks.gather(problem, Optional[str]) if p is not None]
    if problems:  # both versions are complete, and are kept
        raise CheckpointError(f"{root} could not be replaced by all: {'; '.join(problems)}")
    for stale in _versions(root):
        if stale != version_folder:
            shutil.rmtree(stale, ignore_errors=True)


def read(
    folder: str | os.PathLike[str],
    ranks: Ranks,
    load: Callable[[bytes], Any],
    prepare: Callable[[Any, Any], Takeover],
) -> Any:
    """Read the current version. All ranks call it; only rank 0 needs access to the shared file.

    Args:
        folder: as in `write`.
        ranks: the participants.
        load: parses the content of a file.
        prepare: checks (shared, this rank's part or None) without changing anything.

    Returns:
        The result of the takeover's `take`.

    Raises:
        CheckpointError: on all ranks, if one of them could not read or commit. All ranks are
            unchanged.
    """
    root, data, takeover, result = Path(folder), b"", None, None
    problem, version, digest = None, "", ""
    try:
        version, digest = _current(root)
        if ranks.rank == 0:
            data = _checked("shared", root / version, _manifest(root / version, digest))
    except Exception as error:
        problem = _message(ranks.rank, error)
    kind = tuple[Optional[str], str, str, int]
    everybody = ranks.gather((problem, version, digest, len(data)), kind)
    _raise_any(root, [problem for problem, *_ in everybody])
    # If a host died while it replaced its pointer, all hosts still have rank 0's version.
    _, version, digest, length = everybody[0]
    data = _broadcast(ranks, data, length)
    try:
        version_folder = root / version
        manifest = _manifest(version_folder, digest)
        _compare("shared", data, manifest)
        shared, part = _loaded("shared", load, data), None
        if shared["mode"] == "sharded":
            if shared["size"] != ranks.size:
                raise CheckpointError(other_size(shared["size"], ranks.size))
            name = _part_name(ranks.rank, ranks.size)
            part = _loaded(name, load, _checked(name, version_folder, manifest))
        takeover = prepare(shared, part)
    except Exception as error:
        problem = _message(ranks.rank, error)
    _raise_any(root, ranks.gather(problem, Optional[str]))
    assert takeover is not None
    try:
        result = takeover.take()
    except Exception as error:
        problem = _message(ranks.rank, error)
    problems = ranks.gather(problem, Optional[str])
    if any(problems):
        takeover.undo()
    _raise_any(root, problems)
    return result


def _broadcast(ranks: Ranks, data: bytes, length: int) -> bytes:
    """Broadcast rank 0's bytes in pieces: no collective takes more than 2**31 at a time."""
    pieces = []
    for start in range(0, length, _PIECE):
        size = min(_PIECE, length - start)
        chunk = data[start : start + size] if ranks.rank == 0 else bytes(size)
        pieces.append(ranks.broadcast(chunk))
    return b"".join(pieces)


def _part_name(rank: int, size: int) -> str:
    return f"rank-{rank}-of-{size}"


def _versions(root: Path) -> list[Path]:
    """Return the folders of versions only; anything else in the folder is the user's."""
    return [p for p in root.iterdir() if re.fullmatch("[0-9a-f]{32}", p.name) and p.is_dir()]


def _current(root: Path) -> tuple[str, str]:
    """Return the current version, and the digest of its manifest."""
    try:
        text = (root / _CURRENT).read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"there is no checkpoint in {root}") from None
    pointer = re.fullmatch(b"([0-9a-f]{32}) ([0-9a-f]{64})", text)
    if pointer is None:
        raise CheckpointError(f"{_CURRENT} is damaged, or no checkpoint")
    version, digest = pointer.groups()
    return version.decode(), digest.decode()


def _manifest(version_folder: Path, digest: str) -> dict[str, _File]:
    """Return the entries of a version's manifest.

    Args:
        version_folder: of the version.
        digest: of the manifest.
    """
    data = _bytes_of(version_folder / _MANIFEST)
    if hashlib.sha256(data).hexdigest() != digest:
        raise CheckpointError(_damaged(_MANIFEST))
    return _loaded(_MANIFEST, lambda data: typed_json.loads(data, dict[str, _File]), data)


def _checked(name: str, version_folder: Path, manifest: Mapping[str, _File]) -> bytes:
    """Read a file and check it against the manifest."""
    data = _bytes_of(version_folder / name)
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
        line = (str(error).splitlines() or [type(error).__name__])[0][:80]
        raise CheckpointError(f"{name} is no checkpoint of this frontend: {line}") from error


def _message(rank: int, error: Exception) -> str:
    kind = "" if isinstance(error, CheckpointError) else f"{type(error).__name__}: "
    return f"rank {rank}: {kind}{error}"


def _raise_any(root: Path, problems: list[str | None]) -> None:
    messages = [p for p in problems if p is not None]
    if messages:
        raise CheckpointError(f"{root} cannot be resumed from: {'; '.join(messages[:4])}")
