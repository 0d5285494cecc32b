"""`LocalSteps`: ranks that step alone, and exchange the change of variables now and then.

See `algorithms.local_steps` for the method and its sources. The inner optimizer is the user's own,
of Keras or another; what it has changed goes through a `GraphReducer` as a gradient would. The
outer optimizer is its formula, in variables that a checkpoint keeps.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

import horovod.tensorflow as horovod
import tensorflow as tf
from horovod import __version__ as horovod_version

from hvd_gradcomp.algorithms.dense import NoneCompressor
from hvd_gradcomp.algorithms.local_steps import DILOCO, LocalSchedule, OuterSGD, cut
from hvd_gradcomp.algorithms.wrappers import take_over
from hvd_gradcomp.core.compressor import Compressor
from hvd_gradcomp.core.layers import Layer, Weight
from hvd_gradcomp.ops import NonFiniteGradientError
from hvd_gradcomp.runtime import config_check
from hvd_gradcomp.runtime.exchange_state import ExchangeState, States, diverged, out_of_step
from hvd_gradcomp.runtime.unique_names import UniqueNames
from hvd_gradcomp.tensorflow import checksums, comm
from hvd_gradcomp.tensorflow.layers import named_layers
from hvd_gradcomp.tensorflow.options import ExchangeOptions
from hvd_gradcomp.tensorflow.reducer import LOGGER, GraphReducer
from hvd_gradcomp.tensorflow.variables import keep_apart, new_variable, plain_variable

if TYPE_CHECKING:
    from keras.optimizers import Optimizer

_NARROW = ("float16", "bfloat16")  # dtypes whose global variables are float32
_NOTHING, _MEANS, _NOT_FINITE = range(3)  # what is on its way, of a fragment
_titles: dict[int, UniqueNames] = {}  # by process set, whose ranks alone draw names


@dataclass(frozen=True, eq=False)
class Fragment:
    """Variables that are exchanged together.

    Attributes:
        sources: the model's, of TensorFlow or Keras.
        reducer: of their pseudogradients.
        copies: the global variables, in float32 if the model's are narrower.
        velocities: of the outer optimizer; none without momentum.
        means: reduced pseudogradients that are yet to be applied; none without a delay.
    """

    sources: list[Any]
    reducer: GraphReducer
    copies: list[tf.Variable]
    velocities: list[tf.Variable]
    means: list[tf.Variable]

    def values(self) -> list[tf.Tensor]:
        """Return this rank's variables, in the precision of the global ones."""
        return [
            tf.cast(plain_variable(v).read_value(), c.dtype)
            for v, c in zip(self.sources, self.copies)
        ]

    def pseudogradients(self) -> list[Any]:
        """Return the global variables minus those of this rank; None where nothing trains.

        In the model's precision, with which the ranks began: what only the copies can express is
        not taken back.
        """
        return [
            tf.cast(tf.cast(c, v.dtype), c.dtype) - value if v.trainable else None
            for v, c, value in zip(self.sources, self.copies, self.values())
        ]

    def take_copies(self) -> None:
        """Set the global variables to those of this rank."""
        for c, value in zip(self.copies, self.values()):
            c.assign(value)

    def hand_out(self, blend: float) -> None:
        """Set this rank's variables to the global ones, blended with its own."""
        for v, c, value in zip(self.sources, self.copies, self.values()):
            mixed = blend * value + (1.0 - blend) * c if blend else c
            v.assign(tf.cast(mixed, plain_variable(v).dtype))

    def is_handed_out(self) -> bool:
        """Return True if this rank's variables are the global ones, in their own precision."""
        pairs = zip(self.sources, self.copies)
        return all(bool(tf.reduce_all(tf.cast(c, v.dtype) == plain_variable(v))) for v, c in pairs)

    def step(self, means: Sequence[Any], outer: OuterSGD, rate: tf.Tensor) -> None:
        """Step the outer optimizer by reduced pseudogradients; None stays where it is."""
        for place, (v, c, mean) in enumerate(zip(self.sources, self.copies, means)):
            if mean is None or not v.trainable:
                continue
            change = mean
            if self.velocities:
                velocity = self.velocities[place]
                velocity.assign(outer.momentum * velocity + mean)
                change = mean + outer.momentum * velocity if outer.nesterov else velocity
            c.assign_sub(tf.cast(rate, c.dtype) * change)


@dataclass(frozen=True, eq=False)
class BufferAverage:
    """Averaging of variables that are not trained.

    Attributes:
        sources: the model's.
        reducer: of their values.
    """

    sources: list[Any]
    reducer: GraphReducer

    def average(self) -> None:
        """Set them to their means over the ranks, unless one of them is not finite."""
        wide = [
            tf.cast(plain_variable(v), dtype)
            for v, (_, _, dtype) in zip(self.sources, self.reducer.layers)
        ]
        means = self.reducer.reduce(wide)
        if bool(self.reducer.finite):
            for v, mean in zip(self.sources, means):
                v.assign(tf.cast(mean, v.dtype))


@dataclass(eq=False)
class HostAverage:
    """Averaging of gradients over the ranks of a host.

    Attributes:
        reducer: of the gradients.
        before: by fragment, steps in which they had been averaged at its last exchange.
    """

    reducer: GraphReducer
    before: dict[int, int] = field(default_factory=dict)

    def is_new(self, number: int) -> bool:
        """Return True if gradients were averaged since this was asked of a fragment before."""
        now = int(self.reducer.steps)
        before, self.before[number] = self.before.get(number, 0), now
        return now > before


class LocalSteps(tf.Module):
    """Local steps: each rank trains alone, and ranks exchange every so many steps.

    What travels is the change of the variables since the last exchange, through any compressor with
    its error feedback, into an outer optimizer (Douillard et al. 2023, DiLoCo). Bytes a step are
    those of an exchange divided by `every`. The tape and the optimizer are plain ones::

        hvd.broadcast_variables(model.variables, 0)
        local = hvd.LocalSteps(model.trainable_variables, **hvd.sparse_loco(every=15))
        for x, y in batches:
            with tf.GradientTape() as tape:
                loss = loss_of(y, model(x))
            gradients = tape.gradient(loss, model.trainable_variables)
            gradients = local.reduce_gradients(gradients)  # if warmup_steps= or hierarchical=
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))
            local.step()
        local.exchange()

    All but the last two lines may be a `tf.function`; `step` and `exchange` run eagerly. Make it
    once the ranks have equal variables: it takes them as the global ones. Call `restart()` after
    variables were set in another way than by training.

    Variables, and the inner optimizer's, differ between ranks from one exchange to the next.
    Evaluate and save the model after an exchange: the schedule's, or `exchange()`, which all ranks
    call. `hvd.verify(local)` compares the global variables. Per-sample and micro-batch moments are
    those of gradients, and refused: Variance and Hybrid take `moments="step"`.

    *Checkpoints.* It is a `tf.Module` that has the global variables, the outer velocity, the
    compressor's state and the place in the round. `hvd.save_checkpoint(folder, model=model,
    optimizer=optimizer, local=local)` saves variables, and what the `optimizer=` given here keeps,
    of each rank, so that all go on to the bit with as many ranks, at any step. With
    `mode="consolidated"` it needs an `exchange()` before; all ranks go on from the global
    variables, and from rank 0's inner optimizer. A `tf.train.Checkpoint(model=model,
    optimizer=optimizer, local=local)` needs a file for each rank. In a file of one rank for all,
    what is saved between exchanges is that rank's alone, and others' last steps are lost: call
    `exchange()` before. Nothing has to be called after a load.

    Args:
        variables: what the inner optimizer trains, of TensorFlow or Keras, in the same order on all
            ranks.
        every: steps between two exchanges; 15 to 100 are usual, 500 in DiLoCo's own experiments.
        outer: settings of the outer optimizer. `OuterSGD(lr=1, momentum=0)` averages variables.
        compression: of the changes, as in `DistributedGradientTape`. Momentum correction (DGC, EGC)
            takes over the outer optimizer's momentum.
        warmup_steps: first steps, in which `reduce_gradients` averages gradients, dense.
        fragments: parts of the model that are exchanged in turn, `every / fragments` steps apart,
            so that traffic is even (Douillard et al. 2025, Streaming DiLoCo).
        delay: steps between sending and applying. The result is that of Streaming DiLoCo, but on
            TensorFlow nothing overlaps: the exchange blocks where it is sent.
        blend: weight of a rank's own variables where global ones arrive; 0.5 with a delay, else 0.
        buffers: variables that are not trained, such as running means; those in floating point are
            averaged after each exchange of all fragments. None leaves them to each rank.
        optimizer: the inner optimizer, built, whose state checkpoints are to keep of each rank.
        process_set: the ranks that take part.
        hierarchical: ranks of a host average their gradients in every step, dense, by
            `reduce_gradients`, and hosts exchange. Needs `hvd.init(process_sets="dynamic")` where a
            host has several ranks.
        nonfinite: if the variables of some rank are not finite at an exchange: "raise", or "skip":
            all ranks go back to the global variables. The same on all ranks; None for "raise".

    Attributes:
        schedule: of the exchanges.
        title: prefix of the names of what the ranks compare.
        seconds_waited: in which steps stood still for exchanges, compressing included.
        learning_rate: of the outer optimizer, a variable; assign the same on all ranks.

    Memory: a copy of the variables, the outer momentum, and what the compressor keeps. With a delay
    another copy.

    Raises:
        ValueError: Horovod is not initialised; this rank is not in the process set; a setting is
            out of range; a variable cannot be compressed; moments of samples are asked for; the
            optimizer is not built; hosts or Horovod are not as `hierarchical` needs them.
        TypeError: `compression` is no compressor, or `outer` no `OuterSGD`.
    """

    def __init__(
        self,
        variables: Sequence[Any],
        every: int = 15,
        outer: OuterSGD = DILOCO,
        compression: Any = None,
        *,
        warmup_steps: int = 0,
        fragments: int = 1,
        delay: int = 0,
        blend: float | None = None,
        buffers: Sequence[Any] | None = None,
        optimizer: Optimizer | None = None,
        process_set: Any = horovod.global_process_set,
        hierarchical: bool = False,
        nonfinite: str | None = None,
    ) -> None:
        super().__init__(name="gradcomp_local")
        self.schedule = LocalSchedule(every, warmup_steps, fragments, delay, blend)
        options = ExchangeOptions(
            sparse_as_dense=True,
            process_set=process_set,
            hierarchical=hierarchical,
            nonfinite="skip" if nonfinite == "skip" else "raise",
        )
        compressor = options.resolve_compressor(compression, "LocalSteps")
        if not comm.takes_part(process_set):
            raise ValueError(
                "this rank is not in process_set=: make LocalSteps on its ranks alone, and train "
                "without it on the others"
            )
        if nonfinite not in (None, "raise", "skip"):
            raise ValueError(
                f"nonfinite must be 'raise', 'skip' or None, got {nonfinite!r}: there is no mean "
                "of variables that are not finite"
            )
        if not getattr(optimizer, "built", True):
            raise ValueError(
                "optimizer= is not built, so what it keeps is not known: call its "
                "build(model.trainable_variables) before"
            )
        _refuse_moments(compressor)
        self._outer, compressor = _settled(outer, compressor)
        self._settings = (
            f"{self.schedule}, outer={outer}, hierarchical={hierarchical}, "
            f"nonfinite={options.nonfinite}"
        )
        self._process_set, self._agreed = process_set, False
        self.seconds_waited = 0.0
        numbers = _titles.setdefault(process_set.process_set_id, UniqueNames("gradcomp.local"))
        self.title = f"{numbers.take()}.{process_set.process_set_id}"
        layers = _exchangeable(variables)
        parts = cut([prod(shape) for _, shape, _ in layers], fragments)
        self._fragments = [
            self._fragment(
                number,
                [variables[i] for i in part],
                [_widened(layers[i]) for i in part],
                compressor,
                options,
            )
            for number, part in enumerate(parts)
        ]
        self._warmup = self._averaging("warmup", layers, process_set) if warmup_steps else None
        place = options.position
        self._has_neighbours = place is not None and place.slots > 1
        self._average_inside = partial(self._averaging, "inside", layers)
        self._inside: HostAverage | None = None  # with neighbours, once the ranks agree
        averaged = [b for b in buffers or () if tf.as_dtype(b.dtype).is_floating]
        self._buffers = None
        if averaged:
            layers = [_widened(layer) for layer in named_layers(averaged)]
            self._buffers = BufferAverage(averaged, self._averaging("buffers", layers, process_set))
        zero, zeros = tf.constant(0, tf.int64), tf.zeros((fragments,), tf.int64)
        self._steps = new_variable("gradcomp_local_steps", zero)
        self._clock = new_variable("gradcomp_local_clock", zero)  # steps that the schedule counts
        self._rounds = new_variable("gradcomp_local_rounds", zero)
        self._moved = new_variable("gradcomp_local_moved", zeros)
        self._sent = new_variable("gradcomp_local_sent", zeros)
        self.learning_rate = new_variable("gradcomp_outer_rate", tf.constant(outer.lr, tf.float64))
        held = [v for f in self._fragments for v in (*f.copies, *f.velocities, *f.means)]
        reducers = *self.reducers, *self.others
        self.kept = [*held, *(v for reducer in reducers for v in reducer.variables)]
        inner = () if optimizer is None else optimizer.variables
        for v in (self._steps, *variables, *inner):
            if isinstance(plain_variable(v), tf.Variable):
                keep_apart(plain_variable(v))

    def _fragment(
        self,
        number: int,
        sources: list[Any],
        layers: Sequence[Layer],
        compressor: Compressor,
        options: ExchangeOptions,
    ) -> Fragment:
        reducer = GraphReducer(
            layers,
            compressor,
            options,
            name=f"{self.title}.{number}",
            settings=f", {self._settings}",
            make_variable=new_variable,
        )
        zeros = [tf.zeros(shape, dtype) for _, shape, dtype in layers]

        def created(name: str) -> list[tf.Variable]:
            return [new_variable(f"gradcomp_{name}", zero) for zero in zeros]

        copies = created("global")
        velocities = created("velocity") if self._outer.momentum else []
        means = created("mean") if self.schedule.delay else []
        fragment = Fragment(sources, reducer, copies, velocities, means)
        fragment.take_copies()
        return fragment

    def _averaging(self, part: str, layers: Sequence[Layer], process_set: Any) -> GraphReducer:
        """Return a reducer to dense means, which are NaN if a value of some rank is not finite."""
        return GraphReducer(
            layers,
            NoneCompressor(),
            ExchangeOptions(sparse_as_dense=True, process_set=process_set, nonfinite="propagate"),
            name=f"{self.title}.{part}",
            make_variable=new_variable,
        )

    # -- one step ------------------------------------------------------------------------------

    @tf.autograph.experimental.do_not_convert
    def reduce_gradients(self, gradients: Sequence[Any]) -> list[Any]:
        """Average gradients over the ranks during warm-up, and then over those of a host.

        Call it before the inner optimizer, in every step, eagerly or in a `tf.function`; not needed
        without `warmup_steps` and `hierarchical`. If a gradient of some rank is not finite, they
        are NaN on all ranks that average.

        Args:
            gradients: one for each variable, or None; of the same variables on all ranks.

        Returns:
            The means; gradients that are not averaged, as they are.

        Raises:
            ValueError: there are not as many gradients as variables.
            MismatchError: on all ranks, the first time, if they do not train the same.
        """
        if self._warmup is None and not self._has_neighbours:
            return list(gradients)
        self._agree()
        warmup, inside = self._warmup, None if self._inside is None else self._inside.reducer
        if tf.executing_eagerly():
            reducer = warmup if self.warms_up else inside
            return list(gradients) if reducer is None else reducer.reduce(gradients)
        dense = [None if g is None else tf.convert_to_tensor(g) for g in gradients]

        def means(reducer: GraphReducer | None) -> list[Any]:
            reduced = dense if reducer is None else reducer.reduce(dense)
            return [g for g in reduced if g is not None]

        if warmup is None:
            present = means(inside)
        else:
            warms_up = self._clock < self.schedule.warmup_steps
            present = tf.cond(warms_up, lambda: means(warmup), lambda: means(inside))
        rest = iter(present)
        return [None if g is None else next(rest) for g in dense]

    def step(self, steps: int = 1) -> None:
        """Count local steps, after the inner optimizer's; exchange where the schedule says so.

        Args:
            steps: made since the last call. What was due in between is exchanged now.

        Raises:
            OutOfStepError: on all ranks, if they have made different numbers of steps.
            DivergedError: on all ranks, if their global variables differ.
            MismatchError: on all ranks, in the first exchange, if they train different models.
            NonFiniteGradientError: on all ranks, if the variables of one of them are not finite;
                with nonfinite="skip" all ranks go back to the global variables instead.
            RuntimeError: in a graph that is traced; on all ranks, if `hierarchical` and one of them
                has not called `reduce_gradients` since the last exchange.
        """
        _require_eager("step")
        self._steps.assign_add(steps)
        first = int(self._clock) + 1
        for step in range(first, first + steps):
            self._clock.assign(step)
            if self.schedule.warms_up(step):
                if step == self.schedule.warmup_steps:
                    self._take_copies()
                continue
            self._moved.assign_add(tf.ones_like(self._moved))
            for number in self.schedule.applies(step) if self.schedule.delay else ():
                self._apply_sent(number)
            for number in self.schedule.sends(step):
                self._compare(number, asked=False)
                means = self._reduce(number)
                if self.schedule.delay:
                    self._put_aside(number, means)
                else:
                    self._apply(number, means)

    def exchange(self) -> None:
        """Exchange now, whatever the schedule says: at the end of a training, or of an epoch.

        All ranks call it at the same place, also if they have made different numbers of steps
        since the last exchange. What is on its way is applied first. Afterwards all ranks have the
        global variables, and the schedule begins again. A no-op for variables that no rank has
        moved since the last exchange, and during warm-up.

        Raises:
            OutOfStepError: on all ranks, if others are in the exchange of a step.
            DivergedError, MismatchError, NonFiniteGradientError, RuntimeError: as in `step`.
        """
        _require_eager("exchange")
        for number in range(len(self._fragments)):
            self._apply_sent(number)
        most = 0
        for number, fragment in enumerate(self._fragments):
            states = self._compare(number, asked=True).values()
            most = max(state.clock for state in states)
            if any(state.moved for state in states):
                self._apply(number, self._reduce(number))
                self._hand_out(fragment, number, 0.0)
        every, alone = self.schedule.every, most - self.schedule.warmup_steps
        if alone > 0:
            self._clock.assign(self.schedule.warmup_steps + -(-alone // every) * every)

    def restart(self) -> None:
        """Take this rank's variables as the global ones, after they were set in mid-training.

        All ranks call it, with equal variables: the next exchange compares them. What is on its way
        is dropped. Not needed after a checkpoint was loaded that has this object in it.
        """
        self._sent.assign(tf.zeros_like(self._sent))
        self._take_copies()

    def restart_if_set(self) -> None:
        """Restart if variables were set since the global ones were applied, and no step was made.

        All ranks call it between steps. It sees no change of variables after a step.
        """
        handed_out = all(fragment.is_handed_out() for fragment in self._fragments)
        if self.is_exchanged and not handed_out:
            self.restart()

    def begin_anew(self, title: str) -> None:
        """Go on among other ranks, from the global variables, after rank 0's were broadcast.

        Args:
            title: prefix of the names of what the ranks compare, rank 0's.
        """
        self.title, self._agreed = title, False
        if self.is_exchanged:
            return
        if self._process_set.rank() == 0:
            LOGGER.warning(
                "all ranks go on from the global variables: up to %d local steps of each, since "
                "the last exchange, are lost",
                int(tf.reduce_max(self._moved)),
            )
        for number, fragment in enumerate(self._fragments):
            self._apply_sent(number)
            self._hand_out(fragment, number, 0.0)

    def _take_copies(self) -> None:
        for fragment in self._fragments:
            fragment.take_copies()
        self._moved.assign(tf.zeros_like(self._moved))

    def _reduce(self, number: int) -> list[Any] | None:
        """Reduce a fragment's pseudogradients; None if those of some rank are not finite."""
        fragment = self._fragments[number]
        begin = time.perf_counter()
        try:
            means = fragment.reducer.reduce(fragment.pseudogradients())
        except NonFiniteGradientError as error:
            raise NonFiniteGradientError(
                f"variables of some rank are not finite at the exchange after {self.steps_made} "
                "local steps. Look for what made them so; with nonfinite='skip' all ranks go back "
                "to the global variables"
            ) from error
        finally:
            self.seconds_waited += time.perf_counter() - begin
        return means if bool(fragment.reducer.finite) else None

    def _put_aside(self, number: int, means: Sequence[Any] | None) -> None:
        """Keep reduced pseudogradients until their delay is over."""
        self._mark_sent(number, _NOT_FINITE if means is None else _MEANS)
        for kept, mean in zip(self._fragments[number].means, means or ()):
            kept.assign(tf.zeros_like(kept) if mean is None else mean)

    def _apply_sent(self, number: int) -> None:
        """Apply what was put aside, if there is something."""
        sent = int(self._sent[number])
        if sent != _NOTHING:
            self._mark_sent(number, _NOTHING)
            means = [m.read_value() for m in self._fragments[number].means]
            self._apply(number, means if sent == _MEANS else None)

    def _mark_sent(self, number: int, what: int) -> None:
        self._sent.scatter_nd_update([[number]], [what])

    def _apply(self, number: int, means: Sequence[Any] | None) -> None:
        """Step the outer optimizer by a fragment's reduced pseudogradients."""
        fragment = self._fragments[number]
        if means is None:
            LOGGER.warning(
                "variables of some rank were not finite: all ranks go back to the global ones, "
                "and lose up to %d steps",
                self.schedule.every,
            )
            self._hand_out(fragment, number, 0.0)
            return
        fragment.step(means, self._outer, self.learning_rate)
        blend = self.schedule.blend
        assert blend is not None
        self._hand_out(fragment, number, blend)
        if number == len(self._fragments) - 1:
            self._rounds.assign_add(1)
            if self._buffers is not None:
                self._buffers.average()

    def _hand_out(self, fragment: Fragment, number: int, blend: float) -> None:
        fragment.hand_out(blend)
        if not blend:
            self._moved.scatter_nd_update([[number]], [0])

    # -- what the ranks compare ----------------------------------------------------------------

    def _gather(self, item: Any, kind: Any) -> list[Any]:
        with tf.init_scope(), comm.explained("the exchange of local steps"):
            return comm.gather_objects(item, kind, self.title, self._process_set)

    def _agree(self) -> None:
        """Compare what is trained, and how, with the other ranks, once."""
        if self._agreed:
            return
        buffers = [] if self._buffers is None else self._buffers.reducer.layers
        own = config_check.describe(
            named_layers(self.trained),
            self.reducers[0].compressor,
            [layout for reducer in self.reducers for layout in reducer.planner.layouts],
            f"{self._settings}, buffers={[name for name, _, _ in buffers]}",
            framework=f"tensorflow {tf.__version__}",
            horovod=horovod_version,
        )
        found = self._gather(own, config_check.Description)
        advice = "Give LocalSteps the same variables and arguments on all ranks"
        config_check.agree(found, self._process_set.ranks, advice)
        if self._has_neighbours and self._inside is None:
            inside = self.reducers[0].participants.groups.inside
            self._inside = HostAverage(self._average_inside(inside))
        self._agreed = True

    def _compare(self, number: int, asked: bool) -> States:
        """Compare what the ranks are about to exchange; return the state of each.

        Raises:
            OutOfStepError: on all ranks, if it is something else.
            DivergedError: on all ranks, if their global variables differ.
        """
        self._agree()
        fragment = self._fragments[number]
        digests = checksums.digests_of(fragment.reducer.ops, fragment.copies)
        has_moved = int(self._moved[number]) > 0
        own = ExchangeState(
            number,
            int(asked),
            int(fragment.reducer.steps),
            int(self._clock),
            int(self._moved[number]),
            zlib.crc32(digests.numpy().tobytes()),
            fault=int(self._inside is not None and not self._inside.is_new(number) and has_moved),
        )
        every = self._gather(own, ExchangeState)
        states = dict(zip(self._process_set.ranks or range(len(every)), every))
        if error := out_of_step(states):
            raise error
        remedy = (
            "Make LocalSteps once all ranks have equal variables, by hvd.broadcast_variables or a "
            "seed"
        )
        if different := diverged(states, "variables", remedy):
            raise different
        if alone := [rank for rank, state in states.items() if state.fault]:
            raise RuntimeError(
                "hierarchical=True averages gradients over the ranks of a host in every step, and "
                f"rank {', '.join(map(str, alone))} has averaged none since the last exchange: "
                "call gradients = local.reduce_gradients(gradients) before the optimizer"
            )
        return states

    # -- what it keeps, and what it has done ---------------------------------------------------

    @property
    def steps_made(self) -> int:
        """Return the local steps so far."""
        return int(self._steps)

    @property
    def rounds(self) -> int:
        """Return how often pseudogradients of the whole model were applied so far."""
        return int(self._rounds)

    @property
    def warms_up(self) -> bool:
        """Return True if gradients are averaged in the next step."""
        return self.schedule.warms_up(int(self._clock) + 1)

    @property
    def averages_gradients(self) -> bool:
        """Return True if `reduce_gradients` does something: in warm-up, or with neighbours."""
        return self._has_neighbours or self.warms_up

    @property
    def is_exchanged(self) -> bool:
        """Return True if variables are the global ones; also during warm-up."""
        return not (bool(tf.reduce_any(self._moved > 0)) or bool(tf.reduce_any(self._sent > 0)))

    @property
    def reducers(self) -> list[GraphReducer]:
        """Return the reducer of each fragment."""
        return [fragment.reducer for fragment in self._fragments]

    @property
    def others(self) -> list[GraphReducer]:
        """Return the reducers of warm-up and of buffers, if there are any."""
        warmup = [] if self._warmup is None else [self._warmup]
        return warmup if self._buffers is None else [*warmup, self._buffers.reducer]

    @property
    def trained(self) -> list[Any]:
        """Return the model's variables that are exchanged, by fragment."""
        return [v for fragment in self._fragments for v in fragment.sources]

    @property
    def global_variables(self) -> list[list[tf.Variable]]:
        """Return the global variables of each fragment."""
        return [fragment.copies for fragment in self._fragments]


def _require_eager(method: str) -> None:
    if not tf.executing_eagerly():
        raise RuntimeError(
            f"LocalSteps.{method}() compares the ranks before it exchanges, eagerly: call it "
            "outside of the tf.function, after each step"
        )


def _refuse_moments(compressor: Compressor) -> None:
    """Refuse a compressor that uses moments of samples.

    Raises:
        ValueError: it does.
    """
    if compressor.uses_moments and getattr(compressor, "moments", "") in ("sample", "microbatch"):
        raise ValueError(
            "moments of samples or micro-batches are those of gradients, and what is exchanged is "
            f"the change of variables over several steps: pass moments='step'. It is {compressor}"
        )


def _settled(outer: Any, compressor: Compressor) -> tuple[OuterSGD, Compressor]:
    """Decide whether the outer optimizer or the compressor applies the momentum.

    Raises:
        TypeError: `outer` is something else.
        ValueError: the compressor corrects another momentum than the outer optimizer's.
    """
    if not isinstance(outer, OuterSGD):
        raise TypeError(f"outer= takes OuterSGD(lr=..., momentum=...), got {outer!r}")
    own = outer.momentum, bool(outer.nesterov)
    compressor, gives_up = take_over(compressor, "OuterSGD", own)
    return OuterSGD(outer.lr, 0.0) if gives_up else outer, compressor


def _exchangeable(variables: Sequence[Any]) -> list[Layer]:
    """Return the layers of what is trained.

    Raises:
        ValueError: a variable is not trained.
    """
    layers = named_layers(variables)
    for v, (name, _, _) in zip(variables, layers):
        if not v.trainable:
            raise ValueError(
                f"{name} is not trained: pass model.trainable_variables, and others as buffers="
            )
    return layers


def _widened(layer: Layer) -> Layer:
    """Return a layer in the precision of its global variable."""
    name, shape, dtype = layer
    wide = "float32" if dtype in _NARROW else dtype
    if isinstance(layer, Weight):
        return Weight(name, shape, wide, layer.convolves)
    return name, shape, wide
