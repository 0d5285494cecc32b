"""`LocalSteps`: ranks that step alone, and exchange the change of variables now and then.

See `algorithms.combined.local_steps` for the method and its sources. The inner optimizer is the
user's own, of Keras or another; what it has changed goes through a `GraphReducer` as a gradient
would. `runtime/local_rounds.py` runs the rounds.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import horovod.tensorflow as horovod
import tensorflow as tf

from hvd_gradcomp.algorithms.combined.local_steps import (
    AVERAGING,
    EIGHTH,
    LocalSchedule,
    OuterSGD,
    cut,
    warn_of_settings,
)
from hvd_gradcomp.algorithms.combined.round_length import Every
from hvd_gradcomp.algorithms.combined.wrappers import take_over
from hvd_gradcomp.core import validate
from hvd_gradcomp.core.layers import Layer
from hvd_gradcomp.method.compressor import Compressor
from hvd_gradcomp.method.handover import residual_of
from hvd_gradcomp.planning.announcement import announce, announcement
from hvd_gradcomp.runtime.local_rounds import LocalRounds
from hvd_gradcomp.runtime.round_clock import RoundClock
from hvd_gradcomp.runtime.unique_names import UniqueNames
from hvd_gradcomp.tensorflow.comm.horovod import takes_part
from hvd_gradcomp.tensorflow.comm.round_clock import GraphProgressGather
from hvd_gradcomp.tensorflow.interop.layers import named_layers, widened
from hvd_gradcomp.tensorflow.interop.moving_averages import (
    UnknownAverages,
    averages_of,
    rate_of,
)
from hvd_gradcomp.tensorflow.interop.variables import keep_apart, new_variable, plain_variable
from hvd_gradcomp.tensorflow.local.averaging import BufferAverage, GradientAverage
from hvd_gradcomp.tensorflow.local.fragments import CounterVariables, GraphFragment
from hvd_gradcomp.tensorflow.local.rank_channel import GraphRankChannel
from hvd_gradcomp.tensorflow.reduce.options import ExchangeOptions
from hvd_gradcomp.tensorflow.reduce.reducer import LOGGER, GraphReducer
from hvd_gradcomp.tensorflow.reduce.registry import exchanges_in
from hvd_gradcomp.tensorflow.reduce.rivals import RivalExchanges

if TYPE_CHECKING:
    from keras.optimizers import Optimizer

_titles: dict[int, UniqueNames] = {}  # by process set, whose ranks alone draw names
_exchanging: WeakValueDictionary[int, LocalSteps] = WeakValueDictionary()  # by `id` of a variable


class LocalSteps(tf.Module):
    """Local steps: each rank trains alone, and ranks exchange every so many steps.

    What travels is the change of the variables since the last exchange, through any compressor with
    its error feedback, into an outer optimizer (Douillard et al. 2023, DiLoCo). Bytes a step are
    those of an exchange divided by `every`. The tape and the optimizer are plain ones::

        hvd.broadcast_variables(model.variables, 0)
        local = hvd.LocalSteps(model.trainable_variables)
        for x, y in batches:
            with tf.GradientTape() as tape:
                loss = loss_of(y, model(x))
            gradients = tape.gradient(loss, model.trainable_variables)
            gradients = local.reduce_gradients(gradients)  # if warmup_steps= or hierarchical=
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))
            local.step()
        local.exchange()

    All but the last two lines may be a `tf.function`; `step` and `exchange` run eagerly. Make it
    once the ranks have equal variables, which the first step compares: it takes them as the global
    ones. Call `restart()` after variables were set in another way than by training. Weights that
    were swapped for an evaluation and put back are not set.

    A variable's constraint holds for the global one too. Nothing else may exchange the variables,
    or their gradients: the tape and the optimizer are plain. A process may have several replicas
    in a `tf.distribute.MirroredStrategy`, which reduces gradients among them.

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

    Default: `every=5` and `compression=ChunkedTopKCompressor(k=512, values="int4", decay=1)`, with
    the mean of changes as the outer step. It sends one element in 8, in 4 bits, and reached a loss
    soonest in docs/worth.md. With an outer momentum, or a delay, give `compression=None`, which
    sends all elements, or `Int8Compressor()`.

    Args:
        variables: what the inner optimizer trains, of TensorFlow or Keras, in the same order on all
            ranks.
        every: steps between two exchanges; 5 did best on slow links (docs/worth.md), and DiLoCo's
            own experiments have 500.
            Or a `QuadraticRule`, which exchanges more rarely as the rate of `optimizer=` falls; or
            a function of the steps so far, called when a round begins, which returns its steps, the
            same on all ranks. With moving averages in `optimizer=` a number.
        outer: settings of the outer optimizer; the default averages what ranks send. A momentum
            wants `warmup_steps`, as `diloco()` gives them.
        compression: of the changes, as in `DistributedGradientTape`. Momentum correction (DGC, EGC)
            takes over the outer optimizer's momentum.
        warmup_steps: first steps, in which `reduce_gradients` averages gradients, dense.
        fragments: parts of the model that are exchanged in turn, `every / fragments` steps apart,
            so that traffic is even (Douillard et al. 2025, Streaming DiLoCo).
        delay: steps between sending and applying, which overlap with the exchange: it runs in a
            thread of its own, but for the first one of each fragment.
        blend: weight of a rank's own variables where global ones arrive; 0.5 with a delay, else 0.
        buffers: variables that are not trained, such as running means; those in floating point are
            averaged after each exchange of all fragments. None leaves them to each rank.
        optimizer: the inner optimizer, built, whose state checkpoints are to keep of each rank. If
            it keeps moving averages (`use_ema=True`), they become those of the global variables,
            at each exchange, which counts as `every` steps. Needed for such an optimizer.
        process_set: the ranks that take part.
        hierarchical: ranks of a host average their gradients in every step, dense, by
            `reduce_gradients`, and hosts exchange. Needs `hvd.init(process_sets="dynamic")` where a
            host has several ranks.
        nonfinite: if the variables of some rank are not finite at an exchange: "raise", or "skip":
            all ranks go back to the global variables. The same on all ranks; None for "raise".
        deadline: seconds, for ranks of different speeds. A rank that has made `every` steps goes on
            training until the others have, but no longer than this; then all exchange what they
            have, each after its step. So ranks make different numbers of steps, and equally many
            rounds: train until `rounds`, and call no collective of your own in between. Without
            fragments, delay, hierarchical and `QuadraticRule`. None: all make `every` steps, and
            wait.

    Attributes:
        schedule: of the exchanges.
        deadline: as given.
        learning_rate: of the outer optimizer, a variable; assign the same on all ranks.

    Memory: a copy of the variables, the outer momentum, and what the compressor keeps. With a
    delay, and with moving averages, another copy.

    Raises:
        ValueError: Horovod is not initialised; this rank is not in the process set; a setting is
            out of range; a variable cannot be compressed; moments of samples are asked for; the
            optimizer is not built or exchanges gradients; hosts or Horovod are not as
            `hierarchical` needs them.
        TypeError: `compression` is no compressor, or `outer` no `OuterSGD`.
    """

    def __init__(
        self,
        variables: Sequence[Any],
        every: Every = 5,
        outer: OuterSGD = AVERAGING,
        compression: Any = EIGHTH,
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
        deadline: float | None = None,
    ) -> None:
        super().__init__(name="gradcomp_local")
        self.schedule = LocalSchedule(every, warmup_steps, fragments, delay, blend, deadline)
        self.deadline = deadline
        options = ExchangeOptions(
            sparse_as_dense=True,
            process_set=process_set,
            hierarchical=hierarchical,
            nonfinite="skip" if nonfinite == "skip" else "raise",
        )
        compressor = options.resolve_compressor(compression, "LocalSteps")
        _check_use(process_set, nonfinite, optimizer, compressor)
        place = options.position
        has_neighbours = place is not None and place.slots > 1
        if has_neighbours:
            self.schedule.check_averages_in_hosts()
        settings = (
            f"{self.schedule}, {outer=}, hierarchical={hierarchical}, "
            f"nonfinite={options.nonfinite}{'' if deadline is None else f', {deadline=}'}"
        )
        outer, compressor = _settled(outer, compressor)
        numbers = _titles.setdefault(process_set.process_set_id, UniqueNames("gradcomp.local"))
        title = f"{numbers.take()}.{process_set.process_set_id}"
        layers, averages = _exchangeable(variables), averages_of(optimizer)
        _check_every(self.schedule, optimizer, bool(averages))
        self._counters = counters = CounterVariables(fragments)
        self.learning_rate = new_variable("gradcomp_outer_rate", tf.constant(outer.lr, tf.float64))
        self._fragments = [
            GraphFragment(
                number,
                [variables[i] for i in part],
                GraphReducer(
                    [widened(layers[i]) for i in part],
                    compressor,
                    options,
                    name=f"{title}.{number}",
                    settings=f", {settings}",
                    make_variable=new_variable,
                    announces=False,
                ),
                counters,
                outer,
                self.learning_rate,
                averages,
                every if isinstance(every, int) else 0,  # there are no averages then
                is_delayed=bool(delay),
            )
            for number, part in enumerate(cut([prod(s) for _, s, _ in layers], fragments))
        ]
        warn_of_settings(
            outer.momentum,
            compressor,
            self.schedule,
            any(
                residual_of(bucket.compressor, bucket.state) is not None
                for reducer in self.reducers
                for bucket in reducer.buckets
            ),
            self.reducers[0].participants.rank_and_size[1],
        )
        self._averages = GradientAverage(
            layers, title, process_set, bool(warmup_steps), has_neighbours
        )
        averaged = [b for b in buffers or () if tf.as_dtype(b.dtype).is_floating]
        self._buffers = None
        if averaged:
            self._buffers = BufferAverage(averaged, f"{title}.buffers", process_set)
        names = [n for r in self._buffer_reducers for n, _, _ in r.layers]
        settings = f"{settings}, buffers={names}"
        self._ranks = GraphRankChannel(
            title, process_set, settings, layers, self.reducers, self._averages
        )
        self._gather = GraphProgressGather(title, process_set)
        clock = None  # a round sets its length
        if deadline is not None:
            clock = RoundClock(self._gather, 1, deadline)
        self._machine = LocalRounds(
            self.schedule,
            self._fragments,
            self._ranks,
            counters,
            buffers=self._buffers,
            clock=clock,
            rate=None if optimizer is None else lambda: rate_of(optimizer),
        )
        # Checkpoints know the variables by the names of these attributes.
        self._steps, self._clock = counters.steps_variable, counters.clock_variable
        self._rounds, self._round = counters.rounds_variable, counters.round_variable
        self._moved, self._sent = counters.moved, counters.sent
        reducers = *self.reducers, *self.others
        self.kept = [v for fragment in self._fragments for v in fragment.variables]
        self.kept += [v for reducer in reducers for v in reducer.variables]
        inner = () if optimizer is None else optimizer.variables
        differ = [self._steps]
        if deadline is not None:
            differ += [self._clock, self._moved]
        for v in map(plain_variable, (*differ, *variables, *inner)):
            if isinstance(v, tf.Variable):
                keep_apart(v)
        self._knows_averages = optimizer is not None
        self._unknown_averages: UnknownAverages | None = None
        self._rivals = RivalExchanges(variables)
        self.claim()
        if process_set.rank() == 0:
            plan = [pair for reducer in self.reducers for pair in reducer.plan]
            _, ranks = self.reducers[0].participants.rank_and_size
            scope = "" if place is None else "between hosts"
            announce(announcement(compressor, plan, ranks, self.schedule, scope))

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
            MismatchError, DivergedError: on all ranks, the first time, if they do not train the
                same, or have different variables.
            RuntimeError: as in `step`.
        """
        if not self._averages.is_used:
            return list(gradients)
        self._require_sole()
        # step() compares from then on: a rank may trace this anew while others run their graph.
        if not self._machine.agreed:
            with tf.init_scope():
                self._machine.begin()
        return self._averages.reduce(gradients, self._clock < self.schedule.warmup_steps)

    def step(self, steps: int = 1) -> None:
        """Count local steps, after the inner optimizer's; exchange where the schedule says so.

        Args:
            steps: made since the last call. What was due in between is exchanged now.

        Raises:
            OutOfStepError: on all ranks, if they have made different numbers of steps, without a
                deadline.
            DivergedError: on all ranks, in the first step and at each exchange, if their global
                variables differ.
            MismatchError: on all ranks, in the first step, if they train different models.
            ValueError: in the second step, an optimizer keeps moving averages, and is not known.
            NonFiniteGradientError: on all ranks, if the variables of one of them are not finite;
                with nonfinite="skip" all ranks go back to the global variables instead.
            RuntimeError: in a graph that is traced; the gradients were exchanged in this step, or
                another LocalSteps was made or restarted for the variables; on all ranks, if
                `hierarchical` and one of them has not called `reduce_gradients` since the last
                exchange.
        """
        _require_eager("step")
        self._require_sole()
        self._require_known_averages()
        self._machine.begin()
        warm = min(steps, max(0, self.schedule.warmup_steps - self._counters.clock))
        for _ in range(warm):
            self._machine.count_warm_step()
        if steps > warm:
            self._machine.end_local_steps(steps - warm)

    def exchange(self) -> None:
        """Exchange now, whatever the schedule says: at the end of a training, or of an epoch.

        All ranks call it at the same place, also if they have made different numbers of steps
        since the last exchange. What is on its way is applied first. Afterwards all ranks have the
        global variables, and the schedule begins again. A no-op for variables that no rank has
        moved since the last exchange, and during warm-up.

        Raises:
            OutOfStepError: on all ranks, if others are in the exchange of a step; with a deadline
                it waits for them instead, and exchanges with them what they have by then.
            DivergedError, MismatchError, NonFiniteGradientError, RuntimeError: as in `step`.
        """
        _require_eager("exchange")
        self._machine.exchange()

    def settle(self) -> None:
        """Wait for what is on its way with a `delay`, if anything; it is applied when it is due.

        Not needed before a checkpoint is saved or loaded, which waits by itself. All ranks have
        sent by then, so one of them may call it alone.
        """
        for fragment in self._fragments:
            fragment.settle()

    def restart(self) -> None:
        """Take this rank's variables as the global ones, after they were set in mid-training.

        All ranks call it, with equal variables: the next step compares them. What is on its way is
        dropped, and so is what the compressor has not sent. Not needed after a checkpoint was
        loaded that has this object in it. Another LocalSteps that was made for these variables may
        no longer exchange them.
        """
        self.claim()
        self._rivals.forget()
        self._machine.restart()

    def restart_if_set(self) -> None:
        """Restart if a rank's variables were set since the global ones were applied.

        All ranks call it between steps. It sees no change of variables after a step.
        """
        done = self.is_exchanged
        was_set = done and not all(fragment.is_handed_out() for fragment in self._fragments)
        rows = self._ranks.gather([int(was_set), int(done)]).values()
        if any(was_set for was_set, _ in rows) and all(done for _, done in rows):
            self.restart()

    def begin_anew(self, title: str) -> None:
        """Go on among other ranks, from the global variables, after rank 0's were broadcast.

        Args:
            title: prefix of the names of what the ranks compare, rank 0's.
        """
        self._ranks.title = title
        self._gather.rename(title)
        self._machine.reconnect()
        if self.is_exchanged:
            return
        if self._ranks.is_first:
            LOGGER.warning(
                "all ranks go on from the global variables: up to %d local steps of each, since "
                "the last exchange, are lost",
                max(fragment.moved for fragment in self._fragments),
            )
        self._machine.discard_steps()

    def claim(self) -> None:
        """Let no other LocalSteps exchange these variables until that one claims them."""
        _exchanging.update((id(plain_variable(v)), self) for v in self.trained)

    def _find_other(self) -> LocalSteps | None:
        """Return another LocalSteps that has claimed variables of this one, and still exists."""
        keys = [id(plain_variable(v)) for v in self.trained]
        owners = (_exchanging.setdefault(key, self) for key in keys)
        return next((owner for owner in owners if owner is not self), None)

    def _require_known_averages(self) -> None:
        """Require, in the second step, that no optimizer averages this rank's variables alone."""
        if self._knows_averages:
            return
        if self._unknown_averages is None:
            self._unknown_averages = UnknownAverages(self.trained)
        else:
            self._unknown_averages.require_none()
            self._knows_averages = True

    def _require_sole(self) -> None:
        """Check that nothing else exchanges these variables, or their gradients.

        Raises:
            RuntimeError: something does.
        """
        if self._find_other() is not None:
            gc.collect()  # it may be dropped, and in a cycle of references
        if (other := self._find_other()) is not None:
            raise RuntimeError(
                f"another LocalSteps for these variables, {other.schedule}, was made or restarted "
                f"after this one, {self.schedule}, and both would exchange them: use the later one "
                "alone, or call restart() of this one on all ranks to go on with it"
            )
        if rival := self._rivals.find():
            raise RuntimeError(
                f"{rival.host} has exchanged the gradients of these variables in this step, and "
                "LocalSteps exchanges the variables: use one of the two, LocalSteps with a plain "
                "tape and optimizer. For dense first steps there is warmup_steps=; after others "
                "call restart()"
            )

    # -- what it keeps, and what it has done ---------------------------------------------------

    @property
    def variables(self) -> Sequence[tf.Variable]:
        """Return the variables that a checkpoint keeps, once nothing changes them any more."""
        self.settle()
        return super().variables

    def _trackable_children(self, *args: Any, **kwargs: Any) -> Any:
        """Return what TensorFlow is about to save or load, once nothing changes it any more."""
        self.settle()
        return super()._trackable_children(*args, **kwargs)

    @property
    def title(self) -> str:
        """Return the prefix of the names of what the ranks compare."""
        return self._ranks.title

    @property
    def seconds_waited(self) -> float:
        """Return the seconds in which steps stood still for exchanges, compressing included.

        What a `delay` lets overlap with steps is not in it.
        """
        return sum(fragment.seconds_waited for fragment in self._fragments)

    @property
    def steps_made(self) -> int:
        """Return the local steps so far."""
        return self._machine.counters.steps

    @property
    def rounds(self) -> int:
        """Return how often pseudogradients of the whole model were applied so far."""
        return self._machine.counters.rounds

    @property
    def warms_up(self) -> bool:
        """Return True if gradients are averaged in the next step."""
        return self._machine.warms_up

    @property
    def averages_gradients(self) -> bool:
        """Return True if `reduce_gradients` does something: in warm-up, or with neighbours."""
        return self._averages.has_neighbours or self.warms_up

    @property
    def is_exchanged(self) -> bool:
        """Return True if variables are the global ones; also during warm-up."""
        return self._machine.is_exchanged

    @property
    def reducers(self) -> list[GraphReducer]:
        """Return the reducer of each fragment, once none is at work any more."""
        self.settle()
        return [fragment.reducer for fragment in self._fragments]

    @property
    def others(self) -> list[GraphReducer]:
        """Return the reducers of warm-up and of buffers, if there are any."""
        warmup = self._averages.warmup
        return [*([] if warmup is None else [warmup]), *self._buffer_reducers]

    @property
    def _buffer_reducers(self) -> list[GraphReducer]:
        return [] if self._buffers is None else [self._buffers.exchange.reducer]

    @property
    def trained(self) -> list[Any]:
        """Return the model's variables that are exchanged, by fragment."""
        return [v for fragment in self._fragments for v in fragment.sources]

    @property
    def memory(self) -> dict[str, int]:
        """Return the bytes that it keeps besides reducers; see `CompressionStats.memory`."""
        return dict(sum((Counter(each.memory) for each in self._fragments), Counter()))

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


def _check_use(
    process_set: Any, nonfinite: str | None, optimizer: Optimizer | None, compressor: Compressor
) -> None:
    """Check that this rank can train so.

    Raises:
        ValueError: it takes no part, `nonfinite` is unknown, the optimizer is distributed or not
            built, or the compressor uses moments of samples.
    """
    if not takes_part(process_set):
        raise ValueError(
            "this rank is not in process_set=: make LocalSteps on its ranks alone, and train "
            "without it on the others"
        )
    validate.skip_or_raise(nonfinite, "there is no mean of variables that are not finite")
    if exchanging := exchanges_in(optimizer):
        raise ValueError(
            f"{exchanging} exchanges gradients in every step, and LocalSteps the variables every "
            "so many: pass the plain optimizer, and train with it"
        )
    if not getattr(optimizer, "built", True):
        raise ValueError(
            "optimizer= is not built, so what it keeps is not known: call its "
            "build(model.trainable_variables) before"
        )
    if compressor.uses_moments and getattr(compressor, "moments", "") in ("sample", "microbatch"):
        raise ValueError(
            "moments of samples or micro-batches are those of gradients, and what is exchanged is "
            f"the change of variables over several steps: pass moments='step'. It is {compressor}"
        )


def _check_every(schedule: LocalSchedule, optimizer: Optimizer | None, has_averages: bool) -> None:
    """Check that rounds can have the lengths that they are to have.

    Raises:
        ValueError: the rate that decides them is not known, or moving averages count their steps.
    """
    if schedule.follows_rate and optimizer is None:
        raise ValueError(
            f"every={schedule.every} follows the learning rate: pass optimizer=, the inner one"
        )
    if has_averages and not schedule.is_constant:
        raise ValueError(
            "an optimizer with use_ema=True counts each exchange as every= steps: give every= a "
            "number"
        )


def _settled(outer: Any, compressor: Compressor) -> tuple[OuterSGD, Compressor]:
    """Decide whether the outer optimizer or the compressor applies the momentum.

    Raises:
        TypeError: `outer` is something else.
        ValueError: the compressor corrects another momentum than the outer optimizer's.
    """
    if not isinstance(outer, OuterSGD):
        raise TypeError(f"outer= takes OuterSGD(lr=..., momentum=...), got {outer!r}")
    momentum = outer.momentum, bool(outer.nesterov)
    compressor, gives_up = take_over(compressor, "OuterSGD", momentum)
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
