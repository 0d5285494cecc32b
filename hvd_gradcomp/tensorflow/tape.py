"""`DistributedGradientTape`: Horovod's own, with the exchange replaced.

Horovod's tape passes gradients to `self._allreduce_grads(gradients, sources, ...)`; this attribute
is replaced. A user makes a new tape each step, so the state belongs to the variables that tapes
are asked about, not to a tape.

All of this runs while a user's function is traced. AutoGraph would translate it for seconds, so
functions are marked, except for the one that calls what the user has recorded.
"""

from __future__ import annotations

import gc
import re
import sys
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import horovod.tensorflow as horovod
import tensorflow as tf

from hvd_gradcomp.algorithms.variance import weight_of_passes
from hvd_gradcomp.core import validate
from hvd_gradcomp.core.compressor import Compressor
from hvd_gradcomp.core.layers import Layer, Weight, convolving
from hvd_gradcomp.tensorflow.engine import LOGGER, TITLES, GraphReducer, check, takes_part
from hvd_gradcomp.tensorflow.variables import plain_variable

_said: set[Compressor] = set()
_known: dict[Any, tuple[list[Any], GraphReducer | None]] = {}


@tf.autograph.experimental.do_not_convert
def DistributedGradientTape(  # noqa: N802 - the name that users of Horovod know
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = None,
    sparse_as_dense: bool | None = None,
    op: Any = horovod.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = horovod.global_process_set,
    scale_local_gradients: bool = True,
    *,
    hierarchical: bool = False,
    moments: Sequence[Any] | None = None,
    nonfinite: str | None = None,
    loss_scale: Any = None,
    rollback: bool = True,
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
        device_dense, device_sparse: as in Horovod.
        compression: a compressor of this package, or Horovod's `Compression.none` or `.fp16`.
        sparse_as_dense: compress `IndexedSlices` as dense tensors (True), or gather their rows,
            uncompressed (False). None: whichever moves fewer bytes in the first step, layer by
            layer; rank 0 logs the choice, which is final.
        op: `hvd.Average` or `hvd.Sum`.
        gradient_predivide_factor: splits the averaging before and after the sum.
        num_groups, groups: refused.
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

    Raises:
        ValueError: Horovod is not initialised; groups or Adasum are asked for; hosts or Horovod are
            not as `hierarchical` needs them.
        TypeError: `compression` is no compressor.
        MismatchError: at the first `gradient`, on all ranks, if they differ in what they train.
    """
    compressor = check(
        "DistributedGradientTape", op, groups, num_groups, compression, process_set, hierarchical
    )
    if moments is None and getattr(compressor, "moments", "step") in ("sample", "microbatch"):
        raise ValueError(
            "the compressor needs moments= here: a tape sees neither samples nor micro-batches. "
            f"hvd.microbatch_gradients computes them. Got {compressor}"
        )
    policy = _policy(nonfinite, loss_scale)
    tape = horovod.DistributedGradientTape(
        gradtape,
        device_dense=device_dense,
        device_sparse=device_sparse,
        sparse_as_dense=sparse_as_dense,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    check_seam(tape)

    paths: dict[int, str] = {}  # what Keras calls a variable
    moment_of: dict[int, Any] = {}
    fills = False  # whether a source without a gradient gets zeros

    def gradient(
        target: Any,
        sources: Any,
        *options: Any,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
        **named: Any,
    ) -> Any:
        nest, plain = prepared(sources, unconnected_gradients)
        reduced = filled(type(tape).gradient(tape, target, plain, *options, **named), plain)
        return reduced if nest is None else tf.nest.pack_sequence_as(nest, reduced)

    @tf.autograph.experimental.do_not_convert
    def prepared(sources: Any, unconnected: Any) -> tuple[Any, list[Any]]:
        nonlocal fills
        nest, flat = _flattened(sources)
        plain = [plain_variable(source) for source in flat]
        paths.update((id(p), s.path) for p, s in zip(plain, flat) if p is not s)
        moment_of.update(zip(map(id, plain), tf.nest.flatten(moments or ())))
        fills = tf.UnconnectedGradients(unconnected) == tf.UnconnectedGradients.ZERO
        return nest, plain

    @tf.autograph.experimental.do_not_convert
    def filled(gradients: Sequence[Any], sources: Sequence[Any]) -> list[Any]:
        return [
            tf.zeros(s.shape, s.dtype) if g is None and fills else g
            for g, s in zip(gradients, sources)
        ]

    def parted(target: Any, sources: Any, *options: Any, **named: Any) -> Any:
        _, flat = _flattened(sources)
        plain = {id(plain_variable(source)): source for source in flat}
        kinds = type(tape).get_local_and_global_gradients(
            tape, target, [plain_variable(source) for source in flat], *options, **named
        )
        return tuple([(plain[id(s)], g) for s, g in pairs] for pairs in kinds)

    def register(source: Any) -> None:
        type(tape).register_local_source(tape, plain_variable(source))

    @tf.autograph.experimental.do_not_convert
    def exchange(gradients: Any, sources: Any, use_generic_names: bool = False) -> list[Any]:
        """Exchange the gradients that Horovod's own has not taken out as local."""
        del use_generic_names  # everything is named by bucket
        if not sources:
            return []
        if moments is None:
            _say_once(compressor)
        engine = reducer_for(
            sources,
            compressor,
            [paths.get(id(source)) for source in sources],
            op=op,
            predivide=gradient_predivide_factor,
            process_set=process_set,
            sparse_as_dense=sparse_as_dense,
            hierarchical=hierarchical,
            nonfinite=policy,
            rollback=rollback,
        )
        tape._gradcomp, tape._gradcomp_sources = engine, sources
        gradients = filled(gradients, sources)
        if engine is None:
            return gradients
        of_sources = None if moments is None else [moment_of.get(id(s)) for s in sources]
        return engine.reduce(gradients, of_sources, loss_scale)

    def refused(*arguments: Any, **named: Any) -> Any:
        del arguments, named
        raise NotImplementedError(
            "a distributed tape exchanges gradients, which are reduced over ranks; it has no "
            "jacobian, whose rows would each be an exchange. Ask the tf.GradientTape that it was "
            "made from, and reduce what you need of the result with hvd.allreduce"
        )

    @tf.autograph.experimental.do_not_convert
    def discard_step() -> None:
        if not hasattr(tape, "_gradcomp"):
            raise RuntimeError("discard_step() leaves out a step: call it after gradient()")
        if tape._gradcomp is not None:
            tape._gradcomp.discard()

    tape._allreduce_grads, tape.discard_step = exchange, discard_step
    tape.jacobian = tape.batch_jacobian = refused
    tape.gradient, tape.get_local_and_global_gradients = gradient, parted
    tape.register_local_source = register
    return tape


@tf.autograph.experimental.do_not_convert
def PartialDistributedGradientTape(  # noqa: N802 - the name that users of Horovod know
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = None,
    sparse_as_dense: bool | None = None,
    op: Any = horovod.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = horovod.global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
    **options: Any,
) -> tf.GradientTape:
    """Wrap a tape like `DistributedGradientTape`, but leave some layers' gradients to their rank.

    Args:
        gradtape, device_dense, device_sparse, compression: as there.
        sparse_as_dense, op, gradient_predivide_factor, num_groups, groups, process_set: as there.
        local_layers: one layer of Keras, or several, built.
        scale_local_gradients: divide their gradients by the number of ranks, as averaging does
            with those of other layers.
        options: the other arguments of `DistributedGradientTape`.

    Raises:
        ValueError: as there; or `local_layers` is something else.
    """
    layers = layers_in(local_layers)
    tape = DistributedGradientTape(
        gradtape,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        num_groups,
        groups,
        process_set,
        scale_local_gradients,
        **options,
    )
    for variable in variables_of(layers):
        tape.register_local_source(variable)
    return tape


def layers_in(given: Any) -> list[Any]:
    """Return the layers that `local_layers=` names.

    Raises:
        ValueError: it contains something else.
    """
    layers = [] if given is None else [given] if hasattr(given, "trainable_weights") else [*given]
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


def check_seam(tape: tf.GradientTape) -> None:
    """Require that a tape of Horovod's lets its exchange be replaced, as 0.28.1's does.

    Raises:
        RuntimeError: its exchange is no attribute that could be replaced.
    """
    if not hasattr(tape, "_allreduce_grads"):
        raise RuntimeError("this Horovod's tape is built otherwise; install horovod==0.28.1")


def reducer_for(
    sources: Sequence[Any],
    compressor: Compressor,
    names: Sequence[str | None] | None = None,
    *,
    process_set: Any,
    **settings: Any,
) -> GraphReducer | None:
    """Return the reducer of these sources and settings, created when they are first seen.

    None on a rank that is not in the process set.

    Raises:
        RuntimeError: within a graph of TensorFlow 1.
    """
    if not tf.compat.v1.executing_eagerly_outside_functions():
        raise RuntimeError(
            "gradients are computed in a graph of TensorFlow 1, which a session runs: nothing "
            "would initialize the state of compressors there. Compute them eagerly or in a "
            "tf.function, or use stock Horovod"
        )
    identity = tuple(_identity(source) for source in sources)
    key = (identity, compressor, process_set.process_set_id, tuple(sorted(settings.items())))
    if key in _known and all(ref() is not None for ref in _known[key][0]):
        return _known[key][1]
    drop_stale()
    plain = [plain_variable(source) for source in sources]
    refs = [weakref.ref(p) for p in plain if isinstance(p, tf.Variable)]
    name = TITLES.take()  # taken on all ranks, or later names would differ
    engine = None
    if takes_part(process_set):
        layers = named_layers(sources, names)
        engine = GraphReducer(layers, compressor, process_set=process_set, name=name, **settings)
    _known[key] = (refs, engine)
    return engine


def _say_once(compressor: Compressor) -> None:
    """Log once where second moments come from, if none were given."""
    automatic = getattr(compressor, "moments", "") == "auto"
    if automatic and compressor not in _said and horovod.rank() == 0:
        LOGGER.warning(
            "the compressor takes each step as one sample (moments='step'): a tape sees no "
            "samples. hvd.microbatch_gradients computes moments of micro-batches, to be passed as "
            "moments=. It is %s",
            compressor,
        )
        _said.add(compressor)


def engine_of_variables(variables: Sequence[Any]) -> GraphReducer | None:
    """Return the newest reducer whose sources are these variables, or None."""
    identity = tuple(_identity(v) for v in variables)
    for (known, *_), (_, engine) in reversed(list(_known.items())):
        if known == identity:
            return engine
    return None


def engines_over(variables: Sequence[Any]) -> list[tuple[GraphReducer, list[int], dict[str, Any]]]:
    """Return the reducers whose sources are all among these: (reducer, places, settings)."""
    places = {id(plain_variable(v)): place for place, v in enumerate(variables)}
    return [
        (engine, [places[i] for i in identity], dict(settings))
        for (identity, _, _, settings), (refs, engine) in _known.items()
        if engine is not None and all(i in places for i in identity)
        if all(ref() is not None for ref in refs)
    ]


def drop_stale() -> None:
    """Drop the reducers of variables that no longer exist."""
    for stale in [k for k, (refs, _) in _known.items() if any(ref() is None for ref in refs)]:
        del _known[stale]


def drop_engines(engines: Iterable[GraphReducer]) -> None:
    """Drop reducers as if nobody had asked for them."""
    dropped = {id(engine) for engine in engines}
    for key in [key for key, (_, engine) in _known.items() if id(engine) in dropped]:
        del _known[key]


def named_layers(sources: Sequence[Any], names: Sequence[str | None] | None = None) -> list[Layer]:
    """Return each source's (name, shape, dtype), equal on all ranks; `names` take precedence.

    Keras numbers layers as they are made (`dense_7`), so ranks that made different models before
    would disagree: the numbers are left out, and the place makes names unique. A model that was
    loaded from a file calls its layers without its own name, so only the last two parts count.
    """
    layers: list[Layer] = []
    seen: set[str] = set()
    for place, source in enumerate(sources):
        given = (names[place] if names else None) or getattr(source, "path", None)
        name = str(given or getattr(source, "name", None) or "source")
        name = re.sub(r"_\d+(?=/|$)", "", name.partition(":")[0])
        name = "/".join(name.split("/")[-2:])
        if name in seen:
            name = f"{name}.{place}"
        seen.add(name)
        shape = tf.TensorShape(source.shape)
        if not shape.is_fully_defined():
            raise ValueError(f"{name} has shape {shape}; a fixed one is needed")
        layers.append((name, tuple(shape.as_list()), tf.as_dtype(source.dtype).name))
    return with_kernels(layers, sources)


def with_kernels(layers: Sequence[Layer], sources: Sequence[Any]) -> list[Layer]:
    """Return the layers with `convolves` set for each source that a Keras layer holds."""
    kernels = _kernels([s for s, (_, shape, _) in zip(sources, layers) if len(shape) > 2])
    found: list[Layer] = []
    for layer, source in zip(layers, sources):
        known = kernels.get(id(plain_variable(source)))
        found.append(layer if known is None else Weight(*layer, convolves=known))
    return found


@tf.autograph.experimental.do_not_convert
def _kernels(sources: Sequence[Any]) -> dict[int, bool]:
    """Return for each source that a Keras layer holds if it belongs to a convolution.

    Tapes and optimizers do not know layers, so all live objects are searched for them. The type is
    checked, not the object: some objects load what they stand for on access.
    """
    found: dict[int, bool] = {}
    keras = sys.modules.get("keras")
    wanted = {id(plain_variable(source)) for source in sources}
    if keras is None or not wanted:
        return found
    for layer in gc.get_objects():
        kind = type(layer)
        if not issubclass(kind, keras.layers.Layer) or getattr(layer, "_layers", None):
            continue  # a container's weights are its layers'
        known = convolving(kind)
        for weight in () if known is None else getattr(layer, "weights", ()):
            place = id(plain_variable(weight))
            if place in wanted:
                found[place] = known or found.get(place, False)
    return found


def _identity(source: Any) -> Any:
    source = plain_variable(source)
    return id(source) if isinstance(source, tf.Variable) else (source.shape, source.dtype)


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
        found = [tf.convert_to_tensor(g) for g in tape.gradient(value, list(sources))]
        total += value
        if gradients is None or squares is None:
            gradients, squares = found, [g * g for g in found]
        else:
            gradients = [a + g for a, g in zip(gradients, found)]
            squares = [s + g * g for s, g in zip(squares, found)]
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
    compressor = check("reduce_gradients", op, None, 0, compression, process_set, hierarchical)
    if moments is None:
        _say_once(compressor)
    engine = reducer_for(
        sources,
        compressor,
        op=op,
        predivide=1.0,
        process_set=process_set,
        sparse_as_dense=sparse_as_dense,
        hierarchical=hierarchical,
        nonfinite=_policy(nonfinite, loss_scale),
        rollback=rollback,
    )
    return list(gradients) if engine is None else engine.reduce(gradients, moments, loss_scale)


class TapeState(tf.Module):
    """State that tapes over some sources keep from step to step; see `tape_state`."""

    def __init__(self, engine: GraphReducer | None) -> None:
        super().__init__(name="gradcomp")
        self._gradcomp = engine
        self.kept = [] if engine is None else engine.everything


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
    engine = reducer_for(
        sources,
        check("tape_state", op, None, 0, compression, process_set, hierarchical),
        op=op,
        predivide=gradient_predivide_factor,
        process_set=process_set,
        sparse_as_dense=sparse_as_dense,
        hierarchical=hierarchical,
        nonfinite=_policy(nonfinite, loss_scale),
        rollback=rollback,
    )
    if engine is not None:
        engine.owned = True
    return TapeState(engine)


def _policy(nonfinite: str | None, loss_scale: Any) -> str:
    validate.policy(nonfinite)
    return nonfinite or ("raise" if loss_scale is None else "skip")
