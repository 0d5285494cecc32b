"""Broadcast of parameters, or of nested objects and tensors, from a root rank.

First the ranks compare descriptions, then the root's tensors are sent. So a mismatch is one error
on all ranks, where Horovod's own functions would deadlock; and a rank without state receives the
root's.

Tensors are sent as bytes, many in one broadcast: of any dtype, contiguous or not.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Optional

import cloudpickle
import horovod.torch as horovod
import torch

from hvd_gradcomp.runtime import config_check
from hvd_gradcomp.runtime.config_check import MismatchError
from hvd_gradcomp.torch.comm import horovod as comm_horovod
from hvd_gradcomp.torch.comm.horovod import gather_objects
from hvd_gradcomp.torch.interop.inference import outside_inference

_NAME = "gradcomp.handout"
_PIECE = 64 << 20  # bytes of a broadcast; none takes more than 2**31


@outside_inference()
def broadcast_parameters(
    params: Any, root_rank: int, *, process_set: Any = horovod.global_process_set
) -> None:
    """Broadcast as Horovod's own function does, for tensors of any dtype and memory format.

    Args:
        params: `model.state_dict()`, or parameters with or without their names.
        root_rank: the rank whose values all ranks get.
        process_set: the ranks that call it.

    Raises:
        MismatchError: on all ranks, if they do not pass the same tensors, naming those that differ.
        ValueError: there is no such root.
    """
    named: dict[str, torch.Tensor] = {}

    def describe() -> RankInfo:
        named.update(_named(params))
        kinds = {name: f"{tuple(x.shape)} {x.dtype}" for name, x in named.items()}
        return RankInfo(kinds, [str(x.device) for x in named.values()])

    everybody = agreed("broadcast_parameters", describe, list[str], root_rank, process_set)
    root = everybody[root_rank]
    _fill([named[name] for name in root.description], root.more, root_rank, process_set)


def _named(params: Any) -> dict[str, torch.Tensor]:
    """Return tensors by name, or by position if unnamed."""
    pairs = list(params.items() if isinstance(params, Mapping) else params)
    if not all(isinstance(pair, tuple) for pair in pairs):
        pairs = [(f"tensor {place}", x) for place, x in enumerate(pairs)]
    for name, x in pairs:
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} is no tensor, but of {type(x)}: leave it out")
    if len(dict(pairs)) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice} names two tensors")
    return {name: x.detach() for name, x in pairs}


class RankInfo(NamedTuple):
    """A rank's description of itself, compared before anything is broadcast."""

    description: config_check.Description  # has to be equal on all ranks
    more: Any = None


def agreed(
    what: str, describe: Callable[[], RankInfo], kind: Any, root_rank: int, process_set: Any
) -> dict[int, RankInfo]:
    """Gather each rank's `RankInfo`, and check that the descriptions are equal.

    Args:
        what: the function that was called, for error messages.
        describe: makes this rank's `RankInfo`; its exceptions end the call on all ranks.
        kind: the type of `RankInfo.more`, see `typed_json`.
        root_rank: the rank that will broadcast.
        process_set: the ranks that call it.

    Raises:
        MismatchError: on all ranks: descriptions differ, or `describe` raised an exception.
        ValueError: the root or this rank does not take part.
    """
    ranks = _ranks(process_set)
    if root_rank not in ranks or horovod.rank() not in ranks:
        one = "this rank" if root_rank in ranks else f"root_rank={root_rank}"
        raise ValueError(
            f"{what}: {one} does not take part. Name one of the ranks {ranks} as root, and call it "
            "on them alone"
        )
    info, problem = None, None
    try:
        info = describe()
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    kinds = tuple[Optional[tuple[config_check.Description, kind]], Optional[str]]
    everybody = dict(zip(ranks, gather_objects((info, problem), kinds, _NAME, process_set)))
    problems = [f"rank {rank}: {error}" for rank, (_, error) in everybody.items() if error]
    if problems:
        raise MismatchError(f"{what} has changed nothing: {'; '.join(problems[:4])}")
    infos = {rank: RankInfo(*fields) for rank, (fields, _) in everybody.items()}
    config_check.agree([rank_info.description for rank_info in infos.values()], ranks)
    return infos


def _ranks(process_set: Any) -> list[int]:
    return list(process_set.ranks or range(horovod.size()))


# -- broadcast of tensors --------------------------------------------------------------------------


class _Outline(cloudpickle.Pickler):
    """Pickler of nested objects that collects their tensors instead of writing them."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[torch.Tensor] = []

    def persistent_id(self, item: Any) -> Any:
        if not isinstance(item, torch.Tensor):
            return None
        self.tensors.append(item.detach())
        return len(self.tensors) - 1


class _Filled(pickle.Unpickler):
    """Unpickler that puts the tensors back."""

    def __init__(self, file: io.BytesIO, tensors: list[torch.Tensor]) -> None:
        super().__init__(file)
        self.tensors = tensors

    def persistent_load(self, place: Any) -> torch.Tensor:
        return self.tensors[place]


@outside_inference()
def from_root(nest: Any, root_rank: int = 0, process_set: Any = horovod.global_process_set) -> Any:
    """Return the root's nested objects and tensors, on all ranks; others' `nest` is ignored."""
    file = io.BytesIO()
    outline = _Outline(file)
    root, problem = horovod.rank() == root_rank, None
    if root:
        try:
            outline.dump(nest)
        except Exception as error:
            problem = f"rank {root_rank} cannot hand this out: {type(error).__name__}: {error}"
    kinds = [
        (x.shape, torch.empty_like(x, device="meta").stride(), x.dtype, str(x.device))
        for x in outline.tensors
    ]
    problem, text, kinds = horovod.broadcast_object(
        (problem, file.getvalue(), kinds), root_rank, name=_NAME, process_set=process_set
    )
    if problem is not None:
        raise MismatchError(problem)
    devices = [device for *_, device in kinds]
    tensors = outline.tensors
    if not root:  # the root's device index need not exist here
        tensors = [
            torch.empty_strided(shape, stride, dtype=dtype, device=device.partition(":")[0])
            for shape, stride, dtype, device in kinds
        ]
    _fill(tensors, devices, root_rank, process_set)
    return nest if root else _Filled(io.BytesIO(text), tensors).load()


def _fill(
    tensors: Sequence[torch.Tensor], devices: Sequence[str], root_rank: int, process_set: Any
) -> None:
    """Copy the root's values into the tensors.

    Args:
        tensors: of the same shapes and dtypes on all ranks, in the same order.
        devices: the root's devices for them.
        root_rank: the rank whose values count.
        process_set: the ranks that take part.
    """
    root = horovod.rank() == root_rank
    wholes = [x.contiguous() for x in tensors]
    flat = [whole.reshape(-1).view(torch.uint8) for whole in wholes]
    for number, cuts in enumerate(_pieces([x.numel() for x in flat], devices)):
        views = [flat[place][start:end] for place, start, end in cuts]
        sizes = [view.numel() for view in views]
        piece = torch.cat(views) if root else views[0].new_empty(sum(sizes))
        loan = comm_horovod.broadcast(piece, root_rank, f"{_NAME}.{number}", process_set)
        received = loan.wait()
        if received.is_cuda:  # Horovod makes the default stream wait, not the one used here
            here = torch.cuda.current_stream(received.device)
            here.wait_stream(torch.cuda.default_stream(received.device))
        if not root:
            for view, value in zip(views, received.split(sizes)):
                view.copy_(value)
    for x, whole in zip(tensors, wholes):
        if not root and not x.is_contiguous():
            x.copy_(whole)


def _pieces(sizes: Sequence[int], devices: Sequence[str]) -> Iterator[list[tuple[int, int, int]]]:
    """Yield the (place, start, end) cuts of each broadcast: up to `_PIECE` bytes of one device."""
    cuts: list[tuple[int, int, int]] = []
    space = _PIECE
    for place, (size, device) in enumerate(zip(sizes, devices)):
        start = 0
        while start < size:
            if cuts and (space == 0 or device != devices[cuts[-1][0]]):
                yield cuts
                cuts, space = [], _PIECE
            end = min(size, start + space)
            cuts.append((place, start, end))
            start, space = end, space - (end - start)
    if cuts:
        yield cuts
