"""Nested objects and tensors as one safetensors file; reading it cannot execute code.

Tensors are stored by number, with an outline in JSON that says where each belongs.
"""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from safetensors import torch as safetensors

_OUTLINE = "outline"
_SPECIAL = "is"  # the key that marks types unknown to JSON
_PLAIN = (bool, int, float, str)
_ASIS = {
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
}
_MAPS: dict[str, Callable[[Any], Any]] = {"dict": dict, "ordered": OrderedDict, "counter": Counter}
_LISTS: dict[str, Callable[[Any], Any]] = {"tuple": tuple, "set": set, "size": torch.Size}


def packed(nest: Any) -> bytes:
    """Serialize nested objects to the content of a file.

    Args:
        nest: None, numbers, strings, bytes, dense tensors of any real or complex dtype, dtypes,
            devices; and lists, tuples, sets and dicts of them.

    Raises:
        TypeError: it holds something else.
    """
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(_outline(nest, tensors, {}))
    outline = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    return bytes(safetensors.save({**tensors, _OUTLINE: outline}))


def unpacked(data: bytes) -> Any:
    """Deserialize the output of `packed`; tensors are on the CPU.

    Raises:
        ValueError: and others, if it is no such file.
    """
    tensors = safetensors.load(data)
    return _filled(json.loads(tensors.pop(_OUTLINE).numpy().tobytes()), tensors)


def _outline(item: Any, tensors: dict[str, torch.Tensor], known: dict[Any, str]) -> Any:
    def inside(item: Any) -> Any:
        return _outline(item, tensors, known)

    if item is None or isinstance(item, _PLAIN):
        # A subclass of one of these is stored as the plain value.
        return next((plain(item) for plain in _PLAIN if isinstance(item, plain)), None)
    if isinstance(item, list):
        return [inside(x) for x in item]
    if isinstance(item, torch.Tensor):
        return _placed(item, tensors, known)
    if isinstance(item, dict):
        kinds = {OrderedDict: "ordered", Counter: "counter"}
        kind = next((name for cls, name in kinds.items() if isinstance(item, cls)), "dict")
        described = {_SPECIAL: kind, "items": [[inside(k), inside(v)] for k, v in item.items()]}
        metadata = getattr(item, "_metadata", None)  # of a module's state: versions
        return described if metadata is None else {**described, "metadata": inside(metadata)}
    if isinstance(item, (tuple, set)):
        kind = (
            "size" if isinstance(item, torch.Size) else "set" if isinstance(item, set) else "tuple"
        )
        return {_SPECIAL: kind, "items": [inside(x) for x in item]}
    if isinstance(item, torch.dtype):
        return {_SPECIAL: "dtype", "name": str(item).partition(".")[2]}
    if isinstance(item, torch.device):
        return {_SPECIAL: "device", "name": str(item)}
    if isinstance(item, bytes):
        return {_SPECIAL: "bytes", "hex": item.hex()}
    raise TypeError(
        f"{str(item)[:40]!r} is of {type(item)}, which no checkpoint can hold: numbers, texts, "
        "tensors, and lists and dicts of them can be saved"
    )


def _placed(x: torch.Tensor, tensors: dict[str, torch.Tensor], known: dict[Any, str]) -> Any:
    """Add a tensor to the file, unless it is there already; return its outline."""
    if x.layout != torch.strided or x.is_quantized:
        raise TypeError(f"a tensor of layout {x.layout} cannot be saved: make it dense")
    x = x.detach()
    same = (x.data_ptr(), x.dtype, x.device, x.shape, x.stride())
    key = known.get(same) if x.numel() else None
    if key is None:
        key = known[same] = str(len(tensors))
        dense = torch.empty(x.shape, dtype=x.dtype, device="cpu").copy_(x)  # shares no memory
        tensors[key] = dense if x.dtype in _ASIS else dense.reshape(-1).view(torch.uint8)
    if x.dtype in _ASIS:
        return {_SPECIAL: "tensor", "key": key}
    dtype = str(x.dtype).partition(".")[2]
    return {_SPECIAL: "tensor", "key": key, "dtype": dtype, "shape": list(x.shape)}


def _filled(outline: Any, tensors: dict[str, torch.Tensor]) -> Any:
    def inside(item: Any) -> Any:
        return _filled(item, tensors)

    if isinstance(outline, list):
        return [inside(x) for x in outline]
    if not isinstance(outline, dict):
        return outline
    kind = outline[_SPECIAL]
    if kind == "tensor":
        x = tensors[outline["key"]]
        if "dtype" not in outline:
            return x
        shape, dtype = [int(n) for n in outline["shape"]], _dtype(outline["dtype"])
        return (x.view(dtype) if math.prod(shape) else x.to(dtype)).reshape(shape)
    if kind in _MAPS:
        made = _MAPS[kind]({inside(k): inside(v) for k, v in outline["items"]})
        if "metadata" in outline:
            made._metadata = inside(outline["metadata"])
        return made
    if kind in _LISTS:
        return _LISTS[kind]([inside(x) for x in outline["items"]])
    if kind == "dtype":
        return _dtype(outline["name"])
    if kind == "device":
        return torch.device(outline["name"])
    if kind == "bytes":
        return bytes.fromhex(outline["hex"])
    raise ValueError(f"there is no {kind!r} in a checkpoint")


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no dtype")
    return dtype
