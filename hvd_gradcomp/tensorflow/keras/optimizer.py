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

from hvd_gradcomp import validate
from hvd_gradcomp.aggregator import Compressor
from hvd_gradcomp.tensorflow import digests
from hvd_gradcomp.tensorflow.engine import (
    LOGGER,
    Engine,
    check,
    keep_local,
    next_name,
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
    verify_every: int = 0,
) -> keras.optimizers.Optimizer:
    """Wraps a Keras optimizer so that gradients are exchanged compressed before each update.

    Works with `model.fit`, in graph mode and eagerly, and in custom loops through `apply` or
    `apply_gradients`. Do not combine it with `DistributedGradientTape`: that would reduce twice.

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
        verify_every: after the update of every so many exchanges, `verify` the optimizer; 0 for
            never. In a graph, as in `fit`, the error is TensorFlow's, with the same message in it;
            `callbacks.VerifyCallback` raises it as it is.

    Raises:
        ValueError: Horovod is not initialised; groups or Adasum are asked for; the optimizer
            accumulates gradients by itself; `moments` asks for what is not set up.
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
    compressor = check("DistributedOptimizer", op, groups, num_groups, compression)
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
    own = None
    if isinstance(optimizer, keras.optimizers.SGD):
        own = (float(optimizer.momentum), bool(optimizer.nesterov))
    compressor, gives_up = take_over(compressor, type(optimizer).__name__, own)
    taken = {"momentum": config["momentum"], "nesterov": config["nesterov"]} if gives_up else {}
    if gives_up:
        config |= {"momentum": 0.0, "nesterov": False}
        LOGGER.info("%s are taken over from %s by the compressor", taken, type(optimizer).__name__)
    distributed = cls.from_config(config)
    distributed._configure(
        compressor,
        taken=taken,
        passes=backward_passes_per_step,
        average_passes=average_aggregated_gradients,
        batch_size=batch_size,
        verify_every=verify_every,
        op=op,
        predivide=gradient_predivide_factor,
        process_set=process_set,
        sparse_as_dense=sparse_as_dense,
    )
    if optimizer.built:
        distributed.build(optimizer._trainable_variables)
        # The velocity of an optimizer that gave its momentum up stays behind.
        count = distributed._plain_count
        for mine, theirs in zip(distributed.variables[:count], optimizer.variables):
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
        verify_every: int,
        **settings: Any,
    ) -> None:
        self._gradcomp = None
        self._moment_source = ""
        self._taken = taken  # of its configuration, by the compressor
        self._moments = None  # left here by `track_moments`, for the `apply` that follows
        self._compressor = compressor
        self._passes, self._average_passes, self._batch_size = passes, average_passes, batch_size
        self._verify_every = verify_every
        self._settings = {**settings, "name": next_name()}

    def get_config(self) -> dict[str, Any]:
        """The optimizer's own configuration, with what the compressor has taken over."""
        return {**super().get_config(), **self._taken}  # type: ignore[misc]

    def build(self, variables: Sequence[Any]) -> None:
        """Makes the optimizer's variables, and those of the exchange after them."""
        if self.built:
            return
        super().build(variables)  # type: ignore[misc]
        self._plain_count = len(self.variables)  # type: ignore[attr-defined]
        if not takes_part(self._settings["process_set"]):
            return
        rank = tf.constant(horovod.rank(), tf.int64)
        self._owner = keep_local(self._state_variable("gradcomp_rank", rank))
        self._gradcomp = Engine(
            named_layers(variables),
            self._compressor,
            make_variable=self._state_variable,
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

    def _state_variable(self, name: str, value: tf.Tensor) -> tf.Variable:
        """One of the optimizer's own variables, so that saving the model saves it."""
        variable = self.add_variable(  # type: ignore[attr-defined]
            tuple(value.shape), initializer="zeros", dtype=value.dtype.name, name=name
        )
        variable.assign(value)
        return variable.value

    def load_own_variables(self, store: Any) -> None:
        """Takes what `save_own_variables` saved here, or in an optimizer that is not distributed.

        What a compressor accumulated on another rank is not taken.
        """
        if len(store.keys()) == self._plain_count:
            for place, variable in enumerate(self.variables[: self._plain_count]):  # type: ignore[attr-defined]
                variable.assign(store[str(place)])
            return
        super().load_own_variables(store)  # type: ignore[misc]
        if self._gradcomp is None or int(self._owner) == horovod.rank():
            return
        self._owner.assign(horovod.rank())
        self._gradcomp.forget()
        if self._passes > 1:
            for total in (*self._added, *self._squared):
                total.assign(tf.zeros_like(total))

    def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> None:
        """Exchanges the gradients, then updates the variables with the result."""
        moments, self._moments = self._moments, None
        variables = trainable_variables
        if variables is None:
            variables = self._trainable_variables  # type: ignore[attr-defined]
        variables = list(variables)
        if not tf.executing_eagerly():
            _refuse_xla()
        if not self.built:
            with tf.init_scope():
                self.build(variables)
        if self._gradcomp is None:  # not in the process set
            super().apply(grads, trainable_variables)  # type: ignore[misc]
            return
        if self._settle_moments(moments) != "sample":
            moments = None
        known = {self._var_key(v): i for i, v in enumerate(self._trainable_variables)}  # type: ignore[attr-defined]
        full: list[Any] = [None] * len(known)
        full_moments: list[Any] = [None] * len(known)
        order = [known[self._var_key(v)] for v in variables]  # type: ignore[attr-defined]
        for place, gradient in zip(order, grads):
            full[place] = gradient
        for place, moment in zip(order, moments or []):
            full_moments[place] = moment
        if self._passes == 1:
            reduced = self._gradcomp.reduce(full, full_moments if moments else None)
            super().apply([reduced[i] for i in order], variables)  # type: ignore[misc]
            self._verify()
            return
        self._accumulate(full, full_moments if moments else None)

        def update() -> None:
            present = [g is not None for g in full]
            added = [a.value() if held else None for a, held in zip(self._added, present)]
            reduced = self._gradcomp.reduce(added, self._pass_moments(moments is not None))  # type: ignore[union-attr]
            super(_Reducing, self).apply([reduced[i] for i in order], variables)  # type: ignore[misc]
            for total in (*self._added, *self._squared):
                total.assign(tf.zeros_like(total))
            self._verify()

        tf.cond(self._pass % self._passes == 0, update, lambda: None)

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
                    "%r takes each step as one sample (moments='step'): nothing better is set "
                    "up. hvd.track_moments(model) gives per-sample moments, "
                    "backward_passes_per_step > 1 those of micro-batches.",
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
