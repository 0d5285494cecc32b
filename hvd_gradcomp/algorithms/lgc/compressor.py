"""Public class of LGC: its parameters, the layers it compresses, its state and its phases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from math import inf, prod
from typing import Any

from hvd_gradcomp.algorithms.combined.wrappers import after
from hvd_gradcomp.algorithms.dense import NoneCompressor
from hvd_gradcomp.algorithms.lgc.ring import Ring
from hvd_gradcomp.algorithms.lgc.server import Server
from hvd_gradcomp.algorithms.lgc.state import SAMPLED, LGCState
from hvd_gradcomp.algorithms.lgc.training import Trainer
from hvd_gradcomp.algorithms.lgc.vectors import Selection, Units
from hvd_gradcomp.algorithms.sparse.dgc import DGCCompressor
from hvd_gradcomp.codecs import autoencoder
from hvd_gradcomp.codecs.clipping import Clipping
from hvd_gradcomp.codecs.indices import CODINGS
from hvd_gradcomp.codecs.momentum import validate_momentum
from hvd_gradcomp.codecs.topk import count_of
from hvd_gradcomp.codecs.values import VALUES
from hvd_gradcomp.core import validate
from hvd_gradcomp.core.collectives import Allreduce, Switch
from hvd_gradcomp.core.cost_model import Course
from hvd_gradcomp.core.layers import Layer, traits_of
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.method import patterns, wire
from hvd_gradcomp.method.compressor import Compressor, Context, Program, Report, derived
from hvd_gradcomp.method.handover import Correction, Handover
from hvd_gradcomp.method.learned import Learned
from hvd_gradcomp.ops import Ops, Tensor

PATTERNS = ("ring_allreduce", "parameter_server")
OPTIMIZERS = ("sgd", "adam")
SCALES = ("layer", "model")
FEEDBACK = ("exact", "paper")
_LEARNED = ("encoder", "decoder", "late", "seen", "loss")


@dataclass(frozen=True)
class LGCCompressor(Clipping, Learned, Handover):
    """LGC: sends a learned code of the largest accumulated velocities (Abrahamyan et al. 2021).

    For `full_steps` full gradients are exchanged. Then momentum correction and residual work as
    in DGC, and `k = max(1, round(n * alpha))` elements of each layer are selected; their values
    form one vector for the whole model. One rank's vector normalizes those of all ranks: they are
    multiplied by its signs, and each layer is divided by its RMS in that vector. For `train_steps`
    the values travel, and one rank trains an autoencoder on them. From then on:

    * `pattern="ring_allreduce"`: the leader of the step, drawn from a shared seed, broadcasts its
      indices, signs and RMS; all ranks encode their values at these indices; the codes are
      allreduced and every rank decodes the mean (Algorithm 2, equations 8 to 11).
    * `pattern="parameter_server"`: `common_rank` sends indices, signs, RMS and code; every rank
      sends its innovation, the largest tenth of its selected elements of each layer. The master
      decodes each worker's vector, adds innovations at other indices to the mean, and
      broadcasts it (Algorithm 1, equations 2 to 7).

    The first layer is sent dense, the last one like `DGCCompressor(density=alpha)`.

    What travels, compressed: with the ring, 1 byte for each selected element (a float32 for four)
    and 64 bytes, by allreduce; by broadcast, the leader's packed indices, 1 bit for each element's
    sign, and 4 bytes for each layer. To the master, values and packed indices of the innovation
    and 64 bytes, and from one worker also the payload of a ring leader and a code; back, packed
    indices, and nonzero values in half precision. `compressed_bytes` has the formula. The
    autoencoder's parameters (0.69 MB the encoder, 0.17 MB a decoder) travel once per training.
    State: `r`, `u` and, with exact feedback, `owed`, 12 bytes for each element, and the
    autoencoder's parameters, three times with Adam.

    Default: `LGCCompressor()`, by the ring and `alpha=0.001`. In docs/papers-long.md `full_steps`
    are a fifth of a training, and `train_steps` three tenths; 200 and 300, the paper's, were
    trained on digits in 1,140 steps (docs/algorithms/index.md).

    Args:
        pattern: "ring_allreduce" or "parameter_server".
        alpha: share of the elements of a layer that are selected, in (0, 1]; smaller sends less.
        full_steps: uncompressed steps at the start, at least 1.
        train_steps: steps of the autoencoder's training, at least 1.
        innovation: share of the selected elements of a layer that each worker sends itself, in
            (0, 1] (parameter server only); smaller sends less. At least one of each layer.
        signs: True to send one rank's signs, one bit for each element, so that the code holds
            magnitudes only; False is the paper's form.
        scale: "layer" divides each layer by its RMS; "model" uses one RMS, the paper's form.
        ae_lr: learning rate of the autoencoder, positive.
        ae_optimizer: of the autoencoder: "sgd", descent with clipped gradients, or "adam".
        ae_steps: optimizer steps of the autoencoder for each iteration's vectors, at least 1. More
            learn more from as many iterations, at proportional cost for the trainer.
        lambda_rec, lambda_sim: weights of the losses (6) and (5), not negative (parameter server
            only).
        master: the rank that trains the autoencoder, and the parameter server; it is also a
            worker.
        common_rank: the worker that sends the code; None for the one after the master.
        first_layer: names of the layers that are sent dense, as shell-style patterns or names of
            modules; None for the first layer with a matrix or more, in execution order: on PyTorch
            that of the first step, on TensorFlow that of the variables.
        last_layer: the same for layers that are sent by top-k without the autoencoder.
        index_coding: "elias_fano", packed, or "int32", plain.
        feedback: "exact" keeps the difference of selected and reconstructed values on each rank,
            so the sum over ranks loses nothing (see below); "paper" counts all that was selected
            as sent.
        momentum, nesterov, masking: see `DGCCompressor`.
        retrain_loss: train the autoencoder again when the loss (see below) exceeds this; None
            disables this.
        retrain_every: train it again after so many steps with codes, at least 1; None disables
            this. Training resumes from the current parameters.
        seed: of the draws and of the autoencoder's first parameters.
        max_norm: each rank clips the norm of each layer of its own gradient to
            `max_norm / sqrt(ranks)` before accumulating, so that a bad batch does not fill the
            residual; positive; smaller clips more. None clips nothing.
        values: code of the last layer's values, as for `DGCCompressor`. The others have a learned
            code.

    *Exact feedback.* A rank's selected values minus the returned mean are mostly its deviation
    from the other ranks. These deviations sum to zero over ranks, so no exchange ever removes
    them: in `r` they would grow without bound and, being large, be selected again and again.
    Hence two buffers. `r`, which selects the elements, keeps what this rank knows to be
    missing: with the ring its values minus its own reconstruction of them, with a server its
    selected values at indices that the answer does not contain. `owed` keeps the rest and is
    added to the values when the element is selected again; with the ring only while values
    travel, in a training, since codes with large owed parts say little about the mean.

    *The loss*, in `compression_stats(...).losses`: `||target - decoded||^2 / ||target||^2`, where
    `target` is the mean over ranks of the selected vectors, at the indices of the leader or the
    common rank. No rank knows that mean, so each step the ranks exchange their values at 16 of
    the indices, in turn; sums of squares decay by a tenth per step. A server reports it a step
    late.

    Differs from the paper: signs, RMS by layer and feedback (above). Indices are packed by
    Elias-Fano instead of DEFLATE: fewer bits, and without the host. The gradient of each
    network is clipped to norm 10, since plain descent on the printed loss diverges; the initial
    parameters pass a signal on (see `codecs.autoencoder`). An autoencoder whose mean loss over
    the last tenth of its training is above 0.95 of the energy is not used: values continue to
    travel, and a warning says so. With a server, training always uses the common rank's code,
    as compression does, not a randomly drawn one. Workers' vectors are trained on, and
    reconstructed, at the indices of the common rank. PyTorch and TensorFlow differ in the last
    bits.

    Raises:
        ValueError: a hyper-parameter is out of range; a rank does not exist; the model has no
            layer between the first and the last one, or fewer than 16 elements are selected.

    >>> LGCCompressor(alpha=0.01).pattern
    'ring_allreduce'
    """

    pattern: str = "ring_allreduce"
    alpha: float = 0.001
    full_steps: int = 200
    train_steps: int = 300
    innovation: float = 0.1
    signs: bool = True
    scale: str = "layer"
    ae_lr: float = 0.001
    ae_optimizer: str = "sgd"
    ae_steps: int = 1
    lambda_rec: float = 1.0
    lambda_sim: float = 0.5
    master: int = 0
    common_rank: int | None = None
    first_layer: str | Sequence[str] | None = None
    last_layer: str | Sequence[str] | None = None
    index_coding: str = "elias_fano"
    feedback: str = "exact"
    momentum: float | None = None
    nesterov: bool | None = None
    masking: bool = True
    retrain_loss: float | None = None
    retrain_every: int | None = None
    seed: int = 0
    max_norm: float | None = None
    values: str = "float32"

    replicated = frozenset({"start", "ready", "drifted"})
    reset_on_merge = frozenset({"hint", "sampled"})
    whole_model = True

    def __post_init__(self) -> None:
        validate.one_of(self, "pattern", PATTERNS)
        for name in ("alpha", "innovation"):
            validate.real(self, name, low=0, high=1, closed="]")
        for name in ("full_steps", "train_steps", "ae_steps"):
            validate.whole(self, name, low=1)
        validate.real(self, "ae_lr", low=0)
        validate.one_of(self, "ae_optimizer", OPTIMIZERS)
        validate.boolean(self, "signs")
        validate.one_of(self, "scale", SCALES)
        for name in ("lambda_rec", "lambda_sim"):
            validate.real(self, name, low=0, closed="[")
        validate.whole(self, "master", low=0)
        if self.common_rank is not None:
            validate.whole(self, "common_rank", low=0)
        for name in ("first_layer", "last_layer"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                validate.stands_for(self, name, tuple(value))
        validate.one_of(self, "index_coding", CODINGS)
        validate.one_of(self, "feedback", FEEDBACK)
        validate.one_of(self, "values", VALUES)
        validate_momentum(self)
        if self.retrain_loss is not None:
            validate.real(self, "retrain_loss", low=0)
        if self.retrain_every is not None:
            validate.whole(self, "retrain_every", low=1)
        validate.whole(self, "seed", low=0)
        self.validate_max_norm()

    # -- its parts ---------------------------------------------------------------------------

    @property
    def by_server(self) -> bool:
        """True with a parameter server."""
        return self.pattern == "parameter_server"

    @cached_property
    def topk(self) -> DGCCompressor:
        """DGC with the same parameters, which accumulates and selects."""
        return DGCCompressor(
            density=self.alpha,
            momentum=self.momentum,
            nesterov=self.nesterov,
            masking=self.masking,
            index_coding=self.index_coding,
        )

    @cached_property
    def trainer(self) -> Trainer:
        """Trainer of the autoencoder."""
        adam = self.ae_optimizer == "adam"
        return Trainer(self.train_steps, self.ae_steps, self.ae_lr, adam, self.retrain_loss)

    @cached_property
    def exchange(self) -> Ring | Server:
        """Exchange of the pattern, for the steps after the first phase."""
        selection = Selection(self.topk, self.feedback == "exact")
        units = Units(self.signs, self.scale == "layer")
        if not self.by_server:
            return Ring(self, selection, units, self.trainer, self.master, self.seed)
        return Server(
            self,
            selection,
            units,
            self.trainer,
            self.master,
            self.common_rank,
            self.innovation,
            self.lambda_rec,
            self.lambda_sim,
        )

    # -- which layers it takes ---------------------------------------------------------------

    @derived
    def needs_execution_order(self) -> bool:
        return self.first_layer is None or self.last_layer is None

    def of_layers(self, layers: Sequence[Layer], ranks: int) -> list[Compressor]:
        self.check_ranks(ranks)
        first = _chosen(layers, "first_layer", self.first_layer, "first")
        last = _chosen(layers, "last_layer", self.last_layer, "last") - first
        if len(first) + len(last) >= len(layers):
            raise ValueError(
                f"LGCCompressor: no layer is left for the autoencoder: of {len(layers)}, "
                f"{_named(layers, first)} are sent dense as first layer and "
                f"{_named(layers, last)} without it as "
                "last. Name others by first_layer= and last_layer= (an empty tuple for none), or "
                "use DGCCompressor"
            )
        plain: Compressor = NoneCompressor()
        topk = replace(self.topk, clip_norm=self.max_norm, values=self.values)
        late = after(self.full_steps, None, topk)
        return [
            plain if place in first else late if place in last else self
            for place in range(len(layers))
        ]

    def check_ranks(self, ranks: int) -> None:
        """Raise a ValueError if `master` or `common_rank` does not exist."""
        for name in ("master", "common_rank"):
            value = getattr(self, name)
            if value is not None and value >= ranks:
                raise ValueError(
                    f"LGCCompressor: {name} must be a rank in [0, {ranks - 1}], got {value}; "
                    f"{ranks} ranks exchange"
                )

    def check(self, layout: Layout) -> None:
        super().check(layout)
        selected = self.topk.capacity(layout)
        if selected < autoencoder.STRIDE:
            raise ValueError(
                f"LGCCompressor: alpha={self.alpha} selects {selected} of {layout.elements} "
                f"elements ({', '.join(layout.names[:8])}); the autoencoder needs a vector of at "
                f"least {autoencoder.STRIDE}. Raise alpha, or use DGCCompressor"
            )
        if selected * len(layout.names) >= 1 << 32:  # sort keys of layer and value have 63 bits
            raise ValueError(
                f"LGCCompressor: alpha={self.alpha} selects {selected} elements of "
                f"{len(layout.names)} layers, more than can be ranked. Lower alpha"
            )

    # -- sizes -------------------------------------------------------------------------------

    def compressed_bytes(self, layout: Layout, ranks: int) -> dict[str, int]:
        """Return the bytes handed to collectives in a compressed step, headers included.

        Ring-allreduce: "leader" by broadcast, "worker" by allreduce from every rank. Parameter
        server: "worker" from every rank, "common" from one in addition, "master" back from one.
        """
        return self.exchange.compressed_bytes(layout, ranks)

    def layer_bytes(self, shape: Sequence[int]) -> float:
        """Return a compressed step's bytes of a ring leader, or of a worker without a code."""
        size = prod(shape)
        count = self.topk.count(size)
        if self.by_server:
            innovation_count = count_of(count, self.innovation)
            return innovation_count * (4 + self.topk.coding.bits(size, innovation_count) / 8)
        units = count * self.signs / 8 + 4 * (self.scale == "layer")
        return count * (1 + self.topk.coding.bits(size, count) / 8) + units

    def course(self, layout: Layout, ranks: int) -> Course:
        """Return the bytes for a model's bucket."""
        dense, sizes = 4.0 * layout.elements, self.compressed_bytes(layout, ranks)
        network, topk, exchange = 4 * autoencoder.ENCODER_SIZE, self.topk, self.exchange
        if isinstance(exchange, Server):
            train = float(topk.payload_bytes(layout))
            handed_out = 4 + network * (exchange.common(ranks) != exchange.master)
            step = sizes["worker"] + (sizes["common"] + sizes["master"]) / ranks
        else:
            values = wire.HEADER_BYTES + 4 * topk.capacity(layout)
            chosen = wire.packed_bytes(topk.coding.parts(layout, topk.capacity(layout)))
            train = values + chosen / ranks
            handed_out = 4 + network + 4 * autoencoder.decoder_size(innovation=False)
            step = sizes["worker"] + sizes["leader"] / ranks
        whole = 4 * (layout.size + 1)
        learning = self.full_steps * whole + self.train_steps * train + handed_out / ranks
        return Course(learning, step, dense)

    def drawbacks(self, layouts: Sequence[Layout], ranks: int) -> list[str]:
        """Return a warning if learning, once before the rest of the training, does not pay."""
        courses = [self.course(layout, ranks) for layout in layouts]
        learning, step, dense = Course.total(courses)
        steps = self.full_steps + self.train_steps
        extra, saved = learning - steps * dense, dense - step
        pays = steps + extra / saved if saved > 0 else inf
        if pays <= 2 * steps and extra <= 0.5 * steps * dense:
            return []
        when = f"so it pays from step {pays:,.0f} on" if saved > 0 else "so it never pays"
        return [
            "LGC sends more than dense gradients on this model: "
            f"{learning / steps:,.0f} bytes a step and rank in the {steps} steps in which it "
            "learns, the autoencoder's parameters and what fills up small layers included, where "
            f"dense ones take {dense:,.0f}; then {step:,.0f}, {when}. Use DGCCompressor, which "
            f"learns nothing, or train for longer. It is {self}"
        ]

    # -- its state ---------------------------------------------------------------------------

    def init(self, ops: Ops, layout: Layout) -> LGCState:
        return self.start(ops, layout, 1)

    def start(self, ops: Ops, layout: Layout, ranks: int) -> LGCState:
        self.check_ranks(ranks)
        self.check(layout)
        return LGCState(
            memory=self.topk.init_memory(ops, layout),
            owed=ops.zeros((layout.size,)) if self.feedback == "exact" else (),
            **self._untrained(ops, self.exchange.heads(ranks)),
            loss=ops.full((), float("nan"), "float32"),
            start=ops.host(self.full_steps),
            ready=ops.host(0),
            drifted=ops.host(0),
            sent=ops.zeros((len(layout.names),), "int64"),
            hint=self.topk.unknown(ops, layout),
        )

    def _untrained(self, ops: Ops, heads: int) -> dict[str, Any]:
        """Return the state's fields of an untrained autoencoder."""
        encoder = autoencoder.initial_encoder(ops, self.seed)
        decoder = autoencoder.initial_decoder(ops, self.by_server, self.seed + 1)
        decoder = ops.stack([decoder] * heads)
        return {
            "encoder": encoder,
            "decoder": decoder,
            "moments": self.trainer.no_moments(ops, encoder, decoder),
            "late": ops.zeros(()),
            "seen": ops.zeros((2,)),
            "sampled": ops.zeros((2, SAMPLED)) if self.by_server else (),
        }

    def retrained(self, ops: Ops, state: LGCState, step: Any) -> LGCState:
        if step < self.full_steps:
            return state
        return self._restarted(ops, state, state.decoder.shape[0])._replace(start=ops.host(step))

    def rehearsed(self, ops: Ops, layout: Layout, state: LGCState, step: int) -> LGCState:
        return state._replace(start=ops.host(step - self.train_steps), ready=ops.host(1))

    def resized(self, ops: Ops, state: LGCState, step: Any, ranks: int) -> LGCState:
        # Each rank has a decoder, and new ranks have no encoder; nor, in the first phase, the
        # replicated velocity.
        self.check_ranks(ranks)
        state = self._restarted(ops, state, self.exchange.heads(ranks))
        if self.momentum and step < self.full_steps:
            state = state._replace(memory=state.memory._replace(u=state.memory.u * 0))
        return state._replace(start=ops.host(max(int(step), self.full_steps)))

    def _restarted(self, ops: Ops, state: LGCState, heads: int) -> LGCState:
        return state._replace(**self._untrained(ops, heads), ready=ops.host(0), drifted=ops.host(0))

    def owner(self, path: str, step: int) -> int | None:
        # The master trains; in the first phase the velocity is replicated.
        common = path == "memory.u" and step <= self.full_steps
        learned = path.startswith("moments") or path in _LEARNED
        return self.master if common or learned else None

    def velocity(self, state: LGCState) -> Tensor | None:
        return state.memory.u if self.momentum else None

    def with_velocity(self, state: LGCState, velocity: Tensor) -> LGCState:
        return self.topk.with_velocity(state, velocity)

    @property
    def correction(self) -> Correction:
        return self.momentum, self.nesterov

    def corrected(self, momentum: float, nesterov: bool) -> Compressor:
        return replace(self, momentum=momentum, nesterov=nesterov)

    def report(self, layout: Layout, state: LGCState, steps: int, since: int = 0) -> Report:
        whole = min(steps - since, self.full_steps)
        sent = [int(n) + whole * size for n, size in zip(state.sent, layout.sizes)]
        return Report(sent, self.residual(state), {"autoencoder": float(state.loss)})

    def residual(self, state: LGCState) -> Tensor:
        return state.memory.r + state.owed if self.feedback == "exact" else state.memory.r

    def inherit(
        self, ops: Ops, state: LGCState, gradient: Tensor, residual: Tensor
    ) -> tuple[LGCState, Tensor]:
        return self.topk.inherit(ops, state, gradient, residual)

    # -- one step ----------------------------------------------------------------------------

    def aggregate(
        self, ops: Ops, context: Context, gradient: Tensor, state: LGCState, **extra: Tensor
    ) -> Program:
        gradient, _ = self.clipped(ops, context, gradient, extra)
        start, ready = ops.staged(state.start), ops.staged(state.ready)
        again = ops.staged(state.drifted) > 0
        if self.retrain_every is not None:
            again = again | (context.step - start >= self.train_steps + self.retrain_every)
        start = ops.pick(again, context.step, start)
        ready = ops.pick(again, 0, ready)
        host = ops.host
        state = state._replace(start=host(start), ready=host(ready), drifted=host(0))
        steps, elapsed = self.train_steps, context.step - start
        if context.rank == self.master:
            self.trainer.warn_unless_ready(ops, elapsed, ready)
        phase = ops.bisect((-1, steps - 2, steps - 1), elapsed)
        phase = ops.pick((elapsed >= steps) & (ready != 1), 4, phase)
        step, inputs = self.exchange.step, (ops, context, gradient, state)
        branches = (
            lambda: self._whole(*inputs),
            lambda: step(*inputs, elapsed, train=True),
            lambda: step(*inputs, elapsed, train=True, last=True),
            lambda: step(*inputs, elapsed, compress=True),
            lambda: step(*inputs, elapsed),
        )
        return (yield Switch(phase, branches))

    def _whole(self, ops: Ops, context: Context, gradient: Tensor, state: LGCState) -> Program:
        """Run a step of the first phase; momentum after the exchange becomes the velocity `u`."""
        finite, gradient = patterns.check_storable(ops, gradient)
        vector = ops.concat((gradient, patterns.poison(ops, finite)))
        total = yield Allreduce(vector, context.prescale, context.postscale)
        total = patterns.strip_poison(ops, total)
        if not self.momentum:
            return total, state
        ahead, u = ops.zeros(total.shape), state.memory.u * 1
        ahead, u = ops.advance(ahead, u, total, self.momentum, bool(self.nesterov))
        return ahead, state._replace(memory=state.memory._replace(u=u))


def _chosen(
    layers: Sequence[Layer], name: str, value: str | Sequence[str] | None, role: str
) -> set[int]:
    """Return the positions of the layers that the hyper-parameter `name` selects."""
    if value is None:
        return {i for i, layer in enumerate(traits_of(layers)) if role in layer.roles}
    wanted = (value,) if isinstance(value, str) else value
    selected: set[int] = set()
    for pattern in wanted:
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
        selected |= hits
    return selected


def _named(layers: Sequence[Layer], places: set[int]) -> str:
    return ", ".join(layers[place][0] for place in sorted(places)) or "none"
