"""Checkpoints whose files are damaged, missing, exchanged, or made to do harm."""

from __future__ import annotations

import hashlib
import json
import pickle
import shutil
import struct
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from hvd_gradcomp.checkpoint import files as checkpoint_files
from hvd_gradcomp.checkpoint.files import MODES, Ranks, Takeover
from hvd_gradcomp.checkpoint.schema import CheckpointError
from tests.chaos import damage
from tests.chaos.outcomes import Input


class Target(NamedTuple):
    """A checkpoint that is attacked.

    Attributes:
        save: writes one to a folder, of a state that a number tells.
        load: takes it back; what was saved beside.
        contents: a digest of what has been taken, of all ranks.
        spoil: makes the contents something else than what was saved.
    """

    save: Callable[[Path, str, int], None]
    load: Callable[[Path], Any]
    contents: Callable[[], str]
    spoil: Callable[[], None]


def attacks(seed: int, share: float = 1.0, only: Sequence[str] = ()) -> Iterator[Input]:
    """Yield the attacks of this part.

    Args:
        seed: of what is drawn.
        share: of the inputs.
        only: words, of which one has to be in the name of a target; all if empty.
    """
    for where, make in TARGETS.items():
        if only and not any(word in where for word in only):
            continue
        for mode in MODES:
            dice = Random(f"{seed} {where} {mode}")
            with tempfile.TemporaryDirectory() as folder:
                yield from _on(make(), f"{where}, {mode}", mode, Path(folder), dice, share)


def _on(
    target: Target, where: str, mode: str, folder: Path, dice: Random, share: float
) -> Iterator[Input]:
    older, good = folder / "older", folder / "good"
    target.save(older, mode, 1)
    target.save(good, mode, 2)
    target.load(good)
    saved = target.contents()
    for name in _names(good):
        for attack, harm in damage.OF_FILES.items():
            draws = attack not in ("zeros", "empty")
            for number in range(max(1, round((12 if draws else 1) * share))):
                whole = _path(good, name).read_bytes()
                _path(good, name).write_bytes(harm(whole, dice))
                case = f"{mode}, {name}, {number}"
                yield _outcome(target, good, where, attack, saved, case)
                _path(good, name).write_bytes(whole)
    for attack, change in _hostile(folder / "ran").items():
        for name in _names(good):
            attacked = folder / "attacked"
            shutil.copytree(good, attacked)
            case = f"{mode}, {name}"
            if change(attacked, older, name):
                yield _outcome(target, attacked, where, attack, saved, case)
            shutil.rmtree(attacked)
            if (folder / "ran").exists():
                yield Input(where, attack, "diverged", "what is in a file was run", case=case)
                (folder / "ran").unlink()
    target.load(good)
    assert target.contents() == saved, "the checkpoint is as it was before all attacks"


def _outcome(target: Target, folder: Path, where: str, attack: str, saved: str, case: str) -> Input:
    target.spoil()
    before = target.contents()
    assert before != saved
    try:
        rest = target.load(folder)
    except CheckpointError as error:
        message = f"CheckpointError: {error}"
        named = any(word in str(error) for word in _NAMED)
        same = target.contents() == before
        outcome = "diverged" if not same else "ended" if named else "unexplained"
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
        outcome = "unexplained" if target.contents() == before else "diverged"
    else:
        message = ""
        right = target.contents() == saved and rest == {"epoch": 2}
        outcome = "survived" if right else "diverged"
    return Input(where, attack, outcome, message, case=case)


_NAMED = ("current", "manifest", "shared", "rank-", "there is no checkpoint")


def _version(folder: Path) -> Path:
    return next(path for path in folder.iterdir() if path.is_dir())


def _path(folder: Path, name: str) -> Path:
    return folder / name if name == "current" else _version(folder) / name


def _names(folder: Path) -> list[str]:
    return ["current", *sorted(path.name for path in _version(folder).iterdir())]


def _hostile(ran: Path) -> dict[str, Callable[[Path, Path, str], bool]]:
    """Attacks that need more than one file, by name; each says whether it is one."""

    def forged(data: bytes) -> Callable[[Path, Path, str], bool]:
        """Puts this in place of a file, and makes all checksums right again."""

        def change(folder: Path, older: Path, name: str) -> bool:
            version = _version(folder)
            if name == "current":
                (folder / name).write_bytes(data)
                return True
            if name != "manifest":
                files = json.loads((version / "manifest").read_text())
                files[name] = [len(data), hashlib.sha256(data).hexdigest()]
                (version / name).write_bytes(data)
            text = data if name == "manifest" else json.dumps(files).encode()
            (version / "manifest").write_bytes(text)
            (folder / "current").write_text(f"{version.name} {hashlib.sha256(text).hexdigest()}")
            return True

        return change

    def exchanged(folder: Path, older: Path, name: str) -> bool:
        others = [other for other in _names(folder) if other > name]
        for other in others[:1]:
            a, b = _path(folder, name), _path(folder, other)
            data = a.read_bytes()
            a.write_bytes(b.read_bytes())
            b.write_bytes(data)
        return bool(others)

    def of_older(folder: Path, older: Path, name: str) -> bool:
        shutil.copyfile(_path(older, name), _path(folder, name))
        return True

    def missing(folder: Path, older: Path, name: str) -> bool:
        _path(folder, name).unlink()
        return True

    def a_folder(folder: Path, older: Path, name: str) -> bool:
        path = _path(folder, name)
        path.unlink()
        path.mkdir()
        return True

    def elsewhere(folder: Path, older: Path, name: str) -> bool:
        if name == "current":
            (folder / name).write_text(f"../{older.name} {'0' * 64}")
        return name == "current"

    huge = struct.pack("<Q", 2**63 - 1)
    header = json.dumps({"0": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}})
    return {
        "two files exchanged": exchanged,
        "from an older checkpoint": of_older,
        "missing": missing,
        "a folder in its place": a_folder,
        "points elsewhere": elsewhere,
        "a pickle, checksums right": forged(pickle.dumps(_Runs(ran))),
        "a huge length, checksums right": forged(huge + b"{}"),
        "a huge tensor, checksums right": forged(struct.pack("<Q", len(header)) + header.encode()),
        "JSON without end, checksums right": forged(b"[" * 100_000),
        "nothing, checksums right": forged(b""),
    }


class _Runs:
    """What leaves a file behind where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self._path,)


# -- what is saved and loaded --------------------------------------------------------------------


def pytorch() -> Target:
    """A model, its optimizer and what one rank's compressor keeps, by the frontend."""
    import torch

    import hvd_gradcomp.torch as hvd
    from tests.parallel.workers.results import digest

    hvd.init()
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(3, 40), torch.nn.BatchNorm1d(40))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr=0.1),
        model.named_parameters(),
        compression=hvd.StromCompressor(tau=0.2),
    )

    def train() -> None:
        optimizer.zero_grad()
        model(torch.randn(4, 3)).square().sum().backward()
        optimizer.step()

    def save(folder: Path, mode: str, state: int) -> None:
        train()
        hvd.save_checkpoint(folder, mode=mode, model=model, optimizer=optimizer, epoch=state)

    def contents() -> str:
        state = optimizer.state_dict()
        tensors = [x for s in state["state"].values() for x in s.values() if torch.is_tensor(x)]
        tensors += [x for b in state["gradcomp"]["buckets"] for x in b["state"].values()]
        tensors += [torch.tensor(state["gradcomp"]["steps"]), *model.state_dict().values()]
        return digest([x.detach().numpy() for x in tensors])

    return Target(
        save,
        lambda folder: hvd.load_checkpoint(folder, model=model, optimizer=optimizer),
        contents,
        train,
    )


def tensorflow() -> Target:
    """A Keras model, its optimizer and what one rank's compressor keeps, by the frontend."""
    import keras
    import numpy as np

    import hvd_gradcomp.tensorflow as hvd
    from tests.parallel.workers.results import digest

    hvd.init()
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(40)])
    plain = keras.optimizers.Adam(0.1)
    model.compile(hvd.DistributedOptimizer(plain, compression=hvd.StromCompressor(0.2)), "mse")
    model.optimizer.build(model.trainable_variables)
    everything = [*model.variables, *model.optimizer.variables]
    random = np.random.default_rng(1)

    def save(folder: Path, mode: str, state: int) -> None:
        model.fit(random.standard_normal((8, 3)), np.ones((8, 40)), batch_size=4, verbose=0)
        hvd.save_checkpoint(folder, mode=mode, model=model, epoch=state)

    def spoil() -> None:
        for variable in everything:
            value = np.asarray(variable.value)
            if value.dtype == np.float32:
                variable.assign(random.standard_normal(value.shape))

    return Target(
        save,
        lambda folder: hvd.load_checkpoint(folder, model=model),
        lambda: digest([np.asarray(v.value) for v in everything]),
        spoil,
    )


def ranks(size: int = 3) -> Target:
    """Tensors of several ranks, a thread each, without a frontend."""
    import torch

    from hvd_gradcomp.torch.interop import safetensors_file
    from tests.parallel.workers.results import digest

    random = torch.Generator().manual_seed(1)
    states = [{"weight": torch.zeros(30), "kept": torch.zeros(30)} for _ in range(size)]

    def spoil() -> None:
        for rank in states:
            rank.update({name: torch.randn(30, generator=random) for name in rank})

    def save(folder: Path, mode: str, state: int) -> None:
        spoil()

        def of(rank: Ranks) -> None:
            values = states[rank.rank]
            shared = {"mode": mode, "size": size, "weight": values["weight"], "epoch": state}
            part = (
                None if mode == "consolidated" else lambda: safetensors_file.packed(values["kept"])
            )
            if part is None:
                shared["kept"] = values["kept"]
            checkpoint_files.write(folder, rank, lambda: safetensors_file.packed(shared), part)

        together(size, of)
        load(folder)

    def load(folder: Path) -> Any:
        def of(rank: Ranks) -> Any:
            def prepare(shared: Any, part: Any) -> Takeover:
                before = dict(states[rank.rank])
                new = {"weight": shared["weight"], "kept": shared["kept"] if part is None else part}
                assert all(x.shape == before[name].shape for name, x in new.items())

                def take() -> Any:
                    states[rank.rank].update(new)
                    return {"epoch": shared["epoch"]}

                return Takeover(take, lambda: states[rank.rank].update(before))

            return checkpoint_files.read(folder, rank, safetensors_file.unpacked, prepare)

        return together(size, of)[0]

    def contents() -> str:
        return digest(x.numpy() for rank in states for x in rank.values())

    return Target(save, load, contents, spoil)


def together(size: int, work: Callable[[Ranks], Any]) -> list[Any]:
    """Runs what each rank does in a thread of its own.

    Raises:
        CheckpointError: and others; what the first rank has raised, once all have ended.
        AssertionError: not all have raised.
    """
    barrier, items = threading.Barrier(size), [None] * size
    results: list[Any] = [None] * size
    failures: list[Exception | None] = [None] * size

    def all_of(rank: int, item: Any) -> list[Any]:
        items[rank] = item
        barrier.wait(60)
        everybody = list(items)
        barrier.wait(60)
        return everybody

    def run(rank: int) -> None:
        try:
            how = (lambda x, kind: all_of(rank, x)), (lambda x: all_of(rank, x)[0])
            results[rank] = work(Ranks(rank, size, *how))
        except Exception as error:
            failures[rank] = error
            if not isinstance(error, CheckpointError):
                barrier.abort()  # the others would wait

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    errors = [error for error in failures if error is not None]
    if errors:
        assert len(errors) == size, f"not all ranks have raised: {failures}"
        raise errors[0]
    return results


TARGETS = {
    "PyTorch": pytorch,
    "Keras": tensorflow,
    "3 ranks in threads": ranks,
}
