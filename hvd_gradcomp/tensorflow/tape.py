"""`DistributedGradientTape`: Horovod's own, with the exchange replaced.

Horovod's tape passes gradients to `self._allreduce_grads(gradients, sources, ...)`; this attribute
is replaced. A user makes a new tape each step, so the state belongs to the variables that tapes
are asked about, not to a tape.

All of this runs while a user's function is traced. AutoGraph would translate it for seconds, so
functions are marked; those that call what the user has recorded by `untranslated`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as horovod
import tensorflow as tf

from hvd_gradcomp.algorithms.threshold.variance import weight_of_passes
from hvd_gradcomp.method.compressor import Compressor
from hvd_gradcomp.tensorflow.interop.autograph import untranslated
from hvd_gradcomp.tensorflow.interop.variables import plain_variable
from hvd_gradcomp.tensorflow.reduce.options import ExchangeOptions
from hvd_gradcomp.tensorflow.reduce.reducer import LOGGER, GraphReducer
from hvd_gradcomp.tensorflow.reduce.registry import reducer_for

_warned: set[Compressor] = set()


@tf.autograph.experimental.do_not_convert
def DistributedGradientTape(  # noqa: N802 - the name that users of Horovod know
    gradtape: tf.GradientTape,
    *,
    compression: Any = None,
    sparse_as_dense: bool | None = None,
    op: Any = horovod.Average,
    gradient_predivide_factor: float = 1.0,
    process_set: Any = horovod.global_process_set,
    scale_local_gradients: bool = True,
    hierarchical: bool = False,
    moments: Sequence[Any] | None = None,
    nonfinite: str | None = None,
    loss_scale: Any = None,
    rollback: bool = True,
    **horovod_only: Any,
) -> tf.GradientTape:
    """Wrap a tape so that `gradient` exchanges its results compressed.

    A drop-in for `horovod.tensorflow.DistributedGradientTape`, eager and inside `tf.function`.
    The compressor's state is kept for each list of sources, across tapes. Sources may be Keras
    variables (`model.trainable_variables`), one variable or a nest of them, and `gradient` takes
    `unconnected_gradients=`, as TensorFlow's own; stock Horovod refuses these. Gradients of a flat
    sequence are a list, others are nested like their sources.

    A source without a gradient stays without one; it must be the same source on all ranks. With
    `tf.UnconnectedGradients.ZERO` it has zeros, which are exchanged. On a rank that is not in the
    process set gradients stay as they are. `jacobian` and `batch_jacobian` raise a
    NotImplementedError: ask the tape that was wrapped. `discard_step()` of the result is
    `hvd.discard_step(tape)`.

    Args:
        gradtape: the tape that recorded the forward pass.
        compression: a compressor of this package, or Horovod's `Compression.none` or `.fp16`.
        sparse_as_dense: compress `IndexedSlices` as dense tensors (True), or gather their rows,
            uncompressed (False). None: whichever moves fewer bytes in the first step, layer by
            layer; rank 0 logs the choice, which is final.
        op: `hvd.Average` or `hvd.Sum`.
        gradient_predivide_factor: splits the averaging before and after the sum.
        process_set: the ranks that take part.
        scale_local_gradients: as in Horovod.
        hierarchical: reduce inside each host as dense tensors, and exchange compressed between
            hosts; to the compressor a host is one rank, with the samples of all its ranks. All
            hosts have the same number of ranks. If that is more than one, this needs
            `hvd.init(process_sets="dynamic")`.
        moments: for compressors that use second moments: the sum over samples (or micro-batches)
            of the squares of their contributions, one tensor for each source. Without it the step
            is the sample. `hvd.microbatch_gradients` computes gradients and moments.
        nonfinite: handling of a step in which a gradient of any rank has a NaN or an infinity.
            All ranks do the same. "raise": an error. "skip" and "propagate", which are the same
            here: gradients are NaN on all ranks, and the compressor's state is as before; leave
            the update out, as a `LossScaleOptimizer` does. None: "skip" with a `loss_scale`, else
            "raise".
        loss_scale: factor of the loss, such as `optimizer.dynamic_scale`; moments have its square.
            State is kept without it.
        rollback: keep the compressor's state before the last exchange until the next one, so that
            `discard_step` can restore it. It takes as much memory as that state; False saves that.
        horovod_only: `num_groups` and `groups` are refused: layers are exchanged in buckets;
            `device_dense` and `device_sparse` change nothing.

    Raises:
        ValueError: Horovod is not initialised; groups or Adasum are asked for; hosts or Horovod are
            not as `hierarchical` needs them.
        TypeError: `compression` is no compressor.
        MismatchError: at the first `gradient`, on all ranks, if they differ in what they train.
    """
    options = ExchangeOptions(
        sparse_as_dense,
        gradient_predivide_factor,
        op,
        process_set=process_set,
        hierarchical=hierarchical,
        nonfinite=nonfinite,
        rollback=rollback,
    )
    compressor = options.resolve_compressor(compression, "DistributedGradientTape", horovod_only)
    if moments is None and getattr(compressor, "moments", "step") in ("sample", "microbatch"):
        raise ValueError(
            "the compressor needs moments= here: a tape sees neither samples nor micro-batches. "
            f"hvd.microbatch_gradients computes them. Got {compressor}"
        )
    if hasattr(gradtape, "_allreduce_grads"):  # Horovod's, and so ours
        raise ValueError(
            "the tape exchanges its gradients already: give DistributedGradientTape the "
            "tf.GradientTape itself, once"
        )
    tape = horovod.DistributedGradientTape(
        gradtape,
        sparse_as_dense=sparse_as_dense,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    TapeExchange(compressor, options, moments, loss_scale).attach(tape)
    return tape


class TapeExchange:
    """Exchange in the place of that of one of Horovod's tapes.

    Args:
        compressor: of all gradients.
        options: of the exchange.
        moments: one for each source, or None.
        loss_scale: factor of the loss, or None.
    """

    def __init__(
        self,
        compressor: Compressor,
        options: ExchangeOptions,
        moments: Sequence[Any] | None,
        loss_scale: Any,
    ) -> None:
        self._compressor, self._moments, self._loss_scale = compressor, moments, loss_scale
        self._options = options.with_policy(scaled=loss_scale is not None)
        self._paths: dict[int, str] = {}  # what Keras calls a variable
        self._moment_of: dict[int, Any] = {}
        self._fills = False  # whether a source without a gradient gets zeros

    def attach(self, tape: Any) -> None:
        """Replace the exchange of a tape; see `check_seam`."""
        check_seam(tape)
        self._tape, self._stock = tape, type(tape)
        tape._allreduce_grads, tape.discard_step = self.exchange, self.discard_step
        tape.jacobian = tape.batch_jacobian = _refuse_jacobian
        tape.gradient = self.gradient
        tape.get_local_and_global_gradients = self.get_local_and_global_gradients
        tape.register_local_source = self.register_local_source

    @untranslated
    def gradient(
        self,
        target: Any,
        sources: Any,
        *arguments: Any,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
        **options: Any,
    ) -> Any:
        """Return reduced gradients, nested like their sources; see `tf.GradientTape.gradient`."""
        nest, plain = self._begin(sources, unconnected_gradients)
        gradients = self._stock.gradient(self._tape, target, plain, *arguments, **options)
        reduced = self._with_zeros(gradients, plain)
        return reduced if nest is None else tf.nest.pack_sequence_as(nest, reduced)

    @tf.autograph.experimental.do_not_convert
    def _begin(self, sources: Any, unconnected: Any) -> tuple[Any, list[Any]]:
        nest, flat = _flattened(sources)
        plain = [plain_variable(source) for source in flat]
        self._paths.update((id(p), s.path) for p, s in zip(plain, flat) if p is not s)
        self._moment_of.update(zip(map(id, plain), tf.nest.flatten(self._moments or ())))
        self._fills = tf.UnconnectedGradients(unconnected) == tf.UnconnectedGradients.ZERO
        return nest, plain

    @tf.autograph.experimental.do_not_convert
    def _with_zeros(self, gradients: Sequence[Any], sources: Sequence[Any]) -> list[Any]:
        return [
            tf.zeros(s.shape, s.dtype) if g is None and self._fills else g
            for g, s in zip(gradients, sources)
        ]

    @untranslated
    def get_local_and_global_gradients(
        self, target: Any, sources: Any, *arguments: Any, **options: Any
    ) -> Any:
        """Return (source, gradient) pairs, of local sources and of the others, as in Horovod."""
        flat = _flattened(sources)[1]
        plain = [plain_variable(source) for source in flat]
        source_of = dict(zip(map(id, plain), flat))
        kinds = self._stock.get_local_and_global_gradients(
            self._tape, target, plain, *arguments, **options
        )
        return tuple([(source_of[id(s)], g) for s, g in pairs] for pairs in kinds)

    def register_local_source(self, source: Any) -> None:
        """Leave the gradient of a source to its rank, as in Horovod."""
        self._stock.register_local_source(self._tape, plain_variable(source))

    @tf.autograph.experimental.do_not_convert
    def exchange(self, gradients: Any, sources: Any, use_generic_names: bool = False) -> list[Any]:
        """Exchange the gradients that Horovod's own has not taken out as local."""
        del use_generic_names  # everything is named by bucket
        if not sources:
            return []
        if self._moments is None:
            _warn_once(self._compressor)
        names = [self._paths.get(id(source)) for source in sources]
        reducer = reducer_for(sources, self._compressor, self._options, names)
        self._tape._gradcomp, self._tape.exchanged_variables = reducer, sources
        gradients = self._with_zeros(gradients, sources)
        if reducer is None:
            return gradients
        moments = None if self._moments is None else [self._moment_of.get(id(s)) for s in sources]
        return reducer.reduce(gradients, moments, self._loss_scale)

    @tf.autograph.experimental.do_not_convert
    def discard_step(self) -> None:
        """Discard the exchange of this tape; see `hvd.discard_step`."""
        if not hasattr(self._tape, "_gradcomp"):
            raise RuntimeError("discard_step() leaves out a step: call it after gradient()")
        if self._tape._gradcomp is not None:
            self._tape._gradcomp.rollback()


def check_seam(tape: tf.GradientTape) -> None:
    """Require that a tape of Horovod's lets its exchange be replaced, as 0.28.1's does.

    Raises:
        RuntimeError: its exchange is no attribute that could be replaced.
    """
    if not hasattr(tape, "_allreduce_grads"):
        raise RuntimeError("this Horovod's tape is built otherwise; install horovod==0.28.1")


def _refuse_jacobian(*arguments: Any, **options: Any) -> Any:
    del arguments, options
    raise NotImplementedError(
        "a distributed tape exchanges gradients, which are reduced over ranks; it has no "
        "jacobian, whose rows would each be an exchange. Ask the tf.GradientTape that it was "
        "made from, and reduce what you need of the result with hvd.allreduce"
    )


@tf.autograph.experimental.do_not_convert
def PartialDistributedGradientTape(  # noqa: N802 - the name that users of Horovod know
    gradtape: tf.GradientTape, *, local_layers: Any = None, **options: Any
) -> tf.GradientTape:
    """Wrap a tape like `DistributedGradientTape`, but leave some layers' gradients to their rank.

    Args:
        gradtape: as there.
        local_layers: one layer of Keras, or several, built.
        options: the other arguments of `DistributedGradientTape`; `scale_local_gradients`, the
            default, divides these layers' gradients by the number of ranks, as averaging does with
            those of other layers.

    Raises:
        ValueError: as there; or `local_layers` is something else.
    """
    layers = layers_in(local_layers)
    tape = DistributedGradientTape(gradtape, **options)
    for variable in variables_of(layers):
        tape.register_local_source(variable)
    return tape


def layers_in(local_layers: Any) -> list[Any]:
    """Return the layers that `local_layers=` names.

    Raises:
        ValueError: it contains something else.
    """
    several = not hasattr(local_layers, "trainable_weights")
    layers = [] if local_layers is None else [*local_layers] if several else [local_layers]
    for layer in layers:
        if not hasattr(layer, "trainable_weights"):
            raise ValueError(f"local_layers= takes layers of Keras, got {layer!r}")
    return layers


def variables_of(layers: Sequence[Any]) -> list[Any]:
    """Return the trainable weights of some layers.

    Raises:
        ValueError: a layer trains nothing, or is not built.
    """
    for layer in layers:
        if not layer.trainable_weights:
            raise ValueError(
                f"the local layer {layer.name} has no trainable weights: is it not built?"
            )
    return [variable for layer in layers for variable in layer.trainable_weights]


def _flattened(sources: Any) -> tuple[Any, list[Any]]:
    """Return the nest for the gradients, None for a list; and the sources one after another."""
    if tf.nest.is_nested(sources) or hasattr(sources, "dtype"):
        flat = tf.nest.flatten(sources)
        plain = isinstance(sources, (list, tuple)) and not any(map(tf.nest.is_nested, sources))
        return None if plain else sources, flat
    return None, [*sources]  # a view of a dictionary, say


def microbatch_gradients(
    loss: Any, sources: Sequence[Any], batch: Sequence[tf.Tensor], passes: int
) -> tuple[tf.Tensor, list[tf.Tensor], list[tf.Tensor]]:
    """Return loss, gradients and second moments of a batch that is cut into equal micro-batches.

    With `c_j` the contribution of micro-batch j to the gradient `g`, and `B` samples in all, the
    moment is `a * sum_j c_j**2 + (1 - a) * g**2`, `a = (1 - 1/B) / (1 - 1/passes)`. For samples
    that are drawn independently its expectation is that of the sum over samples of their squared
    contributions (Tsuzuku et al. 2018, Algorithm 1). It is never negative, except for rounding.

    Args:
        loss: `loss(*pieces)`, a mean over the samples of a piece.
        sources: the variables.
        batch: tensors whose first axis counts the samples, a multiple of `passes`.
        passes: number of micro-batches, at least 2; the more, the sharper the moments and the
            slower the step.

    Returns:
        (mean loss, gradients, moments); the last two in the order of `sources`, in their shapes and
        dtypes. Hand the moments to `DistributedGradientTape(..., moments=moments)`, or use
        `reduce_gradients`.

    Raises:
        ValueError: `passes` is less than 2.
    """
    if passes < 2:
        raise ValueError(f"passes must be at least 2, got {passes}")
    pieces = [tf.split(x, passes) for x in batch]
    total, gradients, squares = 0.0, None, None
    for piece in zip(*pieces):
        with tf.GradientTape() as tape:
            value = loss(*piece) / passes
        of_piece = [tf.convert_to_tensor(g) for g in tape.gradient(value, list(sources))]
        total += value
        if gradients is None or squares is None:
            gradients, squares = of_piece, [g * g for g in of_piece]
        else:
            gradients = [a + g for a, g in zip(gradients, of_piece)]
            squares = [s + g * g for s, g in zip(squares, of_piece)]
    assert gradients is not None and squares is not None
    weight = weight_of_passes(passes, tf.cast(tf.shape(batch[0])[0], tf.float64))
    moments = []
    for square, g in zip(squares, gradients):
        a = tf.cast(weight, g.dtype)
        moments.append(tf.maximum(a * square + (1 - a) * g * g, 0))
    return total, gradients, moments


@tf.autograph.experimental.do_not_convert
def reduce_gradients(
    gradients: Sequence[Any],
    sources: Sequence[Any],
    compression: Any = None,
    *,
    moments: Sequence[Any] | None = None,
    op: Any = horovod.Average,
    process_set: Any = horovod.global_process_set,
    sparse_as_dense: bool | None = None,
    hierarchical: bool = False,
    nonfinite: str | None = None,
    loss_scale: Any = None,
    rollback: bool = True,
) -> list[Any]:
    """Exchange gradients that were computed without a `DistributedGradientTape`.

    Arguments and errors as there. State is kept for each list of sources.
    """
    options = ExchangeOptions(
        sparse_as_dense,
        op=op,
        process_set=process_set,
        hierarchical=hierarchical,
        nonfinite=nonfinite,
        rollback=rollback,
    )
    compressor = options.resolve_compressor(compression, "reduce_gradients")
    if moments is None:
        _warn_once(compressor)
    options = options.with_policy(scaled=loss_scale is not None)
    reducer = reducer_for(sources, compressor, options)
    return list(gradients) if reducer is None else reducer.reduce(gradients, moments, loss_scale)


def _warn_once(compressor: Compressor) -> None:
    """Log once where second moments come from, if none were given."""
    automatic = getattr(compressor, "moments", "") == "auto"
    if automatic and compressor not in _warned and horovod.rank() == 0:
        LOGGER.warning(
            "the compressor takes each step as one sample (moments='step'): a tape sees no "
            "samples. hvd.microbatch_gradients computes moments of micro-batches, to be passed as "
            "moments=. It is %s",
            compressor,
        )
        _warned.add(compressor)


class TapeState(tf.Module):
    """State that tapes over some sources keep from step to step; see `tape_state`."""

    def __init__(self, reducer: GraphReducer | None) -> None:
        super().__init__(name="gradcomp")
        self._gradcomp = reducer
        self.kept = [] if reducer is None else reducer.variables


def tape_state(
    sources: Sequence[Any],
    compression: Any = None,
    *,
    op: Any = horovod.Average,
    gradient_predivide_factor: float = 1.0,
    process_set: Any = horovod.global_process_set,
    sparse_as_dense: bool | None = None,
    hierarchical: bool = False,
    nonfinite: str | None = None,
    loss_scale: Any = None,
    rollback: bool = True,
) -> TapeState:
    """Return the state of all `DistributedGradientTape` with these arguments, to save it.

    For `tf.train.Checkpoint(model=model, exchange=hvd.tape_state(...))`, one file for each rank,
    and for `hvd.save_checkpoint`. Make it before the first tape, and from the same arguments.

    Args:
        sources: what tapes are asked about, in that order.
        compression, op, gradient_predivide_factor: as for the tapes.
        process_set, sparse_as_dense, hierarchical, nonfinite: as for the tapes.
        loss_scale: as for the tapes; only whether there is one counts.
        rollback: as for the tapes.
    """
    options = ExchangeOptions(
        sparse_as_dense,
        gradient_predivide_factor,
        op,
        process_set=process_set,
        hierarchical=hierarchical,
        nonfinite=nonfinite,
        rollback=rollback,
    )
    compressor = options.resolve_compressor(compression, "tape_state")
    reducer = reducer_for(sources, compressor, options.with_policy(scaled=loss_scale is not None))
    if reducer is not None:
        reducer.owned = True
    return TapeState(reducer)
