"""`MomentumExchange` for Keras 3: Adam whose momentum is exchanged compressed, not its gradients.

1-bit Adam (Tang et al. 2021) with any compressor; see `hvd_gradcomp.torch.local.momentum_exchange`
for the method. Here it is a distributed optimizer with the compressor `after(warmup_steps, None,
compression)`. What goes into the exchange is the gradient in the first phase, and afterwards the
momentum with this rank's gradient in it. The first phase keeps nothing back, so nothing in units of
gradients reaches the second. Both sides of the exchange tell the phase by the count of exchanges,
as the compressor does.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import horovod.tensorflow as horovod
import keras
import tensorflow as tf

from hvd_gradcomp.algorithms.combined.wrappers import after
from hvd_gradcomp.core import validate
from hvd_gradcomp.method.compressor import Compressor
from hvd_gradcomp.method.handover import correction_of
from hvd_gradcomp.planning.assignment import Partition
from hvd_gradcomp.tensorflow.comm.horovod import takes_part
from hvd_gradcomp.tensorflow.keras.local_variables import places_of
from hvd_gradcomp.tensorflow.keras.optimizer import DistributedOptimizerMixin
from hvd_gradcomp.tensorflow.reduce.options import ExchangeOptions
from hvd_gradcomp.tensorflow.reduce.registry import exchanges_in, reducer_of

_CLIPS = ("clipnorm", "clipvalue", "global_clipnorm")


def MomentumExchange(  # noqa: N802 - beside DistributedOptimizer
    optimizer: keras.optimizers.Optimizer,
    compression: Any = None,
    warmup_steps: int = 100,
    *,
    process_set: Any = horovod.global_process_set,
    hierarchical: bool = False,
    nonfinite: str | None = None,
) -> keras.optimizers.Optimizer:
    """Wrap Adam or AdamW so that its momentum is exchanged compressed, instead of gradients.

    The way of 1-bit Adam (Tang et al. 2021) with any compressor that keeps what it does not send:
    in the first steps gradients are averaged dense, and Adam is plain. Then its second moment is
    fixed, each rank adds its gradient to the common momentum, and the mean over ranks of what the
    compressor sends of it is the new momentum. ::

        optimizer = hvd.MomentumExchange(keras.optimizers.AdamW(1e-3), hvd.OneBitCompressor(), 500)
        model.compile(optimizer, loss)

    Works as `DistributedOptimizer` does: with `fit`, in loops with a plain tape, and inside a
    `keras.optimizers.LossScaleOptimizer`. `hvd.save_checkpoint` saves and resumes it; a `.keras`
    file does not. Gradients are this rank's own until the exchange: clip them before `apply`, by
    value or by each rank's own norm. Those of embeddings are exchanged dense. An element whose
    gradient was 0 on all ranks in all of the first steps has no second moment, and stays as it is.

    Default: `warmup_steps=100`, which was not measured: docs/papers.md has trainings with 240 dense
    steps of 1,200, a fifth.

    Args:
        optimizer: a plain `keras.optimizers.Adam` or `AdamW`, without amsgrad and clipping. It is
            not modified. If it was built, the result goes on from its state, and the first steps
            are counted from here.
        compression: of the momenta, best one with error feedback; without momentum correction.
        warmup_steps: first exchanges, dense; at least 1. Its authors take 15 to 20 % of a training.
        process_set, hierarchical: as in `DistributedOptimizer`.
        nonfinite: if a gradient of some rank is not finite: "raise", or "skip" on all ranks. None:
            "skip" with loss scaling, else "raise".

    Raises:
        ValueError: Horovod is not initialised; this rank is not in the process set; a setting is
            out of range; the optimizer has amsgrad, clips, accumulates or is distributed; the
            compressor corrects momentum itself, or needs moments of samples.
        TypeError: the optimizer is another one, or `compression` no compressor.
        MismatchError: at the first step, on all ranks, if they do not train the same.
    """
    validate.skip_or_raise(nonfinite, "a momentum that is not finite stays so")
    options = ExchangeOptions(
        sparse_as_dense=True,
        process_set=process_set,
        hierarchical=hierarchical,
        nonfinite=nonfinite,
    )
    compressor = options.resolve_compressor(compression, "MomentumExchange")
    validate.count("warmup_steps", warmup_steps, low=1)
    if not takes_part(process_set):
        raise ValueError(
            "this rank is not in process_set=: make MomentumExchange on its ranks alone, and keep "
            "the plain optimizer on the others"
        )
    _require_adam(optimizer)
    _require_plain(compressor)
    base: type = type(optimizer)
    made = _class_of(base).around(optimizer, _phased(compressor, warmup_steps), options)
    made.warmup_steps = warmup_steps
    return made


class MomentumExchangeMixin(DistributedOptimizerMixin):
    """Adam mixin that exchanges momenta; it comes before the Keras class.

    Attributes:
        warmup_steps: first exchanges, of gradients.
    """

    host = "hvd.MomentumExchange"
    warmup_steps = 0

    def get_config(self) -> dict[str, Any]:
        raise ValueError(
            "an optimizer of hvd.MomentumExchange has no configuration for Keras, so it is neither "
            "saved with a model nor wrapped again: save with hvd.save_checkpoint or "
            "model.save_weights, and wrap a plain Adam"
        )

    def register_local_var(self, var: Any) -> None:
        raise ValueError(
            "hvd.MomentumExchange exchanges the momenta of all variables: leave some to their rank "
            "with hvd.PartialDistributedOptimizer"
        )

    @property
    def _settings(self) -> str:
        rule = f"{self._base.__name__}, beta_1={self.beta_1}, beta_2={self.beta_2}"
        return f"{super()._settings}, momenta of {rule}"

    @tf.autograph.experimental.do_not_convert
    def _exchange(self, grads: Sequence[Any], variables: list[Any], scale: Any) -> list[Any]:
        """Exchange gradients in the first steps, and momenta after them."""
        self._moments = None  # those of gradients
        warm = reducer_of(self).steps < self.warmup_steps
        kept = tf.where(warm, tf.constant(0.0, tf.float64), self.beta_1)
        factor = 1.0 if scale is None else tf.cast(scale, tf.float64)
        values = list(grads)
        for i, place in enumerate(places_of(self, variables)):
            if grads[i] is not None:
                momentum = self._momentums[place].value
                gradient = tf.cast(tf.convert_to_tensor(grads[i]), momentum.dtype)
                before = tf.cast(kept * factor, momentum.dtype) * momentum
                values[i] = before + tf.cast(1.0 - kept, momentum.dtype) * gradient
        return super()._exchange(values, variables, scale)

    @tf.autograph.experimental.do_not_convert
    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Update a variable by what was exchanged, which is a momentum after the first steps."""
        adam, later = super().update_step, reducer_of(self).steps - self.warmup_steps
        tf.cond(
            later <= 0,
            lambda: adam(gradient, variable, learning_rate),
            lambda: self._update_by_momentum(gradient, variable, learning_rate, later),
        )

    def _update_by_momentum(self, momentum: Any, variable: Any, rate: Any, later: Any) -> None:
        """Update a variable as Adam does, with a new momentum and the fixed second moment.

        Args:
            momentum: the mean over ranks.
            variable: the variable.
            rate: the learning rate.
            later: steps since the second moment was fixed.
        """
        place = self._get_variable_index(variable)
        step = tf.cast(self.iterations.value + 1, tf.float32)
        fixed = step - tf.cast(later, tf.float32)  # steps that the second moment has seen
        alpha = tf.cast(rate, tf.float32) * tf.sqrt(1.0 - tf.pow(float(self.beta_2), fixed))
        alpha = tf.cast(alpha / (1.0 - tf.pow(float(self.beta_1), step)), variable.dtype)
        momentum = tf.cast(momentum, variable.dtype)
        self.assign(self._momentums[place], momentum)
        second = self._velocities[place].value
        update = alpha * momentum / (tf.sqrt(second) + self.epsilon)
        # Without a second moment what a quantizer adds would be divided by epsilon.
        self.assign_sub(variable, tf.where(second > 0, update, tf.zeros_like(update)))


@functools.cache
def _class_of(base: type) -> Any:
    """Return the class of optimizers that exchange momenta for a Keras class."""
    names = {"__module__": base.__module__, "_base": base}
    return type(base.__name__, (MomentumExchangeMixin, base), names)


def _phased(compressor: Compressor, warmup_steps: int) -> Compressor:
    """Return the compressor with dense first steps."""
    if isinstance(compressor, Partition):
        rules = ((rule, after(warmup_steps, None, part)) for rule, part in compressor.rules)
        return replace(compressor, rules=tuple(rules))
    return after(warmup_steps, None, compressor)


def _require_adam(optimizer: keras.optimizers.Optimizer) -> None:
    """Check that an optimizer is Adam or AdamW, with options that a fixed variance allows.

    Raises:
        TypeError: it is another one.
        ValueError: it is distributed, keeps the largest variance, or changes what was exchanged.
    """
    if exchanging := exchanges_in(optimizer):
        raise ValueError(
            "MomentumExchange takes a plain Adam or AdamW, and this one is distributed: "
            f"{exchanging} exchanges gradients. Pass the optimizer that it was made from"
        )
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise TypeError(
            "MomentumExchange takes the optimizer inside: "
            "keras.optimizers.LossScaleOptimizer(hvd.MomentumExchange(adam))"
        )
    if not isinstance(optimizer, keras.optimizers.Adam):
        raise TypeError(
            "MomentumExchange takes keras.optimizers.Adam or AdamW, got "
            f"{type(optimizer).__name__}: with SGD give DistributedOptimizer a compressor that "
            "corrects momentum, such as DGCCompressor()"
        )
    if optimizer.amsgrad:
        raise ValueError("MomentumExchange does not take Adam with amsgrad=True")
    for name in _CLIPS:
        if getattr(optimizer, name):
            raise ValueError(
                f"MomentumExchange does not take {name}=, with which Keras would clip the mean "
                "momentum: clip each rank's own gradients before apply, as in train_step"
            )
    if optimizer.gradient_accumulation_steps:
        raise ValueError(
            "MomentumExchange does not take gradient_accumulation_steps=: add gradients up before "
            "apply, as in train_step"
        )


def _require_plain(compressor: Compressor) -> None:
    """Check that a compressor takes momenta.

    Raises:
        ValueError: it corrects a momentum itself, or uses moments of samples.
    """
    if (correction_of(compressor) or (0,))[0] != 0:
        raise ValueError(
            "the compressor corrects a momentum of its own, and a momentum is what travels: pass "
            f"momentum=0. It is {compressor}"
        )
    if compressor.uses_moments and getattr(compressor, "moments", "") in ("sample", "microbatch"):
        raise ValueError(
            "moments of samples or micro-batches are those of gradients, and what is exchanged is "
            f"a momentum: pass moments='step'. It is {compressor}"
        )
