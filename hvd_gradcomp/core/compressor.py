"""Base class of all methods: a `Compressor` aggregates the ranks' gradients to their mean.

Theory of operation. A *frontend* (`hvd_gradcomp.torch`, `hvd_gradcomp.tensorflow`) copies gradients
into buckets; the runtime asks the compressor for the program of each bucket, and drives it:

    program = compressor.aggregate(ops, context, gradient, state)
    request = next(program)                # a collective, as a value
    request = program.send(reply)          # ... until StopIteration carries (mean, state)

The program is straight-line code. It holds no framework, no handle, no thread: PyTorch parks it on
a Horovod handle or a `torch.distributed` work, TensorFlow runs it to its end while tracing, and
`testing.World` drives all ranks in lockstep. State is a NamedTuple of tensors, passed in and
returned; the frontend stores it. A field named in `replicated` is equal on all ranks; any other
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
    """Rank, step and scale factors that a program runs with.

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
    """Return a cached property computed from a compressor's fields, for a class attribute."""
    attribute: Any = cached_property(of)
    return attribute


class Compressor(stock.Refuses, ABC):
    """Base class of `compression=` arguments. Concrete classes are frozen dataclasses.

    A method needs `init` and `aggregate`. Its optional hooks are in `protocols`.

    Attributes:
        algorithm: number in the wire header, derived from the class name; see `registry`.
        replicated: dotted names of state fields that are equal on all ranks with all they hold.
        reset_on_merge: dotted names of state fields that steer a rank's work, and are neither
            unsent gradients nor shared by ranks: they restart when ranks' states are merged.
        block: alignment of layers in a bucket.
        outputs_first: whether layers lie in a bucket with their outputs first, however the
            framework stores them; for methods that work output by output.
        max_bucket: the most elements that a bucket may have.
        native_dtypes: dtypes that it takes as they are; others are converted to float32 and back.
        whole_model: all layers share one bucket, so nothing is sent before the last gradient.
        state_format: version of a saved state; changes when its tensors, or their meaning, change.
        runs: whether it has programs of its own; a partition only chooses among other compressors.
        is_linear: whether it only sums gradients, or casts of them.
        uses_moments: whether `aggregate` takes `moment=`, the sum of squared sample gradients.
        stated: names of hyper-parameters that messages and tables show even at their defaults.
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
        """Register a method by its class name.

        Args:
            registered: False for an intermediate base class without abstract methods.
        """
        super().__init_subclass__(**arguments)
        if registered and not inspect.isabstract(cls):
            cls.algorithm = registry.register(cls)

    def __str__(self) -> str:
        """Return a short form for messages, without default arguments. `repr` has all of them."""
        return brief(repr(self))

    @abstractmethod
    def init(self, ops: Ops, layout: Layout) -> State:
        """Return the initial state; see `protocols.resizing` if the number of ranks matters."""

    @abstractmethod
    def aggregate(
        self, ops: Ops, context: Context, gradient: Tensor, state: State, **extra: Tensor
    ) -> Program:
        """Return the program of one bucket and step.

        `gradient` is [layout.size], zero outside the layers, and donated: the result may reuse it.
        """

    def check(self, layout: Layout) -> None:
        """Raise a ValueError that names the layers if a bucket is larger than can be addressed."""
        if layout.size > self.max_bucket:
            raise ValueError(
                f"a bucket of {', '.join(layout.names)} has {layout.size} elements; "
                f"{type(self).__name__} can address {self.max_bucket} of them. Ask for smaller "
                "buckets, split the layer, or use another compressor"
            )

    def digest(self, layout: Layout) -> int:
        """Return 32 bits that differ when the layout, the method or a hyper-parameter differs."""
        return zlib.crc32(repr(self).encode(), layout.digest)


class _Brief(ast.NodeTransformer):
    """AST transformer that drops compressor arguments equal to their defaults, unless `stated`."""

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
    """Return a compressor's `repr` without default arguments; return other texts unchanged."""
    try:
        return ast.unparse(_Brief().visit(ast.parse(text, mode="eval")))
    except SyntaxError:
        return text


def _empty(state: State) -> bool:
    return isinstance(state, tuple) and len(state) == 0


def leaves(state: State, path: str = "") -> list[tuple[str, Tensor]]:
    """Return the tensors of a nested NamedTuple state with their dotted names, in order.

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
    """Return True if the tensor at a path, as `leaves` names it, is equal on all ranks."""
    return any(f"{path}.".startswith(f"{field}.") for field in compressor.replicated)


def with_leaves(state: State, values: list[Tensor]) -> State:
    """Return the same structure with other tensors, in the order of `leaves`."""
    rest = iter(values)

    def fill(node: State) -> State:
        if not hasattr(node, "_fields"):
            return node if _empty(node) else next(rest)
        return type(node)(*(fill(getattr(node, field)) for field in node._fields))

    return fill(state)
