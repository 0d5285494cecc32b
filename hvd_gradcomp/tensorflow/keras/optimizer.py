"""`DistributedOptimizer` for Keras 3.

Stock Horovod 0.28.1 overrides methods that Keras 3 no longer calls: it trains without an error and
without reducing. Here the wrapped class overrides `apply`, through which every update goes.

Saving. The configuration of a distributed optimizer is that of the optimizer it was made from, with
one more entry for the wrapper's arguments. Keras finds it by a registered name and passes it to
`_Saved`. If this package is not imported that name is unknown, and Keras goes by module and class,
which are the plain optimizer's; the entry is named like an argument that plain optimizers take and
ignore, so it still loads there.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import horovod.tensorflow as horovod
import keras
import tensorflow as tf
from keras.optimizers import LossScaleOptimizer

from hvd_gradcomp.algorithms.combined.wrappers import take_over
from hvd_gradcomp.algorithms.dense import NoneCompressor
from hvd_gradcomp.core import validate
from hvd_gradcomp.method.compressor import Compressor
from hvd_gradcomp.tensorflow.comm.horovod import takes_part
from hvd_gradcomp.tensorflow.interop.autograph import untranslated
from hvd_gradcomp.tensorflow.keras import loss_scale, serialization
from hvd_gradcomp.tensorflow.keras.local_variables import local_places, places_of
from hvd_gradcomp.tensorflow.keras.step_exchange import StepExchange
from hvd_gradcomp.tensorflow.reduce.options import ExchangeOptions
from hvd_gradcomp.tensorflow.reduce.reducer import LOGGER, TITLES, GraphReducer, require_one_replica
from hvd_gradcomp.tensorflow.reduce.registry import distributed_in, exchanges_in
from hvd_gradcomp.tensorflow.tape import layers_in, variables_of

if TYPE_CHECKING:
    from keras.optimizers import Optimizer as _KerasOptimizer
else:  # the mixin comes before a subclass of it
    _KerasOptimizer = object


def DistributedOptimizer(  # noqa: N802 - the name that users of Horovod know
    optimizer: keras.optimizers.Optimizer,
    name: str | None = None,
    *,
    compression: Any = None,
    sparse_as_dense: bool | None = None,
    gradient_predivide_factor: float = 1.0,
    op: Any = horovod.Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    process_set: Any = horovod.global_process_set,
    scale_local_gradients: bool = True,
    batch_size: int | None = None,
    hierarchical: bool = False,
    nonfinite: str | None = None,
    verify_every: int = 0,
    rollback: bool = False,
    **horovod_only: Any,
) -> keras.optimizers.Optimizer:
    """Wrap a Keras optimizer so that gradients are exchanged compressed before each update.

    Works with `model.fit`, in graph mode and eagerly, and in custom loops through `apply` or
    `apply_gradients`. A `DistributedGradientTape` before it, which reduces the same gradients, is
    an error, and so are several replicas of `tf.distribute` in a process.

    Mixed precision: wrap a `keras.optimizers.LossScaleOptimizer`, or let Keras wrap this one, as
    `compile` does under the policy "mixed_float16". Gradients are exchanged, and kept from step to
    step, without the scale.

    Args:
        optimizer: a Keras 3 optimizer. It is not modified: the result is a new one with the same
            configuration, and the same variables if it was built. If it is distributed already,
            its plain optimizer is wrapped; with the same compressor, its state is kept.
        name: of the new optimizer; the old one's if None.
        compression: a compressor of this package, or Horovod's `Compression.none` or `.fp16`.
        sparse_as_dense: compress the sparse gradients of embeddings (`IndexedSlices`) as dense
            tensors (True), or gather their rows, uncompressed (False). None: whichever moves fewer
            bytes in the first step, layer by layer; rank 0 logs the choice, which is final.
        gradient_predivide_factor: splits the averaging before and after the sum.
        op: `hvd.Average` or `hvd.Sum`.
        backward_passes_per_step: gradients are added up over this many calls of `apply`; the
            other calls change nothing.
        average_aggregated_gradients: divide that sum by `backward_passes_per_step`.
        process_set: the ranks that take part.
        scale_local_gradients: divide gradients that are not exchanged by the number of ranks; see
            `PartialDistributedOptimizer`.
        batch_size: samples that a rank sees for each exchange, over all passes. With it
            `moments="microbatch"` are right on average; without it batches count as large, and
            moments leave out the square of the mean gradient over the number of samples.
        hierarchical: reduce inside each host as dense tensors, and exchange compressed between
            hosts; to the compressor a host is one rank, with the samples of all its ranks. All
            hosts have the same number of ranks. If that is more than one, this needs
            `hvd.init(process_sets="dynamic")`. Keras's own saving then leaves out the compressor's
            state; `hvd.save_checkpoint` does not.
        nonfinite: handling of a step in which a gradient of any rank has a NaN or an infinity.
            All ranks do the same. "raise": an error. "skip": the update is left out, here and in
            the compressor's state, and the step is counted in `compression_stats(...).skipped`.
            "propagate": as "skip", but the NaN is applied. None: "skip" with loss scaling, else
            "raise".
        verify_every: run `verify` on the optimizer every so many exchanges, after the update; 0
            for never. In a graph, as in `fit`, the error is TensorFlow's, with the same message in
            it; `callbacks.VerifyCallback` raises it as it is.
        rollback: keep the compressor's state before the last exchange until the next one, for
            `optimizer.discard_step()`, which is `hvd.discard_step(optimizer)`. Exchange and update
            are one call here, so the caller has to restore the weights. It takes as much memory as
            the compressor's state.
        horovod_only: `num_groups` and `groups` are refused: layers are exchanged in buckets;
            `device_dense` and `device_sparse` change nothing.

    Raises:
        ValueError: Horovod is not initialised; groups or Adasum are asked for; the optimizer
            accumulates gradients by itself; `moments` needs something that is not set up; hosts or
            Horovod are not as `hierarchical` needs them; the optimizer exchanges by itself; in
            `apply`, a tape has exchanged the gradients.
        TypeError: `compression` is no compressor, or `optimizer` no Keras 3 optimizer.
        MismatchError: at the first step, on all ranks, if they do not train the same model.
        DivergedError: in `apply`, on all ranks, with `verify_every`.
    """
    options = ExchangeOptions(
        sparse_as_dense,
        gradient_predivide_factor,
        op,
        backward_passes_per_step,
        average_aggregated_gradients,
        process_set,
        scale_local_gradients,
        batch_size,
        hierarchical,
        nonfinite,
        verify_every,
        rollback,
    )
    validate.count("verify_every", verify_every)
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(
            f"expected a Keras 3 optimizer, got {type(optimizer).__name__}; for other optimizers "
            "use hvd.DistributedGradientTape"
        )
    compressor = options.resolve_compressor(compression, "DistributedOptimizer", horovod_only)
    if backward_passes_per_step < 1:
        raise ValueError(
            f"backward_passes_per_step must be at least 1, got {backward_passes_per_step}"
        )
    if (exchanging := exchanges_in(optimizer)) not in ("", DistributedOptimizerMixin.host):
        raise ValueError(
            f"{exchanging} exchanges already, or is meant to: give hvd.DistributedOptimizer the "
            "plain optimizer"
        )
    inner = _inner_of(optimizer)
    if getattr(inner, "gradient_accumulation_steps", None):
        raise ValueError(
            "gradient_accumulation_steps of the Keras optimizer would exchange every pass; use "
            "backward_passes_per_step= of hvd.DistributedOptimizer instead"
        )
    if getattr(compressor, "moments", "") == "microbatch" and backward_passes_per_step < 2:
        raise ValueError(
            "moments='microbatch' needs backward_passes_per_step of at least 2, got "
            f"{backward_passes_per_step}"
        )
    config = _plain_config(optimizer)
    if name is not None:
        config["name"] = name
    momentum, taken = None, {}
    if isinstance(inner, keras.optimizers.SGD):
        plain = config["inner_optimizer"]["config"] if inner is not optimizer else config
        momentum = (float(plain["momentum"]), bool(plain["nesterov"]))
    base = _base_of(optimizer)
    written = serialization.written(compressor, options, base)
    compressor, gives_up = take_over(compressor, type(inner).__name__, momentum)
    if gives_up and momentum is not None:
        taken = {"momentum": momentum[0], "nesterov": momentum[1]}
        config = serialization.with_changes(config, {"momentum": 0.0, "nesterov": False})
        LOGGER.info("%s are taken over from %s by the compressor", taken, type(inner).__name__)
    distributed = _made(base, config)
    distributed._configure(compressor, options, written, taken)
    distributed._continue(optimizer)
    return distributed


def PartialDistributedOptimizer(  # noqa: N802 - the name that users of Horovod know
    optimizer: keras.optimizers.Optimizer,
    name: str | None = None,
    *,
    local_layers: Any = None,
    **options: Any,
) -> keras.optimizers.Optimizer:
    """Wrap an optimizer like `DistributedOptimizer`, but leave some gradients to their rank.

    A drop-in for `horovod.keras.PartialDistributedOptimizer`. `save_checkpoint(mode="sharded")`
    saves each rank's own; pass the weights of these layers to `BroadcastGlobalVariablesCallback` as
    `local_variables=` if they should not start equal.

    Args:
        optimizer: as in `DistributedOptimizer`; not built yet.
        name: as there.
        local_layers: one layer of Keras, or several. They may be built later, before the optimizer.
        options: the other arguments of `DistributedOptimizer`; `scale_local_gradients`, the
            default, divides these layers' gradients by the number of ranks, as averaging does with
            those of other layers.

    Raises:
        ValueError: as there; or `local_layers` is something else.
    """
    layers = layers_in(local_layers)
    if layers and optimizer.built:
        raise ValueError("PartialDistributedOptimizer needs an optimizer that is not built yet")
    distributed = DistributedOptimizer(optimizer, name, **options)
    distributed._find_local.append(lambda: variables_of(layers))
    return distributed


class DistributedOptimizerMixin(_KerasOptimizer):
    """Optimizer mixin that exchanges gradients; it comes before the Keras class.

    Attributes:
        host: its name to users.
    """

    host = "hvd.DistributedOptimizer"
    _base: type  # the Keras class
    _gradcomp: GraphReducer | None = None  # that of the exchange
    _step_exchange: StepExchange | None = None  # once it is built; None where this rank has no part
    _outer_scaler: loss_scale.OuterScaler | None = None
    _moments: list[Any] | None = None  # left here by `track_moments`, for the next `apply`
    _known_local: frozenset[int] = frozenset()  # places of local variables, from a file
    _refusal: str = ""  # why it cannot train here, if it was read from a file
    _saved: tuple[int | None, bool] = (None, True)  # plain variables in the file; same exchange?
    _compressor: Compressor = NoneCompressor()
    _options = ExchangeOptions()

    @classmethod
    def around(
        cls,
        optimizer: keras.optimizers.Optimizer,
        compressor: Compressor,
        options: ExchangeOptions,
    ) -> Any:
        """Create one with the configuration of a plain optimizer, and its variables if built.

        For classes that are not saved by Keras.
        """
        made = super().from_config(optimizer.get_config())
        made._configure(compressor, options, written={}, taken={})
        made._continue(optimizer)
        return made

    def _begin(self, written: dict[str, Any], refusal: str = "") -> None:
        """Set the attributes that even an optimizer that cannot train has."""
        self._written = json.dumps(written)  # Keras would track a dict, and wrap it
        self._refusal = refusal
        self._taken: dict[str, Any] = {}  # settings taken over by the compressor
        self._find_local: list[Callable[[], list[Any]]] = []
        self._when_built: list[Callable[[], None]] = []

    def _configure(
        self,
        compressor: Compressor,
        options: ExchangeOptions,
        written: dict[str, Any],
        taken: dict[str, Any],
    ) -> None:
        """Set the attributes of an optimizer that can train.

        `written` is what `get_config` returns of the options, and `taken` has settings of the
        plain optimizer that the compressor has taken over.
        """
        self._begin(written)
        self._taken.update(taken)
        self._compressor, self._options, self._title = compressor, options, TITLES.take()

    def _continue(self, source: keras.optimizers.Optimizer) -> None:
        """Take the variables of the optimizer that this one is made from, and its exceptions."""
        plain, inner = _inner_of(source), _inner_of(self)
        for excluded in ("_exclude_from_weight_decay", "_exclude_from_weight_decay_pattern"):
            if hasattr(plain, excluded):  # not in the configuration
                setattr(inner, excluded, getattr(plain, excluded))
        if isinstance(source, DistributedOptimizerMixin):
            self._find_local.extend(source._find_local)
            self._known_local = source._known_local
        if source.built:
            self.build(source._trainable_variables)
            # The velocity of an optimizer that gave its momentum up stays behind.
            store = {str(place): variable for place, variable in enumerate(source.variables)}
            same = getattr(source, "_compressor", None) == self._compressor
            self._load(store, len(getattr(source, "_plain", store)), same)

    def register_local_var(self, var: Any) -> None:
        """Leave the gradient of a variable to its rank, as in Horovod.

        Raises:
            ValueError: the optimizer is built.
        """
        if self.built:
            raise ValueError("register local variables before the optimizer is built")
        self._find_local.append(lambda: [var])

    def when_built(self, ready: Callable[[], None]) -> None:
        """Call a function once the optimizer has its variables: now, or in the first step."""
        if self.built:
            ready()
        else:
            self._when_built.append(ready)

    @tf.autograph.experimental.do_not_convert
    def discard_step(self) -> None:
        """Roll the compressor's state back to before the last exchange; see `hvd.discard_step`.

        Raises:
            RuntimeError: it was made without `rollback=True`, or has exchanged nothing since.
        """
        if not self.built:
            raise RuntimeError("discard_step() leaves out a step: call it after apply()")
        if self._gradcomp is not None:
            self._gradcomp.rollback()

    @property
    def pass_of_step(self) -> Any:
        """Return the number of passes accumulated for the next exchange."""
        sums = None if self._step_exchange is None else self._step_exchange.sums
        return 0 if sums is None else sums.pass_of_step

    def get_config(self) -> dict[str, Any]:
        """Return the optimizer's own configuration, with the wrapper's arguments."""
        config = serialization.with_changes(super().get_config(), self._taken)
        written = json.loads(self._written)
        if self.built and not self._refusal:
            written |= {"plain": len(self._plain), "local": sorted(self._local)}
        elif self._find_local:
            written["local"] = None  # nobody knows yet
        return {**config, serialization.entry(config): written}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        """Create an optimizer from a configuration: one of `get_config`, or a plain optimizer's.

        If it cannot train, since Horovod is not initialised or a process set is missing, it does
        all but that, and `apply` says why.
        """
        del custom_objects  # Keras has them in a scope
        return _restored(config, cls._base)

    def build(self, variables: Sequence[Any]) -> None:
        """Create the optimizer's variables, and those of the exchange after them."""
        outer = loss_scale.scaler_around(self)
        if not variables:  # of a model that is not built, or that Keras reads from HDF5
            return
        if not self.built:
            with tf.init_scope():  # a model that is not built yet builds this while it is traced
                self._build(variables, scaled=outer is not None)
        if outer is not None and self._step_exchange is not None:
            self._reduce_before(outer, self._step_exchange)
        ready, self._when_built = list(self._when_built), []
        with tf.init_scope():
            for each in ready:
                each()

    @tf.autograph.experimental.do_not_convert
    def _build(self, variables: Sequence[Any], scaled: bool) -> None:
        require_one_replica(self._distribution_strategy)
        super().build(variables)
        self._plain = list(self.variables)
        self._local: frozenset[int] = frozenset()
        if self._refusal:
            return
        self._local = local_places(variables, self._find_local, self._known_local)
        options = self._options.with_policy(scaled or isinstance(self, LossScaleOptimizer))
        self._skips = options.nonfinite == "skip"
        if not takes_part(options.process_set):
            return
        exchange = StepExchange(
            variables,
            self._local,
            partial(places_of, self),
            self._compressor,
            options,
            self._title,
            self._settings,
            self._state_variable,
            self.host,
        )
        self._step_exchange, self._gradcomp = exchange, exchange.reducer
        # Checkpoints of TensorFlow know variables by the names of these attributes.
        self._owner, sums = exchange.owner, exchange.sums
        if sums is not None:
            self._pass, self._added, self._squared = sums.number, sums.added, sums.squared

    @property
    def _settings(self) -> str:
        """Describe what must be equal on all ranks, beside what an exchange compares."""
        passes, every = self._options.backward_passes_per_step, self._options.verify_every
        return f", backward_passes_per_step={passes}, verify_every={every}"

    def _reduce_before(self, outer: LossScaleOptimizer, exchange: StepExchange) -> None:
        """Reduce gradients before a loss scaler checks that this rank's are finite.

        Raises:
            ValueError: gradients are accumulated here, which the scaler does not know.
        """
        if self._options.backward_passes_per_step > 1:
            raise ValueError(
                "backward_passes_per_step > 1 needs the loss scaler inside: "
                "hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer), ...)"
            )
        if self._options.nonfinite is None:  # also where this was built by itself before
            self._skips = exchange.reducer.exchange.rolls_back_nonfinite = True
        self._outer_scaler = loss_scale.OuterScaler(
            outer, self._exchange, lambda: self._trainable_variables, exchange.verify
        )

    def _state_variable(self, name: str, value: tf.Tensor) -> tf.Variable:
        """Create one of the optimizer's own variables, so that saving the model saves it."""
        variable = self.add_variable(
            tuple(value.shape), initializer="zeros", dtype=value.dtype.name, name=name
        )
        variable.assign(value)
        return variable.value

    def load_own_variables(self, store: Any) -> None:
        """Load what `save_own_variables` saved, here or in an optimizer that is not distributed.

        What a compressor accumulated on another rank is not loaded; with `hierarchical=True` none
        of its state is, since ranks keep different things.
        """
        plain, same = self._saved
        self._load(store, plain or len(self._plain), same)

    def _load(self, store: Mapping[str, Any], plain: int, same: bool) -> None:
        """Load another optimizer's variables; see `serialization.load_variables`."""
        same = same and not self._options.hierarchical
        serialization.load_variables(store, self.variables, len(self._plain), plain, same)
        if self._step_exchange is not None:
            self._step_exchange.drop_of_others()

    def claim_state(self) -> None:
        """Mark the state as this process's, whose rank may have changed."""
        if self._step_exchange is not None:
            self._step_exchange.claim_state()

    @untranslated
    def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> None:
        """Exchange the gradients, then update the variables with the result."""
        variables = list(
            self._trainable_variables if trainable_variables is None else trainable_variables
        )
        if self._refusal:
            raise ValueError(f"this optimizer cannot train: {self._refusal}")
        if not tf.executing_eagerly():
            loss_scale.refuse_xla()
        if not self.built:
            self.build(variables)
        if len(grads) != len(variables):
            raise ValueError(
                f"{len(grads)} gradients were given for {len(variables)} variables: pass one for "
                "each, or None where there is none"
            )
        exchange, outer = self._step_exchange, self._outer_scaler
        if exchange is None or (outer is not None and outer.is_applying):
            super().apply(grads, trainable_variables)
            return
        scaler = isinstance(self, LossScaleOptimizer)
        # Keras's own division by either comes after the exchange.
        scale = self.dynamic_scale if scaler else self.loss_scale_factor
        if self._options.backward_passes_per_step == 1:
            self._update(self._exchange(grads, variables, scale), variables)
            exchange.verify()
        else:
            exchange.accumulate(grads, variables, self._take_moments(), scale, self._update)

    def _take_moments(self) -> list[Any] | None:
        """Return the moments of samples that were left here, once."""
        moments, self._moments = self._moments, None
        return moments

    @tf.autograph.experimental.do_not_convert
    def _exchange(self, grads: Sequence[Any], variables: list[Any], scale: Any) -> list[Any]:
        assert self._step_exchange is not None
        return self._step_exchange.reduce(grads, variables, self._take_moments(), scale)

    def _update(self, reduced: list[Any], variables: list[Any]) -> None:
        """Apply the result, unless the step is to be skipped and no loss scaler does that."""
        apply = super().apply
        if self._gradcomp is None or not self._skips or isinstance(self, LossScaleOptimizer):
            apply(reduced, variables)
        else:
            tf.cond(self._gradcomp.finite, lambda: apply(reduced, variables), lambda: None)

    @property
    def exchanged_variables(self) -> list[Any]:
        """Return the variables whose gradients are exchanged, in the order of the layers."""
        return [] if self._step_exchange is None else self._step_exchange.exchanged_variables


@keras.saving.register_keras_serializable("hvd_gradcomp", "DistributedOptimizer")
class _Saved:
    """Class that Keras finds under the registered name of all distributed optimizers."""

    @staticmethod
    def from_config(config: dict[str, Any], custom_objects: Any = None) -> Any:
        del custom_objects
        return _restored(config)

    def get_config(self) -> dict[str, Any]:
        raise NotImplementedError("each optimizer has its own; Keras asks for the method alone")


def load_model(
    filepath: Any,
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: dict[str, Any] | None = None,
    compression: Any = None,
    **options: Any,
) -> keras.Model:
    """Load a saved Keras model, with a `DistributedOptimizer` in place of its optimizer.

    The optimizer continues from its saved state, distributed or not. What a compressor accumulated
    is restored on the rank that saved it; other ranks start with nothing. With this package
    imported, `keras.models.load_model` does the same for a model that was saved distributed.

    Args:
        filepath: what `model.save` wrote.
        custom_optimizers: classes of optimizers that are not Keras's own.
        custom_objects: as in `keras.models.load_model`.
        compression: as in `DistributedOptimizer`; the saved one if None. With another one, the
            exchange starts anew.
        options: other arguments of `DistributedOptimizer`, in place of the saved ones.
            Horovod's `legacy_opts` belongs to Keras 2, and is refused.

    Raises:
        ValueError: the optimizer cannot train here; the message says why.
    """
    if options.pop("legacy_opts", False):
        raise ValueError("legacy_opts= belongs to Keras 2; hvd_gradcomp needs Keras 3")
    if compression is not None:
        options["compression"] = compression
    objects = {cls.__name__: cls for cls in custom_optimizers or ()}
    objects.update(custom_objects or {})
    with serialization.overriding(options):
        model = keras.models.load_model(filepath, custom_objects=objects)
    if model.optimizer is None:
        return model
    optimizer = distributed_in(model.optimizer)
    if not isinstance(optimizer, DistributedOptimizerMixin):  # it was saved undistributed
        compiled = keras.saving.deserialize_keras_object(model.get_compile_config())
        compiled["optimizer"] = DistributedOptimizer(model.optimizer, **options)
        model.compile(**compiled)
    elif optimizer._refusal:
        raise ValueError(f"load_model: the optimizer cannot train: {optimizer._refusal}")
    return model


def refusal(optimizer: keras.optimizers.Optimizer) -> str:
    """Return why training with this optimizer would not exchange gradients; "" if it would."""
    distributed = distributed_in(optimizer)
    if not isinstance(distributed, DistributedOptimizerMixin):
        return f"{type(distributed).__name__} is not distributed"
    return distributed._refusal


# -- classes, configurations and back -------------------------------------------------------------


@functools.cache
def _class_of(base: type) -> Any:
    """Return the registered class of distributed optimizers for a Keras class."""
    register = keras.saving.register_keras_serializable("hvd_gradcomp", "DistributedOptimizer")
    made = type(
        base.__name__,
        (DistributedOptimizerMixin, base),
        {"__module__": base.__module__, "_base": base},
    )
    register(made)
    register(_Saved)  # the last one is found by the name
    return made


def _base_of(optimizer: keras.optimizers.Optimizer) -> type:
    return getattr(optimizer, "_base", type(optimizer))


def _inner_of(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """Return the optimizer inside a loss scaler, or the optimizer itself."""
    return optimizer.inner_optimizer if isinstance(optimizer, LossScaleOptimizer) else optimizer


def _made(base: type, config: dict[str, Any]) -> Any:
    cls = _class_of(base)
    return super(DistributedOptimizerMixin, cls).from_config(dict(config))


def _plain_config(optimizer: keras.optimizers.Optimizer) -> dict[str, Any]:
    """Return the configuration of an optimizer, or of the one that a distributed one was made from.

    Raises:
        ValueError: it is a loss scaler around a distributed one.
    """
    if isinstance(getattr(optimizer, "inner_optimizer", None), DistributedOptimizerMixin):
        raise ValueError(
            "this LossScaleOptimizer wraps an optimizer that is distributed already: compile the "
            "model with it as it is, or pass its inner_optimizer to hvd.DistributedOptimizer"
        )
    return serialization.split_entry(optimizer.get_config())[0]


def _restored(config: dict[str, Any], base: Any = None) -> Any:
    """Restore a distributed optimizer; see `DistributedOptimizerMixin.from_config`."""
    config, written = serialization.split_entry(config)
    base = base or serialization.named(written.get("optimizer", ""))
    try:
        options = serialization.read(written)
        made = DistributedOptimizer(base.from_config(dict(config)), **options)
    except ValueError as error:
        made = _made(base, config)
        made._begin(written, refusal=str(error))
        return made
    here = json.loads(made._written)
    same = all(here[key] == written.get(key) for key in ("compression", "hierarchical"))
    made._saved = (written.get("plain"), same)
    made._known_local = frozenset(written.get("local", ()))
    return made
