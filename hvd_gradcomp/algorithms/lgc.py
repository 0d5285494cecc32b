"""LGC (Abrahamyan, Chen, Bekoulis, Deligiannis 2021; 000): an autoencoder for what top-k selects.

    whole       full_steps: gradients as they are
    train       train_steps: top-k values travel, and one rank trains the autoencoder on them
    compressed  codes travel instead of values

Two patterns. *Ring-allreduce*: one rank after the other, drawn at random, says which elements;
codes of all ranks are added up on the way, and everybody decodes the mean. *Parameter server*: one
worker sends a code, all send an innovation, and the master has a decoder for each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod
from typing import Any, NamedTuple

from hvd_gradcomp import exchanges, validate, wire
from hvd_gradcomp.aggregator import Compressor, Context, Program
from hvd_gradcomp.algorithms.dense import NoneCompressor
from hvd_gradcomp.algorithms.dgc import DGCCompressor
from hvd_gradcomp.codecs import autoencoder
from hvd_gradcomp.codecs.largest import Scope, count_of
from hvd_gradcomp.codecs.momentum import MomentumCorrected
from hvd_gradcomp.codecs.selection import layer_of
from hvd_gradcomp.codecs.sparse import Memory
from hvd_gradcomp.collectives import Allgather, Allreduce, Broadcast, Gather, Switch
from hvd_gradcomp.layers import Layer, traits_of
from hvd_gradcomp.layout import Layout
from hvd_gradcomp.ops import NonFiniteGradientError, Ops, PayloadError, Tensor
from hvd_gradcomp.wrappers import after

PATTERNS = ("ring_allreduce", "parameter_server")
_CONVERGED = 0.95  # of the energy; more is lost by an autoencoder that has learned nothing
_CLIP = 10.0  # norm of a network's gradient
_MAGNITUDE = (1 << 31) - 1
_NOT_CONVERGED = (
    "LGC: the loss of the autoencoder has not fallen to {bound} of the gradient's energy by the "
    "end of its {steps} training steps, so values go on to travel uncompressed. Try a larger "
    "ae_lr or train_steps, then call hvd.retrain(optimizer); compression_stats(...).losses has "
    "the loss"
)
_FINE, _NOT_FINITE, _DAMAGED = 0, 1, 2


class LGCState(NamedTuple):
    """State of the model's one bucket."""

    memory: Memory  # rank-local
    owed: Any  # float32 [size] with exact feedback, else (); see `LGCCompressor`; rank-local
    encoder: Tensor  # float32 [parameters], rank-local: trained by one rank, then sent to others
    decoder: Tensor  # float32 [heads, parameters], rank-local
    late: Tensor  # float32 [], sum of the loss over the last tenth of the training, rank-local
    local: Tensor  # float32 [], what this rank's last reconstruction missed, rank-local
    loss: Tensor  # float32 [], the mean of that over ranks; while training the trainer's
    start: Tensor  # int64 [] step at which the training began, on the host
    ready: Tensor  # int64 [] whether the autoencoder has converged, on the host
    drifted: Tensor  # int64 [] whether it has to be trained again, on the host
    sent: Tensor  # int64 [layers], elements that this rank has selected and sent so far


@dataclass(frozen=True)
class LGCCompressor(MomentumCorrected):
    """Sends a learned code of the largest accumulated velocities (Abrahamyan et al. 2021).

    For `full_steps` gradients are exchanged whole. Then momentum is corrected and the residual kept
    as in DGC, and of each layer `k = max(1, round(n * alpha))` elements are selected; their values,
    one vector for the whole model, are scaled to unit RMS. For `train_steps` the values travel, and
    one rank trains an autoencoder on them, one step of gradient descent each. From then on:

    * `pattern="ring_allreduce"`: the leader of the step, drawn from a seed that all ranks share,
      broadcasts its indices; all ranks encode their values there; the codes are added up by an
      allreduce and every rank decodes the mean (Algorithm 2, equations 8 to 11).
    * `pattern="parameter_server"`: `common_rank` sends indices and code; every rank sends its
      innovation, the largest tenth of its own values. The master decodes each worker's vector, puts
      innovations that lie outside the indices where they belong, and broadcasts the mean
      (Algorithm 1, equations 2 to 7).

    The first layer is sent dense, the last one as `DGCCompressor(density=alpha)` does.

    What travels, compressed: by the ring, 1 byte an element selected (a float32 for four), by
    allreduce, and the leader's packed indices, by broadcast. To the master, values and packed
    indices of the innovation, and from one worker a quarter of its values and all indices; back,
    values and packed indices of all that is not zero. The parameters of the autoencoder (0.69 MB
    the encoder, 0.17 MB a decoder) travel once. State: `r`, `u` and, with exact feedback, `owed`,
    12 bytes an element, and the autoencoder's parameters.

    Args:
        pattern: "ring_allreduce" or "parameter_server".
        alpha: share of the elements of a layer that are selected, in (0, 1]; smaller sends less.
        full_steps: steps before anything is left out, at least 1.
        train_steps: steps of the autoencoder's training, at least 1.
        innovation: share of the selected elements that a worker sends itself, in (0, 1]
            (parameter server only); smaller sends less.
        ae_lr: learning rate of the autoencoder, positive.
        lambda_rec, lambda_sim: weights of the losses (6) and (5), not negative (parameter server
            only).
        master: the rank that trains the autoencoder, and reconstructs with a parameter server; it
            is a worker too.
        common_rank: the worker that sends the code; None for the one after the master.
        first_layer: names of the layers that are sent dense, patterns of the shell's kind or the
            names of modules; None for the first layer that has a matrix or more, in the order of
            use: PyTorch sees it in the first step, on TensorFlow it is that of the variables.
        last_layer: the same for layers that are sent by top-k without the autoencoder.
        index_coding: "deflate" (DEFLATE, on the host), "delta", packed, or "int32", plain.
        feedback: "exact" keeps on each rank what it selected less what came back, so the sum over
            ranks loses nothing (see below); "paper" counts what was selected as sent.
        momentum, nesterov, masking: see `DGCCompressor`.
        retrain_loss: train the autoencoder again once the mean over ranks of
            `||selected - reconstructed||^2 / ||selected||^2` exceeds this; None never.
        seed: of the draws and of the autoencoder's first parameters.

    *Exact feedback.* What a rank selected less the mean that came back is for the most part what
    this rank has and others have not. It adds up to zero over ranks, so no exchange ever takes it
    away: kept in `r` it would grow without bound and, being large, be selected again and again.
    Hence two places. `r`, by which elements are selected, keeps what this rank knows to be
    missing: by the ring its values less its own reconstruction of them, with a server what it
    selected and the answer does not mention. The rest is `owed`: it is added to the values once
    the element is selected again.

    Differs from the paper: feedback (above). The gradient of each network is clipped to norm 10,
    without which plain descent on the printed loss diverges; its first parameters pass a signal on
    (see `codecs.autoencoder`). An autoencoder whose mean loss over the last tenth of its training
    is above 0.95 of the energy is not used: values go on to travel, and a warning says so.
    Workers' vectors are trained on, and reconstructed, at the places of the common rank. PyTorch
    and TensorFlow agree but for the last bits.

    Raises:
        ValueError: a hyper-parameter is out of range; a rank does not exist; the model has no layer
            between the first and the last one, or fewer than 16 elements are selected.

    >>> LGCCompressor(alpha=0.01).pattern
    'ring_allreduce'
    """

    pattern: str = "ring_allreduce"
    alpha: float = 0.001
    full_steps: int = 200
    train_steps: int = 300
    innovation: float = 0.1
    ae_lr: float = 0.001
    lambda_rec: float = 1.0
    lambda_sim: float = 0.5
    master: int = 0
    common_rank: int | None = None
    first_layer: str | Sequence[str] | None = None
    last_layer: str | Sequence[str] | None = None
    index_coding: str = "deflate"
    feedback: str = "exact"
    momentum: float | None = None
    nesterov: bool | None = None
    masking: bool = True
    retrain_loss: float | None = None
    seed: int = 0

    algorithm = 18
    replicated = frozenset({"start", "ready", "drifted"})
    whole_model = True

    def __post_init__(self) -> None:
        validate.one_of(self, "pattern", PATTERNS)
        for name in ("alpha", "innovation"):
            validate.real(self, name, low=0, high=1, closed="]")
        for name in ("full_steps", "train_steps"):
            validate.whole(self, name, low=1)
        validate.real(self, "ae_lr", low=0)
        for name in ("lambda_rec", "lambda_sim"):
            validate.real(self, name, low=0, closed="[")
        validate.whole(self, "master", low=0)
        if self.common_rank is not None:
            validate.whole(self, "common_rank", low=0)
        for name in ("first_layer", "last_layer"):
            given = getattr(self, name)
            if given is not None and not isinstance(given, str):
                object.__setattr__(self, name, tuple(given))
        validate.one_of(self, "index_coding", validate.INDEX_CODINGS)
        validate.one_of(self, "feedback", ("exact", "paper"))
        self._validate_momentum()
        if self.retrain_loss is not None:
            validate.real(self, "retrain_loss", low=0)
        validate.whole(self, "seed", low=0)

    # -- which layers ------------------------------------------------------------------------

    def of_layers(self, layers: Sequence[Layer], ranks: int) -> list[Compressor]:
        self.check_ranks(ranks)
        first = self._chosen(layers, "first_layer", "first")
        last = self._chosen(layers, "last_layer", "last") - first
        if len(first) + len(last) >= len(layers):
            raise ValueError(
                f"LGCCompressor: no layer is left for the autoencoder: of {len(layers)}, "
                f"{_named(layers, first)} are sent dense as first layer and "
                f"{_named(layers, last)} without it as "
                "last. Name others by first_layer= and last_layer= (an empty tuple for none), or "
                "use DGCCompressor"
            )
        plain: Compressor = NoneCompressor()
        sparse = DGCCompressor(
            density=self.alpha,
            momentum=self.momentum,
            nesterov=self.nesterov,
            masking=self.masking,
            index_coding=self.index_coding,
        )
        late = after(self.full_steps, None, sparse)
        return [
            plain if place in first else late if place in last else self
            for place in range(len(layers))
        ]

    @property
    def needs_order(self) -> bool:
        return self.first_layer is None or self.last_layer is None

    def velocity(self, state: Any) -> Tensor | None:
        return state.memory.u if self.momentum else None

    def _chosen(self, layers: Sequence[Layer], name: str, role: str) -> set[int]:
        """Places of the layers that a rule means."""
        given = getattr(self, name)
        if given is None:
            return {i for i, layer in enumerate(traits_of(layers)) if role in layer.roles}
        patterns = (given,) if isinstance(given, str) else given
        found: set[int] = set()
        for pattern in patterns:
            hits = {
                place
                for place, (title, _, _) in enumerate(layers)
                if fnmatchcase(title, pattern) or title.startswith((f"{pattern}.", f"{pattern}/"))
            }
            if not hits:
                raise ValueError(
                    f"LGCCompressor: {name}={pattern!r} matches no layer; there are "
                    + ", ".join(title for title, _, _ in layers[:8])
                    + (f" and {len(layers) - 8} more" if len(layers) > 8 else "")
                )
            found |= hits
        return found

    def check_ranks(self, ranks: int) -> None:
        """Raises a ValueError if `master` or `common_rank` does not exist."""
        for name in ("master", "common_rank"):
            value = getattr(self, name)
            if value is not None and value >= ranks:
                raise ValueError(
                    f"LGCCompressor: {name} must be a rank in [0, {ranks - 1}], got {value}; "
                    f"{ranks} ranks exchange"
                )

    def check(self, layout: Layout) -> None:
        super().check(layout)
        selected = self.capacity(layout)
        if selected < autoencoder.STRIDE:
            raise ValueError(
                f"LGCCompressor: alpha={self.alpha} selects {selected} of {layout.elements} "
                f"elements ({', '.join(layout.names[:8])}); the autoencoder needs a vector of at "
                f"least {autoencoder.STRIDE}. Raise alpha, or use DGCCompressor"
            )

    # -- sizes -------------------------------------------------------------------------------

    def count(self, size: int) -> int:
        return count_of(size, self.alpha)

    @property
    def by_server(self) -> bool:
        """Whether there is a parameter server."""
        return self.pattern == "parameter_server"

    def common(self, ranks: int) -> int:
        """The rank that sends the code."""
        return (self.master + 1) % ranks if self.common_rank is None else self.common_rank

    def innovations(self, layout: Layout) -> int:
        """How many elements a worker sends itself."""
        return count_of(self.capacity(layout), self.innovation)

    def code_length(self, layout: Layout) -> int:
        """Elements of a code."""
        return autoencoder.code_length(self.capacity(layout))

    def choice_parts(self, layout: Layout) -> dict[str, wire.Part]:
        """What the leader broadcasts."""
        capacity = self.capacity(layout)
        return {**self.coding.parts(layout, capacity), "scale": wire.Part("float32", 1)}

    def code_parts(self, layout: Layout) -> dict[str, wire.Part]:
        """What the common rank sends to the master, besides its innovation."""
        return {**self.choice_parts(layout), "code": wire.Part("float32", self.code_length(layout))}

    def innovation_parts(self, layout: Layout) -> dict[str, wire.Part]:
        """What every worker sends to the master."""
        count = self.innovations(layout)
        parts = self.coding.parts(layout, count)
        return {
            **parts,
            "values": wire.Part("float32", count),
            "loss": wire.Part("float32", 1),
        }

    def back_parts(self, layout: Layout, ranks: int) -> dict[str, wire.Part]:
        """What the master broadcasts."""
        count = self.returned(layout, ranks)
        return {
            **self.coding.parts(layout, count),
            "values": wire.Part("float32", count),
            "loss": wire.Part("float32", 1),
            "verdict": wire.Part("uint32", ranks),
        }

    def returned(self, layout: Layout, ranks: int) -> int:
        """The most elements that the master sends back."""
        return min(self.capacity(layout) + ranks * self.innovations(layout), layout.size - 1)

    def compressed_bytes(self, layout: Layout, ranks: int) -> dict[str, int]:
        """Bytes that are handed to collectives in a compressed step, headers included.

        Ring-allreduce: "leader" by broadcast, "worker" by allreduce from every rank. Parameter
        server: "worker" from every rank, "common" besides from one, "master" back from one.
        """
        if not self.by_server:
            return {
                "leader": _sealed(self.choice_parts(layout)),
                "worker": 4 * (self.code_length(layout) + 2),
            }
        return {
            "worker": _sealed(self.innovation_parts(layout)),
            "common": _sealed(self.code_parts(layout)),
            "master": _sealed(self.back_parts(layout, ranks)),
        }

    def layer_bytes(self, shape: Sequence[int]) -> float:
        """Of a compressed step: of the ring's leader, or of a worker that sends no code."""
        size = prod(shape)
        count = self.count(size)
        if self.by_server:
            own = count * self.innovation
            return own * (4 + self.coding.bits(size, max(1, round(own))) / 8)
        return count * (1 + self.coding.bits(size, count) / 8)

    # -- state -------------------------------------------------------------------------------

    def init(self, ops: Ops, layout: Layout) -> LGCState:
        return self.start(ops, layout, 1)

    def start(self, ops: Ops, layout: Layout, ranks: int) -> LGCState:
        self.check_ranks(ranks)
        self.check(layout)
        encoder, decoder = self._untrained(ops, ranks if self.by_server else 1)
        nothing = ops.full((), float("nan"), "float32")
        return LGCState(
            memory=self.remember(ops, layout),
            owed=ops.zeros((layout.size,)) if self.feedback == "exact" else (),
            encoder=encoder,
            decoder=decoder,
            late=ops.zeros(()),
            local=nothing,
            loss=nothing * 1,
            start=ops.host(self.full_steps),
            ready=ops.host(0),
            drifted=ops.host(0),
            sent=ops.zeros((len(layout.names),), "int64"),
        )

    def _untrained(self, ops: Ops, heads: int) -> tuple[Tensor, Tensor]:
        decoder = autoencoder.initial_decoder(ops, self.by_server, self.seed + 1)
        return autoencoder.initial_encoder(ops, self.seed), ops.stack([decoder] * heads)

    def retrained(self, ops: Ops, state: Any, step: Any) -> Any:
        if step < self.full_steps:
            return state
        return self._restarted(ops, state, state.decoder.shape[0])._replace(start=ops.host(step))

    def resized(self, ops: Ops, state: Any, step: Any, ranks: int) -> Any:
        # Decoders are one a rank, and who is new has no encoder; nor, in the first phase, the
        # velocity that the others have in common.
        self.check_ranks(ranks)
        state = self._restarted(ops, state, ranks if self.by_server else 1)
        if self.momentum and step < self.full_steps:
            state = state._replace(memory=state.memory._replace(u=state.memory.u * 0))
        return state._replace(start=ops.host(max(int(step), self.full_steps)))

    def _restarted(self, ops: Ops, state: Any, heads: int) -> Any:
        encoder, decoder = self._untrained(ops, heads)
        nothing = ops.host(0)
        return state._replace(
            encoder=encoder,
            decoder=decoder,
            late=ops.zeros(()),
            ready=nothing,
            drifted=nothing * 1,
        )

    def owner(self, path: str, step: int) -> int | None:
        # The master trains; and in the first phase all have the velocity in common.
        common = path == "memory.u" and step <= self.full_steps
        return self.master if common or path in ("encoder", "decoder", "late", "loss") else None

    def elements_sent(self, layout: Layout, state: Any, steps: int) -> Sequence[int]:
        whole = min(steps, self.full_steps)
        return [int(n) + whole * size for n, size in zip(state.sent, layout.sizes)]

    def losses(self, state: Any) -> dict[str, float]:
        return {"autoencoder": float(state.loss)}

    # -- one step ----------------------------------------------------------------------------

    def aggregate(
        self, ops: Ops, context: Context, gradient: Tensor, state: Any, **extra: Tensor
    ) -> Program:
        del extra
        start, ready = ops.staged(state.start), ops.staged(state.ready)
        again = ops.staged(state.drifted) > 0
        start = ops.pick(again, context.step, start)
        ready = ops.pick(again, 0, ready)
        host = ops.host
        state = state._replace(start=host(start), ready=host(ready), drifted=host(0))
        steps, elapsed = self.train_steps, context.step - start
        if context.rank == self.master:
            message = _NOT_CONVERGED.format(bound=_CONVERGED, steps=steps)
            ops.warn((elapsed == steps) & (ready != 1), message)
        phase = ops.bisect((-1, steps - 2, steps - 1), elapsed)
        phase = ops.pick((elapsed >= steps) & (ready != 1), 4, phase)
        run = self._by_server if self.by_server else self._by_ring
        branches = (
            lambda: self._whole(ops, context, gradient, state),
            lambda: run(ops, context, gradient, state, elapsed, train=True),
            lambda: run(ops, context, gradient, state, elapsed, train=True, last=True),
            lambda: run(ops, context, gradient, state, elapsed, compress=True),
            lambda: run(ops, context, gradient, state, elapsed),
        )
        return (yield Switch(phase, branches))

    def _whole(self, ops: Ops, context: Context, gradient: Tensor, state: Any) -> Program:
        """The first phase; momentum comes after the exchange, and goes on as the velocity `u`."""
        finite, gradient = exchanges.checked(ops, gradient)
        said = ops.concat((gradient, exchanges.poison(ops, finite)))
        total = yield Allreduce(said, context.prescale, context.postscale)
        total = exchanges.unpoisoned(ops, total)
        if not self.momentum:
            return total, state
        ahead, u = ops.zeros(total.shape), state.memory.u * 1
        ahead, u = ops.advance(ahead, u, total, self.momentum, bool(self.nesterov))
        return ahead, state._replace(memory=state.memory._replace(u=u))

    def _advanced(self, ops: Ops, gradient: Tensor, state: Any) -> Memory:
        """The memory with the gradient in it; the old one stays, in case the step fails."""
        return self.collect(ops, type(state.memory)(*(x * 1 for x in state.memory)), gradient)

    def _selected(
        self, ops: Ops, context: Context, memory: Memory, state: Any
    ) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """The largest elements of each layer: parts that say which, their indices, their values."""
        layout = context.layout
        scope, quota = Scope(layout, whole=False), ops.words(self.most(layout))
        parts, index, code, _ = self.select(ops, scope, context.step, memory[0], quota, None)
        index, code = (ops.reshape(x, (self.capacity(layout),)) for x in (index, code))
        return parts, index, self._with_owed(ops, state, index, ops.bits_float(code))

    def _with_owed(self, ops: Ops, state: Any, index: Tensor, values: Tensor) -> Tensor:
        """Values of `r` at some places, with what is owed there."""
        return values + ops.gather(state.owed, index) if self.feedback == "exact" else values

    def _owing(self, ops: Ops, state: Any, index: Tensor, values: Any) -> Any:
        """The state with other values owed at some places."""
        if self.feedback == "paper":
            return state
        owed = ops.put(state.owed * 1, index, values)
        return state._replace(owed=ops.clear_last(owed))

    def residual(self, state: Any) -> Tensor:
        return state.memory.r + state.owed if self.feedback == "exact" else state.memory.r

    def _sealed(self, ops: Ops, context: Context, finite: Any, body: Tensor) -> Tensor:
        return wire.seal(ops, exchanges.header_of(self, context, finite), body)

    def _opened(self, ops: Ops, context: Context, buffers: Tensor) -> tuple[wire.Header, Tensor]:
        return wire.open_sealed(ops, exchanges.header_of(self, context), buffers)

    def _counted(self, ops: Ops, layout: Layout, state: Any, index: Tensor) -> Any:
        """The state with what was sent counted."""
        real = ops.cast(index < layout.sink, "int64")
        per_layer = ops.segment_sum(real, layer_of(ops, layout, index), len(layout.names))
        return state._replace(sent=state.sent + per_layer)

    # -- ring-allreduce ----------------------------------------------------------------------

    def _by_ring(
        self,
        ops: Ops,
        context: Context,
        gradient: Tensor,
        state: Any,
        elapsed: Any,
        train: bool = False,
        last: bool = False,
        compress: bool = False,
    ) -> Program:
        layout = context.layout
        finite, gradient = exchanges.checked(ops, gradient)
        memory = self._advanced(ops, gradient, state)
        index, scale = yield from self._places(ops, context, finite, memory, state)
        values = self._with_owed(ops, state, index, ops.gather(memory[0], index))  # 0 in the sink
        state = self._counted(ops, layout, state, index)
        memory = self.settled(ops, self.settle(ops, memory, index))
        poison = exchanges.poison(ops, finite)
        if compress:
            return (
                yield from self._code(ops, context, memory, state, index, values, scale, poison)
            )
        if train:
            buffers = yield Allgather(
                self._sealed(ops, context, finite, ops.to_bytes(values, "float32"))
            )
            header, bodies = self._opened(ops, context, buffers)
            vectors = ops.from_bytes(bodies, "float32")  # [ranks, selected]
            state = self._owing(ops, state, index, 0.0)
            weights = ops.reshape(exchanges.weights_of(ops, context, header), (-1, 1))
            weighted = vectors * weights
            total = weighted[0]
            for rank in range(1, context.size):
                total = total + weighted[rank]
            state = state._replace(memory=memory)
            if context.rank == self.master:
                state = self._learned(ops, state, elapsed, _ring_loss(ops, vectors, scale))
            if last:
                state = yield from self._handed_out(ops, context, state)
        else:
            said = ops.concat((values, poison))
            total = yield Allreduce(said, context.prescale, context.postscale)
            total = exchanges.unpoisoned(ops, total)
            state = self._owing(ops, state._replace(memory=memory), index, 0.0)
        mean = ops.clear_last(ops.put(ops.zeros((layout.size,)), index, total))
        return mean, state

    def _places(self, ops: Ops, context: Context, finite: Any, memory: Memory, state: Any) -> Any:
        """The leader's indices, ascending, and the RMS of its values."""
        layout = context.layout
        leader = exchanges.drawn(context.step, self.seed, context.size)
        parts = self.choice_parts(layout)

        def payload() -> Tensor:
            mine, _, values = self._selected(ops, context, memory, state)
            mine["scale"] = _rms(ops, values, self.capacity(layout))
            return self._sealed(ops, context, finite, wire.pack_body(ops, parts, mine))

        size = _sealed(parts)
        buffer = yield from exchanges.from_leader(ops, context, leader, payload, size)
        header, bodies = self._opened(ops, context, ops.reshape(buffer, (1, -1)))
        mine = {name: part[0] for name, part in wire.unpack_body(ops, parts, bodies).items()}
        index = self.coding.decode(ops, layout, mine, self.capacity(layout))
        if header.intact is not None:
            index = ops.where(header.intact, index, layout.sink)
        return ops.sort(index), mine["scale"]

    def _code(
        self,
        ops: Ops,
        context: Context,
        memory: Memory,
        state: Any,
        index: Tensor,
        values: Tensor,
        scale: Tensor,
        poison: Tensor,
    ) -> Program:
        layout, selected = context.layout, values.shape[0]
        x = ops.reshape(_scaled(ops, values, scale), (1, -1))
        code = autoencoder.encode(ops, state.encoder, x)

        def decoded(code: Tensor) -> Tensor:
            vector = ops.reshape(autoencoder.decode(ops, state.decoder, code), (-1,))
            return ops.where(index < layout.sink, vector[:selected] * scale, 0.0)

        said = ops.concat((ops.reshape(code, (-1,)), ops.reshape(state.local, (1,)), poison))
        total = yield Allreduce(said, 1.0, 1.0 / context.size)
        total = exchanges.unpoisoned(ops, total)
        back, mine = decoded(ops.reshape(total[:-1], (1, -1))), decoded(code)
        missed = values - mine
        if self.feedback == "exact":
            memory = self.settled(ops, memory._replace(r=ops.put(memory.r, index, missed)))
            state = self._owing(ops, state, index, mine - back)
        local = _share(ops, missed, values)
        state = self._watched(ops, state._replace(memory=memory, local=local), total[-1:])
        weight = context.prescale * context.postscale * context.size
        mean = ops.put(ops.zeros((layout.size,)), index, back * weight)
        return ops.clear_last(mean), state

    # -- parameter server --------------------------------------------------------------------

    def _by_server(
        self,
        ops: Ops,
        context: Context,
        gradient: Tensor,
        state: Any,
        elapsed: Any,
        train: bool = False,
        last: bool = False,
        compress: bool = False,
    ) -> Program:
        layout = context.layout
        finite, gradient = exchanges.checked(ops, gradient)
        memory = self._advanced(ops, gradient, state)
        parts, index, values = self._selected(ops, context, memory, state)
        state = self._counted(ops, layout, state, index)
        if compress:
            chosen = (parts, index, values)
            return (yield from self._served(ops, context, memory, state, chosen, finite))
        parts["values"] = values
        body = wire.pack_body(ops, self.parts(layout), parts)
        buffers = yield Allgather(self._sealed(ops, context, finite, body))
        header, bodies = self._opened(ops, context, buffers)
        weights = exchanges.weights_of(ops, context, header)
        room = ops.zeros((layout.size,))
        mean = self.decode_sum(ops, layout, None, bodies, weights, room)  # type: ignore[arg-type]
        memory = self.settled(ops, self.settle(ops, memory, index))
        state = self._owing(ops, state._replace(memory=memory), index, 0.0)
        if train and context.rank == self.master:
            state = self._learned(ops, state, elapsed, self._server_loss(ops, context, bodies))
        if train and last:
            state = yield from self._handed_out(ops, context, state)
        return mean, state

    def _server_loss(self, ops: Ops, context: Context, bodies: Tensor) -> Any:
        """Losses (5) to (7) on what all workers sent, at the places of one of them."""
        layout, ranks = context.layout, context.size
        payload = wire.unpack_body(ops, self.parts(layout), bodies)
        capacity = self.capacity(layout)
        values = ops.reshape(payload.pop("values"), (ranks, capacity))
        index = [
            self.coding.decode(ops, layout, {n: p[rank] for n, p in payload.items()}, capacity)
            for rank in range(ranks)
        ]
        common = exchanges.drawn(context.step, self.seed + 1, ranks)
        places = ops.concat(index)[common * capacity : (common + 1) * capacity]
        places = ops.sort(ops.reshape(places, (capacity,)))  # they travel in turned order
        vectors, channels = [], []
        for rank in range(ranks):
            strong = _strongest(ops, values[rank], self.innovations(layout))
            where = ops.gather(index[rank], strong)
            vectors.append(_at(ops, layout, index[rank], values[rank], places))
            channels.append(_at(ops, layout, where, ops.gather(values[rank], strong), places))
        own = ops.concat(vectors)[common * capacity : (common + 1) * capacity]
        scale = _rms(ops, ops.reshape(own, (capacity,)), capacity)
        x = ops.stack([_scaled(ops, vector, scale) for vector in vectors])
        innovation = ops.stack([_scaled(ops, channel, scale) for channel in channels])
        energy = ops.sum(x * x)

        def loss(encoder: Tensor, decoder: Tensor) -> tuple[Tensor, ...]:
            codes = autoencoder.encode(ops, encoder, x)
            code = codes[common : common + 1]
            code = ops.reshape(code, (1, codes.shape[1]))
            missed = autoencoder.decode(ops, decoder, code, innovation) - x
            rec = ops.sum(missed * missed)
            mean = ops.reshape(ops.sum(codes, 0), (1, -1)) * (1.0 / ranks)
            away = codes - mean  # sum over pairs of |a - b|^2 = 2 * ranks * sum of |a - mean|^2
            sim = ops.sum(away * away) * (2.0 * ranks)
            return rec * self.lambda_rec + sim * self.lambda_sim, rec, energy

        return loss

    def _served(
        self,
        ops: Ops,
        context: Context,
        memory: Memory,
        state: Any,
        chosen: tuple[dict[str, Tensor], Tensor, Tensor],
        finite: Any,
    ) -> Program:
        layout, ranks, rank = context.layout, context.size, context.rank
        common = self.common(ranks)
        parts, index, values = chosen
        strong = _strongest(ops, values, self.innovations(layout))
        coded, innovated, place = self.coding.encode(
            ops,
            layout,
            self.innovation_parts(layout),
            ops.gather(index, strong),
            context.step,
        )
        own = ops.where(innovated < layout.sink, ops.gather(ops.gather(values, strong), place), 0.0)
        coded |= {"values": own, "loss": ops.reshape(state.local, (1,))}
        body = wire.pack_body(ops, self.innovation_parts(layout), coded)
        mine = self._sealed(ops, context, finite, body)
        if rank == common:
            scale = _rms(ops, values, self.capacity(layout))
            vector = _at(ops, layout, index, values, ops.sort(index))
            x = ops.reshape(_scaled(ops, vector, scale), (1, -1))
            code = ops.reshape(autoencoder.encode(ops, state.encoder, x), (-1,))
            body = wire.pack_body(
                ops, self.code_parts(layout), {**parts, "scale": scale, "code": code}
            )
            mine = ops.concat((mine, self._sealed(ops, context, finite, body)))
        size = self.compressed_bytes(layout, ranks)
        lengths = tuple(size["worker"] + size["common"] * (r == common) for r in range(ranks))
        everything = yield Gather(mine, self.master, lengths)
        if rank == self.master:
            answer = self._answer(ops, context, state, everything, lengths)
        else:
            answer = ops.zeros((size["master"],), "uint8")
        answer = yield Broadcast(answer, self.master)
        header, bodies = self._opened(ops, context, ops.reshape(answer, (1, -1)))
        back = wire.unpack_body(ops, self.back_parts(layout, ranks), bodies)
        back = {name: part[0] for name, part in back.items()}
        verdict = back.pop("verdict")
        sound = ops.require({wire.DAMAGED: verdict != _DAMAGED}, PayloadError)
        fine = ops.require({wire.NOT_FINITE: verdict != _NOT_FINITE}, NonFiniteGradientError)
        changed = self.coding.decode(ops, layout, back, self.returned(layout, ranks))
        if sound is not None:
            good = ops.sum(ops.cast(sound & fine & header.intact, "int64")) == ranks
            changed = ops.where(good, changed, layout.sink)
        decoded = ops.where(changed < layout.sink, back["values"], 0.0)
        mean = ops.clear_last(ops.put(ops.zeros((layout.size,)), changed, decoded))
        missed = values - ops.gather(mean, index)
        if self.feedback == "exact":
            # What was selected and came back, as something else, goes over to what is owed.
            known = ops.clear_last(ops.put(ops.zeros((layout.size,)), changed, 1.0))
            answered = ops.gather(known, index) > 0
            r = ops.put(memory[0], index, ops.where(answered, 0.0, ops.gather(memory[0], index)))
            owed = ops.gather(state.owed, index)
            state = self._owing(ops, state, index, ops.where(answered, values, owed))
            owed = ops.gather(state.owed, changed) - decoded
            state = self._owing(ops, state, changed, owed)
            memory = memory._replace(r=r)
            if self.momentum and self.masking:  # of what this rank has sent
                u = ops.put(memory.u, innovated, 0.0)
                memory = memory._replace(u=ops.put(u, index, 0.0) if rank == common else u)
        else:
            memory = self.settle(ops, memory, index)
        local = _share(ops, missed, values)
        state = state._replace(memory=self.settled(ops, memory), local=local)
        state = self._watched(ops, state, back["loss"])
        return mean * (context.prescale * context.postscale * ranks), state

    def _answer(
        self, ops: Ops, context: Context, state: Any, everything: Tensor, lengths: Sequence[int]
    ) -> Tensor:
        """The master's way back: the mean of what it reconstructs, or who is to blame.

        It must not fail alone while the others wait for it, so what is damaged becomes a verdict.
        """
        layout, ranks, common = context.layout, context.size, self.common(context.size)
        capacity = self.capacity(layout)
        base = self.compressed_bytes(layout, ranks)["worker"]
        starts = [sum(lengths[:rank]) for rank in range(ranks)]
        workers = ops.stack([everything[start : start + base] for start in starts])
        extra = ops.reshape(
            everything[starts[common] + base : starts[common] + lengths[common]], (1, -1)
        )
        header = exchanges.header_of(self, context)
        facts, finite = wire.examined(ops, header, workers)
        more, _ = wire.examined(ops, header, extra)
        intact = ops.cast(facts, "int64")
        whole = intact * ops.where(
            ops.arange(ranks) == common, ops.cast(more, "int64"), intact * 0 + 1
        )
        verdict = ops.where(finite, _FINE, _NOT_FINITE)
        verdict = ops.where(whole > 0, verdict, _DAMAGED)
        bodies = wire.bodies_of(workers)
        payload = wire.unpack_body(ops, self.innovation_parts(layout), bodies)
        losses = ops.reshape(payload.pop("loss"), (-1,))
        values = ops.reshape(payload.pop("values"), (ranks, self.innovations(layout)))
        index = [
            self.coding.decode(
                ops, layout, {n: p[rank] for n, p in payload.items()}, self.innovations(layout)
            )
            for rank in range(ranks)
        ]
        body = wire.bodies_of(extra)
        code_parts = wire.unpack_body(ops, self.code_parts(layout), body)
        code_parts = {name: part[0] for name, part in code_parts.items()}
        places = ops.sort(self.coding.decode(ops, layout, code_parts, capacity))
        scale, code = code_parts["scale"], ops.reshape(code_parts["code"], (1, -1))
        channels = [
            _scaled(ops, _at(ops, layout, index[rank], values[rank], places), scale)
            for rank in range(ranks)
        ]
        decoded = autoencoder.decode(ops, state.decoder, code, ops.stack(channels))
        mean = ops.sum(decoded, 0)[:capacity] * (scale * (1.0 / ranks))
        total = ops.put(
            ops.zeros((layout.size,)), places, ops.where(places < layout.sink, mean, 0.0)
        )
        inside = ops.put(ops.zeros((layout.size,)), places, 1.0)
        for rank in range(ranks):
            outside = ops.where(ops.gather(inside, index[rank]) == 0, values[rank], 0.0)
            total = ops.add_at(total, index[rank], outside * (1.0 / ranks))
        changed = _distinct(ops, ops.concat((places, *index)), layout.sink)
        changed = changed[: self.returned(layout, ranks)]
        parts = self.back_parts(layout, ranks)
        coded, changed, _ = self.coding.encode(ops, layout, parts, changed, context.step)
        coded["values"] = ops.where(changed < layout.sink, ops.gather(total, changed), 0.0)
        coded["loss"] = ops.reshape(ops.sum(losses) * (1.0 / ranks), (1,))
        coded["verdict"] = verdict
        return self._sealed(ops, context, True, wire.pack_body(ops, parts, coded))

    # -- the autoencoder ---------------------------------------------------------------------

    def _learned(self, ops: Ops, state: Any, elapsed: Any, loss: Any) -> Any:
        """One step of gradient descent."""
        (_, rec, energy), gradients = ops.value_and_grad(loss, (state.encoder, state.decoder))
        encoder, decoder = (
            parameters + _clipped(ops, gradient) * -self.ae_lr
            for parameters, gradient in zip((state.encoder, state.decoder), gradients)
        )
        share = ops.where(energy > 0, rec / ops.where(energy > 0, energy, 1.0), 1.0)
        begins = self.train_steps - max(1, self.train_steps // 10)
        number = ops.reshape(ops.words((elapsed,)), ())
        late = ops.where(number > begins, state.late, 0.0)
        late = ops.where(number >= begins, late + share, 0.0)
        return state._replace(encoder=encoder, decoder=decoder, late=late, loss=share)

    def _handed_out(self, ops: Ops, context: Context, state: Any) -> Program:
        """The end of the training: whether it succeeded, and the parameters for who needs them."""
        window = max(1, self.train_steps // 10)
        late = ops.reshape(state.late, (1,)) * (1.0 / window)
        heads = tuple(state.decoder.shape)
        flat = ops.reshape(state.decoder, (-1,))
        if self.by_server:
            late = yield Broadcast(late, self.master)
            common, here = self.common(context.size), context.rank == self.master
            if common != self.master:
                size = autoencoder.ENCODER_SIZE
                lengths = tuple(size * (r == self.master) for r in range(context.size))
                mine = state.encoder if here else state.encoder[:0]
                given = yield Gather(mine, common, lengths)
                if context.rank == common:
                    state = state._replace(encoder=given)
        else:
            everything = yield Broadcast(ops.concat((late, state.encoder, flat)), self.master)
            late, end = everything[:1], 1 + autoencoder.ENCODER_SIZE
            decoder = ops.reshape(everything[end:] * 1, heads)
            state = state._replace(encoder=everything[1:end] * 1, decoder=decoder)
        converged = ops.reshape(ops.cast(late <= _CONVERGED, "int64"), ())
        late = ops.reshape(late, ()) * 1.0
        return state._replace(ready=ops.stage(converged), loss=late, local=late * 1.0)

    def _watched(self, ops: Ops, state: Any, loss: Tensor) -> Any:
        """The state with the ranks' mean loss, which may ask for another training."""
        loss = ops.reshape(loss, ()) * 1.0
        if self.retrain_loss is None:
            return state._replace(loss=loss)
        drifted = ops.stage(ops.cast(loss > self.retrain_loss, "int64"))
        return state._replace(loss=loss, drifted=drifted)


def _named(layers: Sequence[Layer], places: set[int]) -> str:
    return ", ".join(layers[place][0] for place in sorted(places)) or "none"


def _sealed(parts: dict[str, wire.Part]) -> int:
    return wire.HEADER_BYTES + int(wire.body_bytes(parts))


def _rms(ops: Ops, values: Tensor, count: int) -> Tensor:
    """The root of the mean square, 1 for zeros; float32 [1]."""
    mean = ops.reshape(ops.sum(values * values), (1,)) * (1.0 / count)
    return ops.where(mean > 0, ops.sqrt(mean), 1.0)


def _scaled(ops: Ops, values: Tensor, scale: Tensor) -> Tensor:
    """In units of the scale, filled up with zeros to what the autoencoder takes."""
    missing = autoencoder.padded(values.shape[0]) - values.shape[0]
    return ops.concat((values / scale, ops.zeros((missing,))))


def _share(ops: Ops, missed: Tensor, values: Tensor) -> Tensor:
    """The energy of one as a share of the other's; 0 of nothing."""
    energy = ops.sum(values * values)
    return ops.where(energy > 0, ops.sum(missed * missed) / ops.where(energy > 0, energy, 1.0), 0.0)


def _ring_loss(ops: Ops, vectors: Tensor, scale: Tensor) -> Any:
    """Loss (11)."""
    ranks = vectors.shape[0]
    x = ops.stack([_scaled(ops, vectors[rank], scale) for rank in range(ranks)])
    target = ops.reshape(ops.sum(x, 0), (1, -1)) * (1.0 / ranks)
    energy = ops.sum(target * target)

    def loss(encoder: Tensor, decoder: Tensor) -> tuple[Tensor, ...]:
        codes = autoencoder.encode(ops, encoder, x)
        code = ops.reshape(ops.sum(codes, 0), (1, codes.shape[1])) * (1.0 / ranks)
        missed = autoencoder.decode(ops, decoder, code) - target
        rec = ops.sum(missed * missed)
        return rec, rec, energy

    return loss


def _clipped(ops: Ops, gradient: Tensor) -> Tensor:
    """The gradient of each network, an encoder or a head, no longer than `_CLIP`."""
    rows = ops.reshape(gradient, (-1, gradient.shape[-1]))
    norm = ops.reshape(ops.sqrt(ops.sum(rows * rows, -1)), (-1, 1))
    rows = rows * (_CLIP / ops.maximum(norm, _CLIP))
    return ops.reshape(rows, tuple(gradient.shape))


def _strongest(ops: Ops, values: Tensor, count: int) -> Tensor:
    """Places of the largest magnitudes, ascending; int64 [count]. Of equals the first."""
    length = values.shape[0]
    weakness = _MAGNITUDE - ops.float_bits(ops.abs(values))
    ranked = ops.sort(weakness * length + ops.arange(length))[:count]
    return ops.sort(ranked % length)


def _at(ops: Ops, layout: Layout, index: Tensor, values: Tensor, places: Tensor) -> Tensor:
    """A sparse vector's values at other places, 0 where it has none."""
    dense = ops.put(ops.zeros((layout.size,)), index, values)
    return ops.gather(ops.clear_last(dense), places)


def _distinct(ops: Ops, index: Tensor, sink: int) -> Tensor:
    """The same indices once each, ascending, filled up with the sink."""
    ascending = ops.sort(index)
    before = ops.concat((ops.full((1,), -1), ascending[:-1]))
    return ops.sort(ops.where(ascending == before, sink, ascending))
