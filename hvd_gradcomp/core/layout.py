"""Layout of layers in a bucket.

A bucket is one flat vector made of whole layers. Each layer starts at a multiple of `block`, so
that blockwise results (the largest magnitude of a layer, say) never mix two layers, and the last
block always has an element to spare: the *sink*, where unused slots of a payload point. Padding is
zero and stays zero; no method ever sends it.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

BLOCK = 256
_RUN = 16
_STRIDE = 61  # odd, so that runs visit all columns where their number is a power of two
_SAMPLED = 1024


@dataclass(frozen=True)
class Layout:
    """Static description of one bucket; hashable, equal on all ranks.

    Args:
        names: the layers' names, unique.
        shapes: their shapes.
        dtype: of the bucket, "float32" unless a compressor takes others as they are.
        block: alignment in elements, a power of two; 1 packs layers tightly and leaves no sink.
        filters_last: how the framework stores a convolution's weights: [height, width, depth,
            filters] (TensorFlow), or [filters, depth, height, width] (PyTorch). One framework
            trains a model, so the digest leaves it out.
        turned: whether the framework stores filters last and the bucket holds all layers with
            their outputs first, as in `shapes`; see `outputs_first`. They are transposed on their
            way into the bucket, and back on their way out.

    >>> layout = Layout(("weight", "bias"), ((3, 100), (10,)))
    >>> layout.elements, layout.offsets, layout.size, layout.sink
    (310, (0, 512), 768, 767)
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: str = "float32"
    block: int = BLOCK
    filters_last: bool = False
    turned: bool = False

    def __post_init__(self) -> None:
        if self.block < 1 or self.block & (self.block - 1):
            raise ValueError(f"block must be a power of two, got {self.block}")
        if len(self.names) != len(self.shapes):
            raise ValueError(f"{len(self.names)} names for {len(self.shapes)} shapes")
        if len(set(self.names)) != len(self.names):
            twice = sorted({n for n in self.names if self.names.count(n) > 1})
            raise ValueError(f"layer names must be unique; repeated: {', '.join(twice)}")

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Return the elements of each layer, without padding."""
        return tuple(prod(shape) for shape in self.shapes)

    def with_outputs_first(self) -> Layout:
        """Return the bucket as a framework that stores filters first would lay it out.

        >>> layout = Layout(("conv/kernel",), ((3, 5, 64, 128),), filters_last=True)
        >>> layout.with_outputs_first().shapes, layout.with_outputs_first().stored
        (((128, 64, 3, 5),), ((3, 5, 64, 128),))
        """
        if not self.filters_last:
            return self
        shapes = tuple(outputs_first(*layer) for layer in zip(self.names, self.shapes))
        return replace(self, shapes=shapes, filters_last=False, turned=True)

    @cached_property
    def axes(self) -> tuple[tuple[int, int, int], ...]:
        """Return (outputs, inputs, places) of each transposed layer; (elements, 1, 1) of others."""
        return tuple(
            (shape[0], shape[1], prod(shape[2:]))
            if self.turned and _turns(name, shape)
            else (prod(shape), 1, 1)
            for name, shape in zip(self.names, self.shapes)
        )

    @cached_property
    def stored(self) -> tuple[tuple[int, ...], ...]:
        """Return the shapes as the framework stores them."""
        return tuple(
            (*shape[2:], shape[1], shape[0]) if self.turned and _turns(name, shape) else shape
            for name, shape in zip(self.names, self.shapes)
        )

    @cached_property
    def elements(self) -> int:
        """Return the elements of all layers, without padding."""
        return sum(self.sizes)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Return the start of each layer."""
        starts, end = [], 0
        for size in self.sizes:
            starts.append(end)
            end += -(-size // self.block) * self.block
        return tuple(starts)

    @cached_property
    def size(self) -> int:
        """Return the elements of the bucket, with padding; at least one, for collectives."""
        if not self.names:
            return self.block
        end = self.offsets[-1] + self.sizes[-1]
        return max(end, 1) if self.block == 1 else (end // self.block + 1) * self.block

    @property
    def sink(self) -> int:
        """Return an index that no layer uses."""
        if self.block == 1:
            raise ValueError("a layout with block=1 has no sink")
        return self.size - 1

    @cached_property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """Return (start, stop) of the ranges that layers fill without padding between them.

        >>> Layout(("a", "b", "c"), ((256,), (100,), (10,))).runs
        ((0, 356), (512, 522))
        """
        runs: list[tuple[int, int]] = []
        for offset, size in zip(self.offsets, self.sizes):
            if runs and runs[-1][1] == offset:
                offset, size = runs[-1][0], size + offset - runs.pop()[0]
            runs.append((offset, offset + size))
        return tuple(runs)

    @cached_property
    def layer_of_block(self) -> tuple[int, ...]:
        """Return the layer of each block; the sink's block counts to the last layer."""
        layers: list[int] = []
        for layer, size in enumerate(self.sizes):
            layers += [layer] * -(-size // self.block)
        blocks = self.size // self.block
        return tuple(layers + [max(len(self.names) - 1, 0)] * (blocks - len(layers)))

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """Return how many elements of each layer one sampled element stands for: at most 61."""
        return tuple(max(1, min(_STRIDE, size // _SAMPLED)) for size in self.sizes)

    @cached_property
    def sample(self) -> tuple[int, ...]:
        """Return the indices of a strided sample: small layers whole, else every stride-th run.

        A run is 16 neighbours, one cache line: reading one element costs as much as reading 16.
        """
        indices: list[int] = []
        for offset, size, stride in zip(self.offsets, self.sizes, self.strides):
            for start in range(offset, offset + size, _RUN * stride):
                indices += range(start, min(start + _RUN, offset + size))
        return tuple(indices)

    @cached_property
    def layer_of_sample(self) -> tuple[int, ...]:
        """Return the layer of each sampled element."""
        layers: list[int] = []
        for layer, (size, stride) in enumerate(zip(self.sizes, self.strides)):
            whole, rest = divmod(size, _RUN * stride)
            layers += [layer] * (whole * _RUN + min(rest, _RUN))
        return tuple(layers)

    @cached_property
    def stride_of_sample(self) -> tuple[int, ...]:
        """Return how many elements each sampled element stands for."""
        return tuple(self.strides[layer] for layer in self.layer_of_sample)

    @property
    def no_layer_of_sample(self) -> tuple[int, ...]:
        """Return zeros, for samples in which all layers count as one."""
        return (0,) * len(self.sample)

    @property
    def block_bits(self) -> int:
        """Return log2 of `block`."""
        return self.block.bit_length() - 1

    @property
    def numbers(self) -> tuple[int, ...]:
        """Return the bucket as C takes it: size, `block_bits`, and the size of each layer."""
        return (self.size, self.block_bits, *self.sizes)

    @cached_property
    def digest(self) -> int:
        """Return 32 bits that differ when names, shapes, dtype, alignment or order differ."""
        content = self.names, self.shapes, self.dtype, self.block, *["turned"] * self.turned
        return zlib.crc32(repr(content).encode())

    @cached_property
    def _hash(self) -> int:
        return hash((self.names, self.shapes, self.dtype, self.block))

    def __hash__(self) -> int:
        return self._hash  # layouts key caches in the hot path: hash the names once


def outputs_first(name: str, shape: Sequence[int]) -> tuple[int, ...]:
    """Return PyTorch's shape for weights that TensorFlow stores in the given shape.

    TensorFlow stores every weight with its outputs last, its inputs before them, and a kernel's
    places before those. Only embedding tables are stored alike; Keras names them so.

    >>> outputs_first("conv/kernel", (3, 5, 64, 128)), outputs_first("dense/kernel", (10, 4))
    ((128, 64, 3, 5), (4, 10))
    >>> outputs_first("embedding/embeddings", (1000, 16)), outputs_first("conv/bias", (128,))
    ((1000, 16), (128,))
    """
    return (shape[-1], shape[-2], *shape[:-2]) if _turns(name, shape) else tuple(shape)


def _turns(name: str, shape: Sequence[int]) -> bool:
    return len(shape) > 1 and not name.rpartition("/")[2].startswith("embedding")


def plan_buckets(
    layers: Iterable[tuple[str, Sequence[int], str]],
    bucket_bytes: int,
    block: int = BLOCK,
    filters_last: bool = False,
) -> list[Layout]:
    """Split layers, in the order given, into buckets of whole layers of one dtype.

    Args:
        layers: (name, shape, dtype) of each.
        bucket_bytes: a bucket is closed once it holds this much; a larger layer has its own.
        block, filters_last: see `Layout`.

    >>> [b.names for b in plan_buckets([("a", (8,), "float32"), ("b", (4,), "float32")], 32)]
    [('a',), ('b',)]
    """
    if bucket_bytes <= 0:
        raise ValueError(f"bucket_bytes must be positive, got {bucket_bytes}")
    itemsize = {"float64": 8, "float32": 4, "float16": 2}
    buckets: list[Layout] = []
    open_layers: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
    filled: dict[str, int] = {}

    def close(dtype: str) -> None:
        names, shapes = zip(*open_layers.pop(dtype))
        buckets.append(Layout(names, shapes, dtype, block, filters_last))
        filled.pop(dtype)

    for name, shape, dtype in layers:
        extent = prod(shape) * itemsize[dtype]
        if dtype in open_layers and filled[dtype] + extent > bucket_bytes:
            close(dtype)
        open_layers.setdefault(dtype, []).append((name, tuple(int(s) for s in shape)))
        filled[dtype] = filled.get(dtype, 0) + extent
        if filled[dtype] >= bucket_bytes:
            close(dtype)
    for dtype in list(open_layers):
        close(dtype)
    return buckets
