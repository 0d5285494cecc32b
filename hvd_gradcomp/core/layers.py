"""Layers of a model and their roles in it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

Layer = tuple[str, Sequence[int], str]  # name, shape, dtype
ROLES = ("first", "last", "bias", "norm", "embedding")


_NO_CONVOLUTION = re.compile(
    r"embed|posit|token|attention|attn|einsum|expert|(^|[./])(query|key|value|in_proj)"
)


# Modules in which frameworks define layers, and those of them whose classes only hold layers.
_FRAMEWORKS = ("torch.nn.", "keras.src.layers.", "keras.layers.")
_OPEN = {
    *("torch.nn.modules.container", "torch.nn.modules.module", "torch.nn.utils.parametrize"),
    "keras.src.layers.layer",
}


def convolving(kind: type) -> bool | None:
    """Return True if a layer class convolves with its weights; None for a user's own class.

    Subclassed layers are classified like their base class.

    >>> convolving(int) is None
    True
    """
    known = [
        cls.__name__
        for cls in kind.__mro__
        if cls.__module__.startswith(_FRAMEWORKS) and cls.__module__ not in _OPEN
    ]
    return any(re.search(r"Conv(\d|Nd)", name) for name in known) if known else None


class Weight(tuple[str, Sequence[int], str]):
    """`Layer` whose owner in the model the frontend knows.

    Attributes:
        convolves: whether the owner is a convolution, and this its kernel.
    """

    convolves: bool

    def __new__(cls, name: str, shape: Sequence[int], dtype: str, convolves: bool) -> Weight:
        self = super().__new__(cls, (name, shape, dtype))
        self.convolves = convolves
        return self

    def __getnewargs__(self) -> Any:
        return (*self, self.convolves)


def convolves(layer: Layer) -> bool:
    """Return True if a layer is the kernel of a convolution.

    Judges by the owner if the frontend knows it; otherwise three to five axes are a kernel's,
    unless the name mentions embeddings, attention or experts.

    >>> convolves(("conv.weight", (8, 4, 3, 3), "float32"))
    True
    >>> convolves(("attention/query/kernel", (64, 8, 8), "float32"))
    False
    >>> convolves(Weight("mixed.weight", (10, 20, 20), "float32", convolves=False))
    False
    """
    if isinstance(layer, Weight):
        return layer.convolves
    name, shape, _ = layer
    return 3 <= len(shape) <= 5 and not _NO_CONVOLUTION.search(name.lower())


class Traits(NamedTuple):
    """Properties of a layer that rules match."""

    name: str
    size: int
    roles: frozenset[str]


def traits_of(layers: Sequence[Layer]) -> list[Traits]:
    """Return the traits of each layer, from its name, its shape and its neighbours."""
    modules: list[list[int]] = []  # runs of neighbours with one prefix and no repeated part
    previous = None
    parts: set[str] = set()
    leaves = []
    for place, (name, _, _) in enumerate(layers):
        prefix, _, leaf = re.sub(r"\.\d+$", "", name).replace("/", ".").rpartition(".")
        leaves.append(leaf)
        if prefix != previous or leaf in parts or not prefix:
            modules.append([])
            parts = set()
        modules[-1].append(place)
        previous = prefix
        parts.add(leaf)
    roles: list[set[str]] = [set() for _ in layers]
    matrices = [m for m in modules if any(len(layers[place][1]) > 1 for place in m)]
    for module in modules:
        vector = [p for p in module if leaves[p] in ("weight", "gamma", "scale")]
        norm = any(len(layers[p][1]) == 1 for p in vector)
        for place in module:
            name = layers[place][0].lower()
            if re.match(r"bias|beta|b$", leaves[place]):
                roles[place].add("bias")
            if norm:
                roles[place].add("norm")
            if "embed" in name:
                roles[place].add("embedding")
            if matrices and module is matrices[0]:
                roles[place].add("first")
            if matrices and module is matrices[-1]:
                roles[place].add("last")
    return [
        Traits(name, prod(shape), frozenset(layer_roles))
        for (name, shape, _), layer_roles in zip(layers, roles)
    ]


def tables_of(layers: Sequence[Layer]) -> list[int]:
    """Return the places of embedding tables, recognised by name and shape.

    >>> tables_of([("embedding/embeddings", (50, 4), "float32"), ("kernel", (4, 2), "float32")])
    [0]
    """
    traits = traits_of(layers)
    return [
        place
        for place, (_, shape, _) in enumerate(layers)
        if len(shape) == 2 and "embedding" in traits[place].roles
    ]
