"""Sample axes of a model's tensors in the forward pass, followed through each function.

Each tensor gets a `SampleAxis`, from the model's inputs on. For views it follows from strides, for
reshapes from the order in memory; the few other functions that move or remove axes are known. If
samples are mixed, or their axis cannot be found, the axis is `LOST`: then per-sample gradients are
an error, never a guess.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class SampleAxis(NamedTuple):
    """Axis of the samples: entry `i` along `axis` belongs to sample `i // inner % samples`."""

    samples: int
    axis: int
    inner: int = 1


class Lost(NamedTuple):
    """Mark of a tensor that depends on samples, but has no axis that counts them."""


LOST = Lost()


class Notes(Generic[T]):
    """Notes on tensors, by weak references; they are not saved with the tensors."""

    def __init__(self) -> None:
        self._notes: dict[int, tuple[weakref.ref[Tensor], T]] = {}

    def of(self, tensor: Tensor) -> T | None:
        """Return the note on a tensor, or None."""
        entry = self._notes.get(id(tensor))
        return entry[1] if entry is not None and entry[0]() is tensor else None

    def put(self, tensor: Tensor, note: T) -> None:
        """Set the note on a tensor."""
        key = id(tensor)
        self._notes[key] = weakref.ref(tensor, partial(self._forget, key)), note

    def _forget(self, key: int, reference: Any) -> None:
        note = self._notes.get(key)
        if note is not None and note[0] is reference:
            del self._notes[key]


_places: Notes[SampleAxis | Lost] = Notes()


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


ELEMENTWISE = _names(
    "add sub mul div true_divide subtract multiply divide rsub __rsub__ __rdiv__ pow __rpow__ "
    "where maximum minimum addcmul addcdiv lerp add_ sub_ mul_ div_"
)
_VIEWS = _names(
    "transpose permute swapaxes swapdims movedim moveaxis t unsqueeze squeeze select narrow chunk "
    "split split_with_sizes tensor_split unbind expand __get__ __getitem__ __iter__"
)
_RESHAPES = _names("view reshape flatten unflatten view_as reshape_as ravel")
_CHANGES = _names("transpose_ t_ swapaxes_ swapdims_ squeeze_ unsqueeze_ resize_ set_")
_MIXES = _names("nonzero argwhere masked_select unique take")
_TURNS = _names("roll flip")


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of nested arguments or results."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)


def mapped(value: Any, change: Any) -> Any:
    """Return nested arguments with `change` applied to each tensor."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: mapped(item, change) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(item, change) for item in value))
    if type(value) in (tuple, list):
        return type(value)(mapped(item, change) for item in value)
    return value


def mark(tensor: Tensor, place: SampleAxis | Lost) -> None:
    """Set a tensor's sample axis."""
    _places.put(tensor, place)


def noted(tensor: Tensor) -> SampleAxis | Lost | None:
    """Return a tensor's sample axis; None if it depends on no sample."""
    return _places.of(tensor)


def inferred(tensor: Tensor, samples: int) -> SampleAxis | Lost:
    """Infer the sample axis from the shape, for a tensor whose origin was not observed."""
    if samples == 1 or (tensor.dim() and tensor.shape[0] == samples):
        return SampleAxis(samples, 0)
    axes = [axis for axis, extent in enumerate(tensor.shape) if extent == samples]
    return SampleAxis(samples, axes[0]) if len(axes) == 1 else LOST


def samples_first(tensor: Tensor, place: SampleAxis) -> Tensor:
    """Reshape to [samples, entries of a sample along the axis, all other axes in order]."""
    moved = tensor.movedim(place.axis, 0)
    split = moved.reshape(-1, place.samples, place.inner, *moved.shape[1:])
    return split.movedim(1, 0).flatten(1, 2)


def follow(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
    """Set the sample axes of a function's results from those of its arguments."""
    first: Tensor | None = None
    for tensor in tensors_in((args, kwargs)):
        if noted(tensor) is not None and (first is None or tensor.dim() > first.dim()):
            first = tensor
    if first is None:
        return
    name = func.__name__
    if name.startswith("new_"):
        return
    if name == "_pad_packed_sequence":
        mark(out[0], SampleAxis(int(args[1][0]), int(not args[2])))
        return
    place = noted(first)
    if isinstance(place, SampleAxis) and name in _VIEWS and first is args[0]:
        places: list[SampleAxis | Lost | None] = _seen(func, args, kwargs, first, place)
    else:
        places = [None]
    results = list(tensors_in(out))
    if len(places) != len(results):
        places = [None] * len(results)
    for result, axis in zip(results, places):
        if name in _CHANGES:
            mark(result, LOST)
        elif noted(result) is None:
            mark(result, axis or _after(name, args, kwargs, first, place, result))


def _seen(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], tensor: Tensor, place: SampleAxis
) -> list[SampleAxis | Lost | None]:
    """Apply the view to a meta tensor with a stride on the sample axis only; return the axes."""
    if place.samples == 1 or any(True for _ in tensors_in((args[1:], kwargs))):
        return []
    strides = [int(axis == place.axis) for axis in range(tensor.dim())]
    probe = torch.empty_strided(tensor.shape, strides, device="meta")
    return [_strided(view, place) for view in tensors_in(func(probe, *args[1:], **kwargs))]


def _strided(view: Tensor, place: SampleAxis) -> SampleAxis | Lost:
    if not view.is_meta:
        return LOST
    axes = [axis for axis, s in enumerate(view.stride()) if s and view.shape[axis] > 1]
    if len(axes) != 1 or view.stride(axes[0]) != 1:
        return LOST
    turn = place.samples * place.inner  # the period of the sample numbers
    whole = view.shape[axes[0]] % turn == 0 and view.storage_offset() % turn == 0
    return place._replace(axis=axes[0]) if whole else LOST


def _after(
    name: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    tensor: Tensor,
    place: SampleAxis | Lost | None,
    out: Tensor,
) -> SampleAxis | Lost:
    if not isinstance(place, SampleAxis) or name in _MIXES:
        return LOST
    if place.samples == 1:
        return place._replace(axis=0)
    if name in _RESHAPES:
        return _reshaped(tensor, place, out)
    if name in ("cat", "concat", "concatenate", "stack"):
        return _joined(name, args, kwargs, place, out)
    axis: int | None = place.axis
    if name == "__getitem__":
        axis = _indexed(args[1], place)
    elif name in _TURNS:
        axis = _turned(name, args, kwargs, tensor, place)
    elif name == "einsum":
        axis = _einsum(args, tensor, place)
    elif name in ELEMENTWISE:
        axis = _aligned(args, kwargs, place.axis - tensor.dim(), out)
    elif out.dim() < tensor.dim():
        axis = _without(args, kwargs, tensor, place)
    if axis is None or axis >= out.dim() or out.shape[axis] != tensor.shape[place.axis]:
        return LOST
    return place._replace(axis=axis)


def _reshaped(tensor: Tensor, place: SampleAxis, out: Tensor) -> SampleAxis | Lost:
    """Return the axis after a reshape, which keeps the distance of samples in memory."""
    if out.numel() != tensor.numel():
        return LOST
    step = place.inner * prod(tensor.shape[place.axis + 1 :])
    for axis in range(out.dim()):
        inner, rest = divmod(step, prod(out.shape[axis + 1 :]) or 1)
        if inner and not rest and out.shape[axis] % (inner * place.samples) == 0:
            return SampleAxis(place.samples, axis, inner)
    return LOST


def _joined(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any], place: SampleAxis, out: Tensor
) -> SampleAxis | Lost:
    along = _dim(args, kwargs, default=0)
    if not isinstance(along, int):
        return LOST
    along %= out.dim()
    if name == "stack":
        return place._replace(axis=place.axis + (along <= place.axis))
    if along == place.axis and any(noted(t) != place for t in tensors_in(args[:1])):
        return LOST
    return place  # along the sample axis: sample numbers repeat with each tensor


def _einsum(args: Sequence[Any], tensor: Tensor, place: SampleAxis) -> int | None:
    left, arrow, right = str(args[0]).replace(" ", "").partition("->")
    if not arrow or "." in left:
        return None
    operands = list(tensors_in(args[1:]))
    letter = left.split(",")[next(i for i, t in enumerate(operands) if t is tensor)][place.axis]
    return right.index(letter) if letter in right else None


def _indexed(index: Any, place: SampleAxis) -> int | None:
    """Return the axis if it is indexed by `:` or by sample-independent integers, else None."""
    first = index[0] if isinstance(index, tuple) and index else index
    if place.axis or not isinstance(first, (slice, Tensor)):
        return None
    if isinstance(first, slice):
        return 0 if first == slice(None) else None
    whole = first.dim() == 1 and not first.dtype.is_floating_point and first.dtype != torch.bool
    return 0 if whole and noted(first) is None else None


def _aligned(args: Sequence[Any], kwargs: Mapping[str, Any], axis: int, out: Tensor) -> int | None:
    """Return the axis of `out`, unless another argument has its samples on another axis."""
    for tensor in tensors_in((args, kwargs)):
        place = noted(tensor)
        if isinstance(place, SampleAxis) and place.axis - tensor.dim() != axis:
            return None
    return out.dim() + axis


def _turned(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any], tensor: Tensor, place: SampleAxis
) -> int | None:
    """Return the axis, unless `roll` or `flip` moves it."""
    dims = kwargs.get("dims", args[2:] if name == "roll" else args[1:])
    dims = dims[0] if len(dims) == 1 and not isinstance(dims[0], int) else dims
    turned = {d % tensor.dim() for d in dims}
    return None if not turned or place.axis in turned else place.axis


def _without(
    args: Sequence[Any], kwargs: Mapping[str, Any], tensor: Tensor, place: SampleAxis
) -> int | None:
    """Return the axis after reduced or removed axes are gone."""
    dims = _dim(args, kwargs, default=None)
    if isinstance(dims, int):
        dims = (dims,)
    if not isinstance(dims, (tuple, list)) or not all(isinstance(d, int) for d in dims):
        return place.axis if place.axis == 0 else None
    gone = {d % tensor.dim() for d in dims}
    return None if place.axis in gone else place.axis - sum(d < place.axis for d in gone)


def _dim(args: Sequence[Any], kwargs: Mapping[str, Any], default: Any) -> Any:
    return kwargs.get("dim", kwargs.get("axis", args[1] if len(args) > 1 else default))
