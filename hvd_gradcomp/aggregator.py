"""The one noun and the one verb: an aggregator turns the ranks' gradients into their mean.

Theory of operation. A *frontend* (`hvd_gradcomp.torch`, `hvd_gradcomp.tensorflow`) lays gradients
into buckets, asks the aggregator for the program of each bucket, and drives it:

    program = compressor.aggregate(ops, context, gradient, state)
    request = next(program)                # a collective, as a value
    request = program.send(reply)          # ... until StopIteration carries (mean, state)

The program is straight-line text. It holds no framework, no handle, no thread: PyTorch parks it on
a Horovod handle, TensorFlow runs it through while tracing, `testing.World` drives all ranks in
lockstep. State is a NamedTuple of tensors, taken and returned; the frontend stores it. A field
whose name is in `replicated` is equal on all ranks, any other belongs to its rank.
"""

from __future__ import annotations

import ast
import inspect
import zlib
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from typing import Any, ClassVar, NamedTuple

from hvd_gradcomp import registry
from hvd_gradcomp.collectives import Collective
from hvd_gradcomp.layers import Layer
from hvd_gradcomp.layout import BLOCK, Layout
from hvd_gradcomp.ops import Ops, Tensor

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


class Compressor(ABC):
    """What a user passes as `compression=`. Concrete classes are frozen dataclasses.

    Attributes:
        algorithm: its number in the wire header, which follows from its name; see `registry`.
        replicated: names of state fields, dotted, that are equal on all ranks with all they hold.
        begins_anew: names of state fields, dotted, that say how a rank works and not what it owes
            or has in common with others: where ranks' states become one, they begin anew.
        block: the alignment of layers in a bucket that it wants.
        max_bucket: the most elements that a bucket may have.
        native_dtypes: dtypes that it takes as they are; others are converted to float32 and back.
        whole_model: all layers share one bucket, so nothing is sent before the last gradient.
        state_format: of a saved state; another where it holds other tensors, or they mean something
            else.
        runs: whether it has programs of its own; a partition only chooses among others.
        adds_up: whether it does nothing but to add up gradients, or what they are cast to.
        uses_moments: whether `aggregate` takes `moment=`, the sum of squared sample gradients.
    """

    algorithm: ClassVar[int]
    replicated: ClassVar[frozenset[str]] = frozenset()
    begins_anew: ClassVar[frozenset[str]] = frozenset()
    block: ClassVar[int] = BLOCK
    max_bucket: ClassVar[int] = 1 << 31
    native_dtypes: ClassVar[frozenset[str]] = frozenset({"float32"})
    whole_model: ClassVar[bool] = False
    state_format: ClassVar[int] = 1
    runs: ClassVar[bool] = True
    adds_up: ClassVar[bool] = False
    uses_moments: ClassVar[bool] = False

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
        """The state before the first step."""

    def start(self, ops: Ops, layout: Layout, ranks: int) -> State:
        """The same where it depends on how many ranks exchange. Frontends call this."""
        del ranks
        return self.init(ops, layout)

    @abstractmethod
    def aggregate(
        self, ops: Ops, context: Context, gradient: Tensor, state: State, **extra: Tensor
    ) -> Program:
        """The program of one bucket and step.

        `gradient` is [layout.size], zero outside the layers. Donating: the result may lie in it.
        """

    def of_layers(self, layers: Sequence[Layer], ranks: int) -> Sequence[Compressor]:
        """Who compresses which layer: itself all of them, unless it knows better.

        Args:
            layers: (name, shape, dtype) in the order of the model.
            ranks: how many exchange.

        Raises:
            ValueError: it cannot work on these layers, or with so many ranks.
        """
        del ranks
        return [self] * len(layers)

    @property
    def needs_order(self) -> bool:
        """Whether `of_layers` looks at the order in which the model uses its layers."""
        return False

    def layer_bytes(self, shape: Sequence[int]) -> float | None:
        """About what a layer takes of a payload; None where that depends on the gradients.

        Args:
            shape: with the outputs first, as `Layout.outputs_first` has it.
        """
        del shape
        return None

    def corrected(self, momentum: float, nesterov: bool) -> Compressor:
        """The same, with the momentum that it takes over from the optimizer; see `wrappers`."""
        del momentum, nesterov
        return self

    @property
    def correction(self) -> tuple[float | None, bool | None] | None:
        """(momentum, nesterov) that it applies itself, None in them for the optimizer's."""
        return None

    def elements_sent(self, layout: Layout, state: State, steps: int) -> Sequence[int]:
        """Elements of each layer that this rank has sent in so many steps; reads the device."""
        del state
        return [size * steps for size in layout.sizes]

    def residual(self, state: State) -> Tensor | None:
        """What was accumulated and not yet sent, [size]; None where nothing is kept."""
        del state
        return None

    def at_work(self, state: State, steps: int) -> tuple[Compressor, State]:
        """Who has compressed the last of so many steps, and the state it keeps: see `after`."""
        del steps
        return self, state

    def rung_changes(self, state: State) -> int:
        """How often its payload's room has changed, see `ladder`; all ranks have the same."""
        del state
        return 0

    def velocity(self, state: State) -> Tensor | None:
        """The momentum of the steps so far, [size], where it is all that the state holds."""
        del state
        return None

    def with_velocity(self, state: State, velocity: Tensor) -> State:
        """Goes on from a velocity that all ranks have in common."""
        del velocity
        return state

    def losses(self, state: State) -> dict[str, float]:
        """What a learned method loses, as shares of the energy, by name; reads the device."""
        del state
        return {}

    def retrained(self, ops: Ops, state: State, step: Any) -> State:
        """A state that learns a basis or an autoencoder anew, from this step on."""
        del ops, step
        return state

    def owner(self, path: str, step: int) -> int | None:
        """Whose tensor counts where the ranks' states become one; None if they are added up.

        Asked of the fields, dotted as in `leaves`, that are not `replicated`: an autoencoder that
        one rank trains cannot be added up, a residual has to be.
        """
        del path, step
        return None

    def resized(self, ops: Ops, state: State, step: Any, ranks: int) -> State:
        """A state that goes on among other ranks than before; the same if nothing hangs on them.

        Raises:
            ValueError: it cannot work with so many.
        """
        del ops, step, ranks
        return state

    def inherit(
        self, ops: Ops, state: State, gradient: Tensor, residual: Tensor
    ) -> tuple[State, Tensor]:
        """Takes over what another method had kept: (state, gradient) with it inside."""
        del ops
        return state, gradient + residual

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

    # The stock Horovod interface sees one nameless tensor, whose payload is always allreduced.
    # A method that is not linear cannot work there.

    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """Stock Horovod's entry. Linear compressors override it; the others say what to import."""
        framework = type(tensor).__module__.partition(".")[0]
        package = "tensorflow" if framework == "tensorflow" else "torch"
        raise TypeError(
            f"a compressor cannot work inside horovod.{package}, which adds payloads up as they "
            f"are. Change the import to `import hvd_gradcomp.{package} as hvd` and keep the rest. "
            f"Got {self}"
        )

    def decompress(self, tensor: Tensor, context: Any) -> Tensor:
        """Stock Horovod's way back; see `compress`."""
        del context
        return tensor


class _Brief(ast.NodeTransformer):
    """Drops the arguments of compressors that are as they are by default."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        name = getattr(node.func, "id", "")
        known = getattr(registry.known().get(name), "__dataclass_fields__", {})
        defaults = {key: repr(field.default) for key, field in known.items()}
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
