"""`DistributedOptimizer` for Keras 3.

Stock Horovod 0.28.1 overrides methods that Keras 3 no longer calls: it trains without an error and
without reducing. Here the wrapped class overrides `apply`, through which every update goes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as horovod
import keras
import tensorflow as tf
from keras.optimizers import LossScaleOptimizer

from hvd_gradcomp import validate
from hvd_gradcomp.aggregator import Compressor
from hvd_gradcomp.tensorflow import digests
from hvd_gradcomp.tensorflow.engine import (
    LOGGER,
    TITLES,
    Engine,
    check,
    keep_local,
    takes_part,
)
from hvd_gradcomp.tensorflow.tape import named_layers
from hvd_gradcomp.wrappers import take_over


def DistributedOptimizer(  # noqa: N802 - the name that users of Horovod know
    optimizer: keras.optimizers.Optimizer,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = None,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Any = horovod.Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = horovod.global_process_set,
    scale_local_gradients: bool = True,
    *,
    batch_size: int | None = None,
    hierarchical: bool = False,
    nonfinite: str | None = None,
    verify_every: int = 0,
) -> keras.optimizers.Optimizer:
    """Wraps a Keras optimizer so that gradients are exchanged compressed before each update.

    Works with `model.fit`, in graph mode and eagerly, and in custom loops through `apply` or
    `apply_gradients`. Do not combine it with `DistributedGradientTape`: that would reduce twice.

    Mixed precision: wrap a `keras.optimizers.LossScaleOptimizer`, or let Keras wrap this one, as
    `compile` does under the policy "mixed_float16". Gradients are exchanged, and kept from step to
    step, without the scale.

    Args:
        optimizer: a Keras 3 optimizer. It is not touched: the result is a new one with the same
            configuration, and the same variables if it was built.
        name: of the new optimizer; the old one's if None.
        device_dense, device_sparse, scale_local_gradients: accepted for compatibility, unused.
        compression: a compressor of this package, or Horovod's `Compression.none` or `.fp16`.
        sparse_as_dense: compress `IndexedSlices` as dense tensors.
        gradient_predivide_factor: splits the averaging before and after the sum.
        op: `hvd.Average` or `hvd.Sum`.
        backward_passes_per_step: gradients are added up over this many calls of `apply`; the
            other calls change nothing.
        average_aggregated_gradients: divide that sum by `backward_passes_per_step`.
        num_groups, groups: refused.
        process_set: the ranks that take part.
        batch_size: samples that a rank sees for each exchange; sharpens `moments="microbatch"`.
        hierarchical: reduce inside each host as dense tensors, and exchange compressed between
            hosts; to the compressor a host is one rank, with the samples of all its own. All hosts
            have the same number of ranks. Needs `hvd.init(process_sets="dynamic")` where that is
            more than one. Keras's own saving leaves out what the compressor keeps then;
            `hvd.save_checkpoint` does not.
        nonfinite: what becomes of a step in which a gradient of any rank has a NaN or an infinity.
            All ranks do the same. "raise": an error. "skip": the update is left out, here and in
            what the compressor keeps, and the step is counted in `compression_stats(...).skipped`.
            "propagate": as "skip", but the NaN is applied. None: "skip" with loss scaling, else
            "raise".
        verify_every: after the update of every so many exchanges, `verify` the optimizer; 0 for
            never. In a graph, as in `fit`, the error is TensorFlow's, with the same message in it;
            `callbacks.VerifyCallback` raises it as it is.

    Raises:
        ValueError: Horovod is not initialised; groups or Adasum are asked for; the optimizer
            accumulates gradients by itself; `moments` asks for what is not set up; hosts or Horovod
            are not as `hierarchical` needs them.
        TypeError: `compression` is no compressor, or `optimizer` no Keras 3 optimizer.
        MismatchError: at the first step, on all ranks, if they do not train the same model.
        DivergedError: in `apply`, on all ranks, with `verify_every`.
    """
    validate.count("verify_every", verify_every)
    del device_dense, device_sparse, scale_local_gradients
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(
            f"expected a Keras 3 optimizer, got {type(optimizer).__name__}; for other optimizers "
            "use hvd.DistributedGradientTape"
        )
    compressor = check(
        "DistributedOptimizer", op, groups, num_groups, compression, process_set, hierarchical
    )
    validate.policy(nonfinite)
    if backward_passes_per_step < 1:
        raise ValueError(
            f"backward_passes_per_step must be at least 1, got {backward_passes_per_step}"
        )
    if getattr(optimizer, "gradient_accumulation_steps", None):
        raise ValueError(
            "gradient_accumulation_steps of the Keras optimizer would exchange every pass; use "
            "backward_passes_per_step= of hvd.DistributedOptimizer instead"
        )
    source = getattr(compressor, "moments", "")
    if source == "microbatch" and backward_passes_per_step < 2:
        raise ValueError(
            "moments='microbatch' needs backward_passes_per_step of at least 2, got "
            f"{backward_passes_per_step}"
        )
    base = type(optimizer)
    cls: Any = type(base.__name__, (_Reducing, base), {"__module__": base.__module__})
    config = optimizer.get_config()
    if name is not None:
        config["name"] = name
    inner = optimizer.inner_optimizer if isinstance(optimizer, LossScaleOptimizer) else optimizer
    own = None
    if isinstance(inner, keras.optimizers.SGD):
        own = (float(inner.momentum), bool(inner.nesterov))
    compressor, gives_up = take_over(compressor, type(inner).__name__, own)
    taken = {}
    if gives_up and own is not None:
        taken = {"momentum": own[0], "nesterov": own[1]}
        config = _with(config, {"momentum": 0.0, "nesterov": False})
        LOGGER.info("%s are taken over from %s by the compressor", taken, type(inner).__name__)
    distributed = cls.from_config(config)
    distributed._configure(
        compressor,
        taken=taken,
        passes=backward_passes_per_step,
        average_passes=average_aggregated_gradients,
        batch_size=batch_size,
        nonfinite=nonfinite,
        verify_every=verify_every,
        op=op,
        predivide=gradient_predivide_factor,
        process_set=process_set,
        sparse_as_dense=sparse_as_dense,
        hierarchical=hierarchical,
    )
    if optimizer.built:
        distributed.build(optimizer._trainable_variables)
        # The velocity of an optimizer that gave its momentum up stays behind.
        for mine, theirs in zip(distributed._plain, optimizer.variables):
            mine.assign(theirs)
    return distributed


class _Reducing:
    """What the class of a distributed optimizer has before its Keras class."""

    built: bool  # Keras's
    _gradcomp: Engine | None
    _moments: list[Any] | None

    def _configure(
        self,
        compressor: Compressor,
        *,
        taken: dict[str, Any],
        passes: int,
        average_passes: bool,
        batch_size: int | None,
        nonfinite: str | None,
        verify_every: int,
        **settings: Any,
    ) -> None:
        self._gradcomp = None
        self._nonfinite = nonfinite
        self._reduced_outside = False  # by the loss scaler that is wrapped around this optimizer
        self._moment_source = ""
        self._taken = taken  # of its configuration, by the compressor
        self._moments = None  # left here by `track_moments`, for the `apply` that follows
        self._compressor = compressor
        self._passes, self._average_passes, self._batch_size = passes, average_passes, batch_size
        self._verify_every = verify_every
        self._settings = {**settings, "name": TITLES.take()}

    @property
    def pass_of_step(self) -> Any:
        """How many passes of the next exchange are accumulated."""
        return self._pass % self._passes if self._passes > 1 else 0

    def get_config(self) -> dict[str, Any]:
        """The optimizer's own configuration, with what the compressor has taken over."""
        return _with(super().get_config(), self._taken)  # type: ignore[misc]

    def build(self, variables: Sequence[Any]) -> None:
        """Makes the optimizer's variables, and those of the exchange after them."""
        outer = _scaler_around(self)
        if not self.built:
            self._build(variables, scaled=outer is not None)
        if outer is not None and self._gradcomp is not None:
            self._reduce_before(outer)

    def _build(self, variables: Sequence[Any], scaled: bool) -> None:
        super().build(variables)  # type: ignore[misc]
        self._plain = list(self.variables)  # type: ignore[attr-defined]
        scaled = scaled or isinstance(self, LossScaleOptimizer)
        self._skips = (self._nonfinite or ("skip" if scaled else "raise")) == "skip"
        if not takes_part(self._settings["process_set"]):
            return
        rank = tf.constant(horovod.rank(), tf.int64)
        self._owner = keep_local(self._state_variable("gradcomp_rank", rank))
        self._gradcomp = Engine(
            named_layers(variables),
            self._compressor,
            make_variable=self._state_variable,
            nonfinite="skip" if self._skips else self._nonfinite or "raise",
            settings=f", backward_passes_per_step={self._passes}, "
            f"verify_every={self._verify_every}",
            **self._settings,
        )
        if self._passes > 1:
            self._pass = self._state_variable("gradcomp_pass", tf.constant(0, tf.int64))
            zeros = [tf.zeros(v.shape) for v in variables]
            self._added, self._squared = (
                [keep_local(self._state_variable(f"gradcomp_{name}", z)) for z in zeros]
                for name in ("added", "squared")
            )

    def _reduce_before(self, outer: Any) -> None:
        """Has gradients reduced before a loss scaler looks whether this rank's are finite.

        It would leave the step out on some ranks only, while the others wait for them.

        Raises:
            ValueError: gradients are accumulated here, which the scaler does not know.
        """
        if self._passes > 1:
            raise ValueError(
                "backward_passes_per_step > 1 needs the loss scaler inside: "
                "hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer), ...)"
            )
        if self._nonfinite is None:  # also where this optimizer was built by itself before
            self._skips = self._gradcomp.undoes = True  # type: ignore[union-attr]

        def apply(grads: Sequence[Any], trainable_variables: Any = None) -> None:
            variables = self._those(trainable_variables)
            reduced = self._exchange(grads, variables, outer.dynamic_scale)
            self._reduced_outside = True
            try:
                type(outer)._tf_apply(outer, reduced, variables)
            finally:
                self._reduced_outside = False
            self._verify()

        # `apply` builds the scaler, and so this optimizer, before it calls this.
        outer._tf_apply = apply

    def _those(self, variables: Any) -> list[Any]:
        if variables is None:
            variables = self._trainable_variables  # type: ignore[attr-defined]
        return list(variables)

    def _state_variable(self, name: str, value: tf.Tensor) -> tf.Variable:
        """One of the optimizer's own variables, so that saving the model saves it."""
        variable = self.add_variable(  # type: ignore[attr-defined]
            tuple(value.shape), initializer="zeros", dtype=value.dtype.name, name=name
        )
        variable.assign(value)
        return variable.value

    def load_own_variables(self, store: Any) -> None:
        """Takes what `save_own_variables` saved here, or in an optimizer that is not distributed.

        What a compressor accumulated on another rank is not taken; and with `hierarchical=True`
        nothing that it keeps, since ranks keep different things.
        """
        if len(store.keys()) == len(self._plain) or self._settings["hierarchical"]:
            for place, variable in enumerate(self._plain):
                variable.assign(store[str(place)])
            return
        super().load_own_variables(store)  # type: ignore[misc]
        if self._gradcomp is None or int(self._owner) == horovod.rank():
            return
        self.own()
        self._gradcomp.forget()
        self.forget()

    def own(self) -> None:
        """What is kept here belongs to this process's rank, which may be another than before."""
        if self._gradcomp is not None:
            self._owner.assign(horovod.rank())

    def forget(self) -> None:
        """Drops what was added up for the next exchange."""
        if self._gradcomp is not None and self._passes > 1:
            for total in (*self._added, *self._squared):
                total.assign(tf.zeros_like(total))

    def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> None:
        """Exchanges the gradients, then updates the variables with the result."""
        variables = self._those(trainable_variables)
        if not tf.executing_eagerly():
            _refuse_xla()
        if not self.built:
            with tf.init_scope():
                self.build(variables)
        if self._gradcomp is None or self._reduced_outside:
            super().apply(grads, trainable_variables)  # type: ignore[misc]
            return
        scale = self.dynamic_scale if isinstance(self, LossScaleOptimizer) else None
        if self._passes == 1:
            self._update(self._exchange(grads, variables, scale), variables)
            self._verify()
            return
        full, moments = self._placed(grads, variables)
        self._accumulate(full, moments)

        def update() -> None:
            present = [g is not None for g in full]
            added = [a.value() if held else None for a, held in zip(self._added, present)]
            sums = self._pass_moments(moments is not None)
            reduced = self._gradcomp.reduce(added, sums, scale)  # type: ignore[union-attr]
            self._update([reduced[i] for i in self._order(variables)], variables)
            for total in (*self._added, *self._squared):
                total.assign(tf.zeros_like(total))
            self._verify()

        tf.cond(self.pass_of_step == 0, update, lambda: None)

    def _exchange(self, grads: Sequence[Any], variables: list[Any], scale: Any) -> list[Any]:
        full, moments = self._placed(grads, variables)
        reduced = self._gradcomp.reduce(full, moments, scale)  # type: ignore[union-attr]
        return [reduced[i] for i in self._order(variables)]

    def _update(self, reduced: list[Any], variables: list[Any]) -> None:
        """Applies the result, unless the step is to be left out and no loss scaler does so."""

        def update() -> None:
            super(_Reducing, self).apply(reduced, variables)  # type: ignore[misc]

        if self._skips and not isinstance(self, LossScaleOptimizer):
            tf.cond(self._gradcomp.finite, update, lambda: None)  # type: ignore[union-attr]
        else:
            update()

    def _order(self, variables: list[Any]) -> list[int]:
        """The places of some variables among all."""
        known = {self._var_key(v): i for i, v in enumerate(self._trainable_variables)}  # type: ignore[attr-defined]
        unknown = [v.path for v in variables if self._var_key(v) not in known]  # type: ignore[attr-defined]
        if unknown:
            raise ValueError(
                f"{', '.join(unknown)} did not train when this optimizer was built: compile the "
                "model with a new DistributedOptimizer, or build it while all that will be trained "
                "is trainable"
            )
        return [known[self._var_key(v)] for v in variables]  # type: ignore[attr-defined]

    def _placed(
        self, grads: Sequence[Any], variables: list[Any]
    ) -> tuple[list[Any], list[Any] | None]:
        """Gradients, and the moments that were left here, in the places of all variables."""
        moments, self._moments = self._moments, None
        if self._settle_moments(moments) != "sample":
            moments = None
        full: list[Any] = [None] * len(self._trainable_variables)  # type: ignore[attr-defined]
        full_moments = list(full)
        order = self._order(variables)
        for place, gradient in zip(order, grads):
            full[place] = gradient
        for place, moment in zip(order, moments or []):
            full_moments[place] = moment
        return full, full_moments if moments else None

    def _verify(self) -> None:
        if self._verify_every and self._gradcomp is not None:
            engine, sources = self._gradcomp, self._gradcomp_sources
            due = tf.equal(engine.steps % self._verify_every, 0)
            tf.cond(due, lambda: digests.check(engine, sources), lambda: None)

    @property
    def _gradcomp_sources(self) -> list[Any]:
        return self._trainable_variables  # type: ignore[attr-defined]

    def _accumulate(self, gradients: list[Any], moments: list[Any] | None) -> None:
        share = 1.0 / self._passes if self._average_passes else 1.0
        for place, gradient in enumerate(gradients):
            if gradient is None:
                continue
            part = tf.cast(tf.convert_to_tensor(gradient), tf.float32) * share
            self._added[place].assign_add(part)
            square = part * part if moments is None else moments[place] * (share * share)
            self._squared[place].assign_add(square)
        self._pass.assign_add(1)

    def _pass_moments(self, sampled: bool) -> list[Any] | None:
        if not self._compressor.uses_moments or self._moment_source == "step":
            return None
        if sampled:
            return [s.value() for s in self._squared]
        share = 1.0 / self._passes - (1.0 / self._batch_size if self._batch_size else 0.0)
        return [
            tf.maximum(s.value() - a.value() * a.value() * share, 0.0)
            for s, a in zip(self._squared, self._added)
        ]

    def _settle_moments(self, moments: list[Any] | None) -> str:
        """Where second moments come from, settled at the first trace; "" if they are not used."""
        if not self._compressor.uses_moments:
            return ""
        if self._moment_source:
            return self._moment_source
        source = getattr(self._compressor, "moments", "auto")
        if source == "sample" and moments is None:
            raise ValueError(
                "moments='sample' needs hvd.track_moments(model) before model.fit, from "
                "hvd_gradcomp.tensorflow.keras"
            )
        if source == "auto":
            source = "sample" if moments else "microbatch" if self._passes > 1 else "step"
            if source == "step" and self._settings["process_set"].rank() == 0:
                LOGGER.warning(
                    "the compressor takes each step as one sample (moments='step'): nothing better "
                    "is set up. hvd.track_moments(model) gives per-sample moments, "
                    "backward_passes_per_step > 1 those of micro-batches. It is %s",
                    self._compressor,
                )
        self._moment_source = str(source)
        return self._moment_source


def load_model(
    filepath: Any,
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: dict[str, Any] | None = None,
    compression: Any = None,
    **options: Any,
) -> keras.Model:
    """Loads a saved Keras model, with a `DistributedOptimizer` in place of its optimizer.

    The optimizer continues where it was saved, distributed or not. What a compressor accumulated
    is restored on the rank that saved it; elsewhere it begins from nothing.

    Args:
        filepath: what `model.save` wrote.
        custom_optimizers: classes of optimizers that are not Keras's own.
        custom_objects: as in `keras.models.load_model`.
        compression: as in `DistributedOptimizer`.
        options: the other arguments of `DistributedOptimizer`. Give what the saved one was given.
    """

    def distributed(base: type) -> type:
        def from_config(config: dict[str, Any], **more: Any) -> keras.optimizers.Optimizer:
            optimizer = base.from_config(config, **more)  # type: ignore[attr-defined]
            return DistributedOptimizer(optimizer, compression=compression, **options)

        return type(base.__name__, (base,), {"from_config": staticmethod(from_config)})

    known = [c for c in vars(keras.optimizers).values() if isinstance(c, type)]
    known = [c for c in known if issubclass(c, keras.optimizers.Optimizer)]
    objects = {c.__name__: distributed(c) for c in (*known, *(custom_optimizers or ()))}
    objects.update(custom_objects or {})
    model = keras.models.load_model(filepath, custom_objects=objects)
    if model.optimizer is not None and not isinstance(model.optimizer, _Reducing):
        # Saved undistributed: Keras takes no other class for one of its own.
        model.optimizer = DistributedOptimizer(model.optimizer, compression=compression, **options)
    return model


def _with(config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """A configuration with some changes, made to what a loss scaler is wrapped around."""
    if "inner_optimizer" not in config:
        return {**config, **changes}
    inner = config["inner_optimizer"]
    inner = {**inner, "config": _with(inner["config"], changes)}
    return {**config, "inner_optimizer": inner}


def _scaler_around(optimizer: Any) -> Any:
    """The loss scaler that is calling this optimizer; Keras leaves no other way to find it."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if (
            isinstance(owner, LossScaleOptimizer)
            and owner is not optimizer
            and owner.inner_optimizer is optimizer
        ):
            return owner
        frame = frame.f_back
    return None


def _refuse_xla() -> None:
    """Raises if the function being traced belongs to a model that compiles with XLA."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, keras.Model) and owner.jit_compile:
            raise ValueError(
                "Horovod's collectives are no XLA operations: call model.compile(..., "
                "jit_compile=False), or pass hvd.callbacks.BroadcastGlobalVariablesCallback to "
                "fit, which sees to it"
            )
        frame = frame.f_back
