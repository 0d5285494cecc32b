"""The one noun and the one verb: a `Compressor` aggregates the ranks' gradients, to their mean.

Theory of operation. A *frontend* (`hvd_gradcomp.torch`, `hvd_gradcomp.tensorflow`) lays gradients
into buckets; the engine asks the compressor for the program of each bucket, and drives it:

    program = compressor.aggregate(ops, context, gradient, state)
    request = next(program)                # a collective, as a value
    request = program.send(reply)          # ... until StopIteration carries (mean, state)

The program is straight-line text. It holds no framework, no handle, no thread: PyTorch parks it on
a handle of Horovod's or a work of `torch.distributed`'s, TensorFlow runs it through while tracing,
`testing.World` drives all ranks in lockstep. State is a NamedTuple of tensors, taken and returned;
the frontend stores it. A field whose name is in `replicated` is equal on all ranks, any other
belongs to its rank.
"""

from __future__ import annotations

import ast
import inspect
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

from hvd_gradcomp.core import registry
from hvd_gradcomp.core.collectives import Collective
from hvd_gradcomp.core.layout import BLOCK, Layout
from hvd_gradcomp.core.protocols import stock
from hvd_gradcomp.ops import Ops, Tensor

T = TypeVar("T")
State = Any
Program = Generator[Collective, Any, tuple[Tensor, State]]


class Context(NamedTuple):
    """Where and when a program runs.

    The result is `postscale * sum over ranks of prescale * sent`: 1 and 1/size for the mean, 1 and
    1 for the sum, 1/f and f/size with `gradient_predivide_factor=f`.
    """

    layout: Layout
    rank: int
    size: int
    step: Any  # int, or an int64 scalar in a TensorFlow graph
    prescale: float = 1.0
    postscale: float = 1.0


def derived(of: Callable[[Any], T]) -> T:
    """An attribute of a compressor that follows from its fields; for what the class declares."""
    attribute: Any = cached_property(of)
    return attribute


class Compressor(stock.Refuses, ABC):
    """What a user passes as `compression=`. Concrete classes are frozen dataclasses.

    A method needs `init` and `aggregate`. What it may have besides is in `protocols`.

    Attributes:
        algorithm: its number in the wire header, which follows from its name; see `registry`.
        replicated: names of state fields, dotted, that are equal on all ranks with all they hold.
        reset_on_merge: names of state fields, dotted, that say how a rank works and not what it has
            still to send or in common with others: where ranks' states become one, they begin anew.
        block: the alignment of layers in a bucket that it wants.
        outputs_first: whether it wants the layers in a bucket with their outputs first, however the
            framework stores them: one that looks at what belongs to an output.
        max_bucket: the most elements that a bucket may have.
        native_dtypes: dtypes that it takes as they are; others are converted to float32 and back.
        whole_model: all layers share one bucket, so nothing is sent before the last gradient.
        state_format: of a saved state; another where it holds other tensors, or they mean something
            else.
        runs: whether it has programs of its own; a partition only chooses among others.
        is_linear: whether it does nothing but to add up gradients, or what they are cast to.
        uses_moments: whether `aggregate` takes `moment=`, the sum of squared sample gradients.
        stated: names of hyper-parameters that messages and tables show at their defaults as well.
        needs_execution_order: whether the compressor of a layer depends on the order in which the
            model uses its layers; see `protocols.layering`.
    """

    algorithm: int
    replicated: frozenset[str] = frozenset()
    reset_on_merge: frozenset[str] = frozenset()
    block: int = BLOCK
    outputs_first: bool = False
    max_bucket: int = 1 << 31
    native_dtypes: frozenset[str] = frozenset({"float32"})
    whole_model: bool = False
    state_format: int = 1
    runs: bool = True
    is_linear: bool = False
    uses_moments: bool = False
    needs_execution_order: bool = False
    stated: frozenset[str] = frozenset()

    def __init_subclass__(cls, registered: bool = True, **arguments: Any) -> None:
        """Makes a method known by its name.

        Args:
            registered: False for a base of others that has no abstract method.
        """
        super().__init_subclass__(**arguments)
        if registered and not inspect.isabstract(cls):
            cls.algorithm = registry.register(cls)

    def __str__(self) -> str:
        """For messages: without what is as it is by default. `repr` has all of it."""
        return brief(repr(self))

    @abstractmethod
    def init(self, ops: Ops, layout: Layout) -> State:
        """The state before the first step; see `protocols.resizing` if ranks count in it."""

    @abstractmethod
    def aggregate(
        self, ops: Ops, context: Context, gradient: Tensor, state: State, **extra: Tensor
    ) -> Program:
        """The program of one bucket and step.

        `gradient` is [layout.size], zero outside the layers. Donating: the result may lie in it.
        """

    def check(self, layout: Layout) -> None:
        """Raises a ValueError that names the layers if a bucket is larger than can be addressed."""
        if layout.size > self.max_bucket:
            raise ValueError(
                f"a bucket of {', '.join(layout.names)} has {layout.size} elements; "
                f"{type(self).__name__} can address {self.max_bucket} of them. Ask for smaller "
                "buckets, split the layer, or use another compressor"
            )

    def digest(self, layout: Layout) -> int:
        """32 bits that differ when the layout, the method or a hyper-parameter differs."""
        return zlib.crc32(repr(self).encode(), layout.digest)


class _Brief(ast.NodeTransformer):
    """Drops the arguments of compressors that are as they are by default, unless `stated`."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        name = getattr(node.func, "id", "")
        kind = registry.known().get(name)
        known = getattr(kind, "__dataclass_fields__", {})
        stated = getattr(kind, "stated", ())
        defaults = {k: repr(field.default) for k, field in known.items() if k not in stated}
        node.keywords = [
            given
            for given in node.keywords
            if defaults.get(given.arg or "") != ast.unparse(given.value)
        ]
        return node


def brief(text: str) -> str:
    """The `repr` of a compressor, without what is as it is by default; other texts as they are."""
    try:
        return ast.unparse(_Brief().visit(ast.parse(text, mode="eval")))
    except SyntaxError:
        return text


def _empty(state: State) -> bool:
    return isinstance(state, tuple) and len(state) == 0


def leaves(state: State, path: str = "") -> list[tuple[str, Tensor]]:
    """The tensors of a nested NamedTuple state with their dotted names, in order.

    >>> class Pair(NamedTuple):
    ...     r: float
    ...     v: float
    >>> leaves(Pair(1.0, 2.0))
    [('r', 1.0), ('v', 2.0)]
    """
    if not hasattr(state, "_fields"):
        return [] if _empty(state) else [(path, state)]
    found = []
    for field in state._fields:
        found += leaves(getattr(state, field), f"{path}.{field}" if path else field)
    return found


def is_replicated(compressor: Compressor, path: str) -> bool:
    """Whether the tensor that `leaves` calls so is equal on all ranks."""
    return any(f"{path}.".startswith(f"{field}.") for field in compressor.replicated)


def with_leaves(state: State, values: list[Tensor]) -> State:
    """The same structure with other tensors, in the order of `leaves`."""
    rest = iter(values)

    def fill(node: State) -> State:
        if not hasattr(node, "_fields"):
            return node if _empty(node) else next(rest)
        return type(node)(*(fill(getattr(node, field)) for field in node._fields))

    return fill(state)
