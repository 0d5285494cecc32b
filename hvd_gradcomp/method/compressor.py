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

import inspect
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from hvd_gradcomp.core import registry
from hvd_gradcomp.core.collectives import Allgather, Allreduce, Collective, Switch
from hvd_gradcomp.core.cost_model import Exchange, dense_exchange
from hvd_gradcomp.core.layers import Layer
from hvd_gradcomp.core.layout import BLOCK, Layout
from hvd_gradcomp.ops import Ops, Tensor

T = TypeVar("T")
State = Any
Program = Generator[Collective, Any, tuple[Tensor, State]]


class Context(NamedTuple):
    """Rank, step and scale factors that a program runs with.

    The result is `postscale * sum over ranks of prescale * sent`: 1 and 1/size for the mean, 1 and
    1 for the sum, 1/f and f/size with `gradient_predivide_factor=f`.

    With `owns_gradient` the state may keep the gradient's memory, and the result may take the
    state's in exchange. Only a compressor that `keeps_gradient` is asked to.
    """

    layout: Layout
    rank: int
    size: int
    step: Any  # int, or an int64 scalar in a TensorFlow graph
    prescale: float = 1.0
    postscale: float = 1.0
    owns_gradient: bool = False


class Report(NamedTuple):
    """Report on a bucket's state; its numbers were read from the device.

    Attributes:
        sent: elements of each layer that this rank has sent.
        residual: what was accumulated and not yet sent, [size]; None if nothing is kept.
        losses: what a learned method loses, as shares of the energy, by name.
        level_changes: how often its capacity level has changed, see `capacity`; equal on all ranks.
    """

    sent: Sequence[int]
    residual: Tensor | None = None
    losses: Mapping[str, float] = MappingProxyType({})
    level_changes: int = 0


def derived(of: Callable[[Any], T]) -> T:
    """Return a cached property computed from a compressor's fields, for a class attribute."""
    attribute: Any = cached_property(of)
    return attribute


_HOOKS = {
    "Handover": ("residual", "inherit", "velocity", "with_velocity", "correction", "corrected"),
    "Learned": ("retrained", "rehearsed", "course", "owner"),
}


class Compressor(ABC):
    """Base class of `compression=` arguments. Concrete classes are frozen dataclasses.

    A method needs `init` and `aggregate`. Every other method is an optional hook: it has a default
    here, and callers call it on any compressor. The hooks of some kinds of methods are in mixins:
    `method.handover.Handover` if it keeps a residual or applies momentum,
    `method.learned.Learned` if it learns.

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
        runs: whether it has programs of its own; a partition only chooses among other compressors.
        compresses: whether it sends fewer bytes, or means to; warnings are for such methods.
        is_linear: whether it only sums gradients, or casts of them.
        is_quantizer: whether it sends every element, in fewer bits.
        sends_any_number: whether any number of elements may pass its rule, so that payloads change
            their size.
        varies_in_size: whether gradients decide the size of its payload, of which `exchange_of` has
            the smallest.
        uses_moments: whether `aggregate` takes `moment=`, the sum of squared sample gradients.
        keeps_gradient: whether its state may take over the gradient's memory, see `Context`, which
            saves it a walk over the bucket.
        needs_execution_order: whether the compressor of a layer depends on the order in which the
            model uses its layers; see `of_layers`.
    """

    algorithm: int
    replicated: frozenset[str] = frozenset()
    reset_on_merge: frozenset[str] = frozenset()
    block: int = BLOCK
    outputs_first: bool = False
    max_bucket: int = 1 << 31
    native_dtypes: frozenset[str] = frozenset({"float32"})
    whole_model: bool = False
    runs: bool = True
    compresses: bool = True
    is_linear: bool = False
    is_quantizer: bool = False
    sends_any_number: bool = False
    varies_in_size: bool = False
    uses_moments: bool = False
    keeps_gradient: bool = False
    needs_execution_order: bool = False

    def __init_subclass__(cls, registered: bool = True, **arguments: Any) -> None:
        """Register a method by its class name.

        Args:
            registered: False for an intermediate base class without abstract methods.

        Raises:
            TypeError: it has a hook that is called on one kind of methods alone, and is of none.
        """
        super().__init_subclass__(**arguments)
        bases = {base.__name__ for base in cls.__mro__}
        for kind, hooks in _HOOKS.items():
            unused = [name for name in hooks if name in vars(cls)]
            if unused and kind not in bases:
                raise TypeError(
                    f"{cls.__name__}.{unused[0]} would never be called: derive {cls.__name__} from "
                    f"hvd_gradcomp.method.{kind.lower()}.{kind}, whose hook it is"
                )
        if registered and not inspect.isabstract(cls):
            cls.algorithm = registry.register(cls)

    def __str__(self) -> str:
        """Return a short form for messages, without default arguments. `repr` has all of them."""
        arguments: tuple[Any, ...] = fields(self) if is_dataclass(self) else ()
        values = [(x.name, getattr(self, x.name), x.default) for x in arguments]
        shown = [
            f"{name}={value if isinstance(value, Compressor) else repr(value)}"
            for name, value, default in values
            if value != default
        ]
        return f"{type(self).__name__}({', '.join(shown)})"

    @abstractmethod
    def init(self, ops: Ops, layout: Layout) -> State:
        """Return the initial state; see `start` if the number of ranks matters."""

    @abstractmethod
    def aggregate(
        self, ops: Ops, context: Context, gradient: Tensor, state: State, **extra: Tensor
    ) -> Program:
        """Return the program of one bucket and step.

        `gradient` is [layout.size], zero outside the layers, and donated: the result may reuse it.
        The result is zero there too, since frontends reuse it for the next gradient.
        """

    def decode(
        self, ops: Ops, layout: Layout, payload: Tensor, step: int = 0, state: State | None = None
    ) -> Tensor:
        """Return the gradient that one payload stands for, [layout.size]; to look at it.

        The method's program runs on one rank, and receives the payload twice: the mean of the two
        is what the payload stands for. A method is decodable if it exchanges by one allgather, or
        by one allreduce.

        Args:
            ops: the tensor operations; dynamic ones.
            layout: of the bucket.
            payload: what a rank hands to the collective.
            step: in which it did so.
            state: of the rank before that step, which is donated; by default the initial one, whose
                capacity level is that of a first payload.

        Raises:
            ValueError: the payload means nothing without those of other ranks, or without another
                payload of its own rank.
            PayloadError: it is damaged, or of another method, layout, step or capacity level.
        """
        context = Context(layout, 0, 2, step, 1.0, 0.5)
        state = self.start(ops, layout, 2) if state is None else state
        extra = {"moment": ops.zeros((layout.size,))} if self.uses_moments else {}
        gradient = ops.zeros((layout.size,))
        program = _without_switches(self.aggregate(ops, context, gradient, state, **extra))
        request = next(program)
        if isinstance(request, (Allgather, Allreduce)):
            gathers = isinstance(request, Allgather)
            reply = ops.stack((payload, payload)) if gathers else payload * 1.0
            try:
                request = program.send(reply)
            except StopIteration as done:
                decoded, _ = done.value
                return decoded
            kinds = f"more than one collective, an {'allgather' if gathers else 'allreduce'} first"
        else:
            kinds = f"{type(request).__name__.lower()} first"
        raise ValueError(
            f"one payload cannot be decoded alone: the method exchanges by {kinds}, and its result "
            f"needs what the other ranks send. Run all ranks with hvd_gradcomp.testing.World. It "
            f"is {self}"
        )

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

    @property
    def working(self) -> Compressor:
        """Compressor of the last phase, without wrappers; by default this one."""
        return self

    # -- which layers it takes -----------------------------------------------------------------

    def of_layers(self, layers: Sequence[Layer], ranks: int) -> Sequence[Compressor]:
        """Return the compressor of each layer; by default this one for all.

        Args:
            layers: (name, shape, dtype) in the order of the model.
            ranks: how many exchange.

        Raises:
            ValueError: it cannot work on these layers, or with so many ranks.
        """
        return [self] * len(layers)

    def layer_bytes(self, shape: Sequence[int]) -> float | None:
        """Return about how many bytes a layer sends; None if that depends on the gradients.

        Args:
            shape: with the outputs first, as in `core.layout.outputs_first`.
        """
        return None

    def in_halves(self, layout: Layout) -> bool:
        """Return True if it sums float32 or float16 elements in half precision."""
        return False

    def exchange_of(self, layout: Layout, ranks: int) -> Exchange | None:
        """Return how a bucket travels among so many ranks; None if its gradients decide.

        A method whose payload may have several sizes returns the smallest. Where that moves no
        fewer bytes than dense gradients, users are warned at the first step.
        """
        return None

    def drawbacks(self, layouts: Sequence[Layout], ranks: int) -> list[str]:
        """Return warnings for users, one a line, if it does not pay on these buckets.

        By default it does not pay where it moves no fewer bytes than dense gradients; see
        `exchange_of`.
        """
        exchanges = [self.exchange_of(layout, ranks) for layout in layouts]
        known = [exchange for exchange in exchanges if exchange is not None]
        elements = sum(layout.elements for layout in layouts)
        # Added up in the same order, so that what is all dense is not less by rounding.
        dense = sum(dense_exchange(layout.elements).received(ranks) for layout in layouts)
        received = sum(exchange.received(ranks) for exchange in known)
        if not self.compresses or ranks == 1 or len(known) < len(exchanges) or received < dense:
            return []
        if all(exchange.kind == "dense" for exchange in known):
            reason = (
                "the payloads of all others would bring each rank more than dense gradients, so "
                f"what is sent is added up by an allreduce of {4 * elements:,} bytes each time"
            )
        else:
            reason = (
                f"each rank receives {received:,.0f} bytes each time, and {dense:,.0f} with dense "
                "gradients"
            )
        return [
            f"nothing is saved among {ranks} ranks: {reason}. Send less, compress between hosts "
            f"only (hierarchical=True), or use compression=None. It is {self}"
        ]

    def idle(self, methods: Sequence[Compressor]) -> bool:
        """Return True if it is to compress, and none of its model's buckets is compressed.

        Args:
            methods: of the buckets; the layers that it has left to others have other methods.
        """
        return self.compresses and not any(method.compresses for method in methods)

    def idle_reason(self, names: Sequence[str], dense: int) -> str:
        """Return the warning for a model of which it compresses nothing.

        Args:
            names: of all layers.
            dense: bytes of their gradients.
        """
        return (
            f"no layer is compressed: all {len(names)} are sent dense, {dense:,} bytes each time, "
            "since none would take less, or none is of the kind that the method is for. Use "
            "compression=None, or another method; hvd.describe lists the layers. It is "
            f"{self}"
        )

    # -- reports -------------------------------------------------------------------------------

    def report(self, layout: Layout, state: State, steps: int, since: int = 0) -> Report:
        """Report on all steps up to now; by default each of them has sent all elements.

        Args:
            layout: of the bucket.
            state: after so many steps.
            steps: that were made.
            since: how many of them were made before this bucket's first.
        """
        return Report([size * (steps - since) for size in layout.sizes])

    # -- the number of ranks ---------------------------------------------------------------------

    def start(self, ops: Ops, layout: Layout, ranks: int) -> State:
        """Return the initial state for this number of ranks; by default that of `init`."""
        return self.init(ops, layout)

    def resized(self, ops: Ops, state: State, step: Any, ranks: int) -> State:
        """Return the state for another number of ranks; the same object if nothing depends on it.

        Raises:
            ValueError: it cannot work with so many.
        """
        return state

    # -- stock Horovod ---------------------------------------------------------------------------

    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """Refuse stock Horovod, whose entry point this is. Linear compressors override it.

        Stock Horovod sums payloads as they are, so a method that is not linear cannot work there.
        """
        framework = type(tensor).__module__.partition(".")[0]
        package = "tensorflow" if framework == "tensorflow" else "torch"
        raise TypeError(
            f"a compressor cannot work inside horovod.{package}, which adds payloads up as they "
            f"are. Change the import to `import hvd_gradcomp.{package} as hvd` and keep the rest. "
            f"Got {self}"
        )


def _without_switches(program: Any) -> Generator[Any, Any, Any]:
    """Yield a program's collectives; of a `Switch`, those of the branch that it chooses."""
    reply = None
    while True:
        try:
            request = program.send(reply)
        except StopIteration as done:
            return done.value
        if isinstance(request, Switch):
            reply = yield from _without_switches(request.branches[int(request.index)]())
        else:
            reply = yield request


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
    tensors = []
    for field in state._fields:
        tensors += leaves(getattr(state, field), f"{path}.{field}" if path else field)
    return tensors


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
