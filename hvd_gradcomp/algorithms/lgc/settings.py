"""Parameters of LGC, the layers it compresses, and the bytes sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod
from typing import Any, NamedTuple

from hvd_gradcomp.algorithms.dense import NoneCompressor
from hvd_gradcomp.algorithms.dgc import DGCCompressor
from hvd_gradcomp.algorithms.wrappers import after
from hvd_gradcomp.codecs import autoencoder
from hvd_gradcomp.codecs.momentum import MomentumCorrected
from hvd_gradcomp.codecs.sparse import Memory
from hvd_gradcomp.codecs.topk import count_of
from hvd_gradcomp.core import validate, wire
from hvd_gradcomp.core.compressor import Compressor, derived
from hvd_gradcomp.core.layers import Layer, traits_of
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.ops import Tensor
from hvd_gradcomp.ops.interface.bitpack import GROUP

PATTERNS = ("ring_allreduce", "parameter_server")
OPTIMIZERS = ("sgd", "adam")
SCALES = ("layer", "model")
SAMPLED = 16  # elements whose values ranks exchange, to measure the code's loss
OTHERS = "other "  # name prefix of parts with indices other than the common rank's


class LGCState(NamedTuple):
    """State of the model's one bucket."""

    memory: Memory  # rank-local
    owed: Any  # float32 [size] with exact feedback, else (); see `LGCCompressor`; rank-local
    encoder: Tensor  # float32 [parameters], rank-local: one rank trains it, then sends it to others
    decoder: Tensor  # float32 [heads, parameters], rank-local
    moments: Any  # training.Moments with Adam, else (); rank-local
    late: Tensor  # float32 [], sum of the loss over the last tenth of the training, rank-local
    seen: Tensor  # float32 [2], decaying energies of the error and of the target; the master's
    asked: Any  # float32 [2, SAMPLED], this rank's values and the replies; server only; rank-local
    loss: Tensor  # float32 [], the quotient of `seen`; while training the trainer's
    start: Tensor  # int64 [] step at which the training began, on the host
    ready: Tensor  # int64 [] 1 if the autoencoder has converged, on the host
    drifted: Tensor  # int64 [] 1 if it must be trained again, on the host
    sent: Tensor  # int64 [layers], elements that this rank has selected and sent so far
    hint: Tensor  # float32 [layers], magnitude to search from in the next step; rank-local


@dataclass(frozen=True, repr=False)
class LGCSettings(MomentumCorrected, registered=False):
    """Base of `LGCCompressor`: its fields, documented there, and sizes derived from them."""

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
    index_coding: str = "deflate"
    feedback: str = "exact"
    momentum: float | None = None
    nesterov: bool | None = None
    masking: bool = True
    retrain_loss: float | None = None
    retrain_every: int | None = None
    seed: int = 0
    max_norm: float | None = None

    state_format = 2  # has `owed` beside the residual, and the samples of the loss
    replicated = frozenset({"start", "ready", "drifted"})
    reset_on_merge = frozenset({"hint", "asked"})
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
        validate.one_of(self, "index_coding", validate.INDEX_CODINGS)
        validate.one_of(self, "feedback", ("exact", "paper"))
        self._validate_momentum()
        if self.retrain_loss is not None:
            validate.real(self, "retrain_loss", low=0)
        if self.retrain_every is not None:
            validate.whole(self, "retrain_every", low=1)
        validate.whole(self, "seed", low=0)
        self.validate_max_norm()

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
            clip_norm=self.max_norm,
            masking=self.masking,
            index_coding=self.index_coding,
        )
        late = after(self.full_steps, None, sparse)
        return [
            plain if place in first else late if place in last else self
            for place in range(len(layers))
        ]

    @derived
    def needs_execution_order(self) -> bool:
        return self.first_layer is None or self.last_layer is None

    def _chosen(self, layers: Sequence[Layer], name: str, role: str) -> set[int]:
        """Return the positions of the layers that a rule selects."""
        value = getattr(self, name)
        if value is None:
            return {i for i, layer in enumerate(traits_of(layers)) if role in layer.roles}
        patterns = (value,) if isinstance(value, str) else value
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
        selected = self.capacity(layout)
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

    def count(self, size: int) -> int:
        return count_of(size, self.alpha)

    @property
    def by_server(self) -> bool:
        """True with a parameter server."""
        return self.pattern == "parameter_server"

    def common(self, ranks: int) -> int:
        """Return the rank that sends the code."""
        return (self.master + 1) % ranks if self.common_rank is None else self.common_rank

    def innovations(self, layout: Layout) -> int:
        """Return the number of elements of a worker's innovation."""
        return sum(self.innovations_of(layout))

    def innovations_of(self, layout: Layout) -> tuple[int, ...]:
        """Return the number of elements of a worker's innovation in each layer."""
        return tuple(count_of(count, self.innovation) for count in self.most(layout))

    def code_length(self, layout: Layout) -> int:
        """Return the number of elements of a code."""
        return autoencoder.code_length(self.capacity(layout))

    def choice_parts(self, layout: Layout) -> dict[str, wire.Part]:
        """Return the parts of the leader's broadcast with codes: indices, signs and scales.

        While values travel, the leader broadcasts the indices alone.
        """
        capacity = self.capacity(layout)
        signs = {"signs": wire.Part("uint32", -(-capacity // GROUP))} if self.signs else {}
        scales = len(layout.names) if self.scale == "layer" else 1
        scale = {"scale": wire.Part("float32", scales)}
        return {**self.coding.parts(layout, capacity), **signs, **scale}

    def code_parts(self, layout: Layout) -> dict[str, wire.Part]:
        """Return the parts that the common rank sends to the master besides its innovation."""
        return {**self.choice_parts(layout), "code": wire.Part("float32", self.code_length(layout))}

    def innovation_parts(self, layout: Layout) -> dict[str, wire.Part]:
        """Return the parts that every worker sends to the master."""
        count = self.innovations(layout)
        parts = self.coding.parts(layout, count)
        return {
            **parts,
            "values": wire.Part("float32", count),
            "asked": wire.Part("float32", SAMPLED),
        }

    def back_parts(self, layout: Layout, ranks: int) -> dict[str, wire.Part]:
        """Return the parts of the master's broadcast: common and other indices, and values."""
        capacity, outside = self.capacity(layout), self.outside(layout, ranks)
        others = self.coding.parts(layout, outside)
        return {
            **self.coding.parts(layout, capacity),
            **{OTHERS + name: part for name, part in others.items()},
            "values": wire.Part("float16", capacity + outside),
            "most": wire.Part("float32", 1),
            "loss": wire.Part("float32", 1),
            "verdict": wire.Part("uint32", ranks),
        }

    def outside(self, layout: Layout, ranks: int) -> int:
        """Return the maximum number of elements in the reply besides the common rank's."""
        return min(ranks * self.innovations(layout), layout.size - 1)

    def compressed_bytes(self, layout: Layout, ranks: int) -> dict[str, int]:
        """Return the bytes handed to collectives in a compressed step, headers included.

        Ring-allreduce: "leader" by broadcast, "worker" by allreduce from every rank. Parameter
        server: "worker" from every rank, "common" from one in addition, "master" back from one.
        """
        if not self.by_server:
            return {
                "leader": packed_bytes(self.choice_parts(layout)),
                "worker": 4 * (self.code_length(layout) + SAMPLED + 1),
            }
        return {
            "worker": packed_bytes(self.innovation_parts(layout)),
            "common": packed_bytes(self.code_parts(layout)),
            "master": packed_bytes(self.back_parts(layout, ranks)),
        }

    def layer_bytes(self, shape: Sequence[int]) -> float:
        """Return a compressed step's bytes of a ring leader, or of a worker without a code."""
        size = prod(shape)
        count = self.count(size)
        if self.by_server:
            own = count_of(count, self.innovation)
            return own * (4 + self.coding.bits(size, own) / 8)
        units = count * self.signs / 8 + 4 * (self.scale == "layer")
        return count * (1 + self.coding.bits(size, count) / 8) + units


def _named(layers: Sequence[Layer], places: set[int]) -> str:
    return ", ".join(layers[place][0] for place in sorted(places)) or "none"


def packed_bytes(parts: dict[str, wire.Part]) -> int:
    """Return the bytes of a payload, header included."""
    return wire.HEADER_BYTES + int(wire.body_bytes(parts))
