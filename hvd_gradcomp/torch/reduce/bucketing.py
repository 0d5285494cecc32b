"""Planning of a model's buckets while it trains: layers join, the execution order is learned.

A parameter joins the exchange by `optimizer.add_param_group`, or by `requires_grad_(True)` where it
did not train when the optimizer was made. It gets a bucket beside those that are there, which keep
their layers and state. All ranks do the same before the same step.
"""

from __future__ import annotations

import glob
import logging
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import torch

from hvd_gradcomp.algorithms.dense import NoneCompressor
from hvd_gradcomp.core.layers import Layer, Weight, convolving
from hvd_gradcomp.core.layout import Layout
from hvd_gradcomp.method.compressor import Compressor
from hvd_gradcomp.method.handover import Handover
from hvd_gradcomp.method.learned import retrained
from hvd_gradcomp.ops.torch import TorchOps
from hvd_gradcomp.planning import assignment, worth
from hvd_gradcomp.planning.announcement import announce, announcement
from hvd_gradcomp.runtime import naming
from hvd_gradcomp.runtime.program_runner import Participants
from hvd_gradcomp.torch.interop.owners import owners_of
from hvd_gradcomp.torch.moments import tracker
from hvd_gradcomp.torch.reduce.bucket import Bucket, Named, as_real
from hvd_gradcomp.torch.reduce.options import ExchangeOptions
from hvd_gradcomp.torch.reduce.sources import STORED, source_of

LOGGER = logging.getLogger("hvd_gradcomp")
BUCKET_BYTES = 25 << 20  # large enough to make call and launch overhead negligible

_DTYPES = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
)


class Plan(NamedTuple):
    """All that a planner has decided, by reference, for rollback."""

    named: list[tuple[str, torch.nn.Parameter]]
    layers: list[Layer]
    used: list[Layer]
    order: list[str]
    arrived: list[str] | None
    buckets: list[Bucket]


class BucketPlanner:
    """Planner of a model's buckets.

    Args:
        named_parameters: (name, parameter) of everything that is reduced; the order is the same
            on all ranks.
        compressor: assigned to the layers.
        participants: the ranks.
        options: of the exchange.
        name: prefix of the names of all collectives.
        tracking: the call that sets up per-sample moments, for messages; None if what is exchanged
            are no gradients of samples.
        owners: (name, parameter) of the model, if what is reduced are copies of its parameters:
            their modules tell what convolves.

    Attributes:
        named_parameters, ordered_parameters: in the user's order, which is the same on all ranks.
        names: of the parameters.
        layers: of the model, in the user's order.
        used: the same layers in planned order.
        order: layer names in execution order, once known.
        arrived: names of layers in the order in which gradients arrive, while that is to be
            learned; None if the buckets follow it, or need not.
        buckets: in the order in which backward fills them.
        places: the bucket of each parameter, and its slot there; always the same dictionary.
        source: of second moments; see `source_of`.
        judged: whether the compressor pays off was asked.
    """

    def __init__(
        self,
        named_parameters: Named,
        compressor: Compressor,
        participants: Participants,
        options: ExchangeOptions,
        *,
        name: str,
        tracking: str | None,
        owners: Named | None = None,
    ) -> None:
        _require_data(named_parameters)
        self.name, self._participants = name, participants
        self.compressor = compressor = leaving_dense(compressor, named_parameters)
        self.order: list[str] = []
        self.arrived: list[str] | None = [] if compressor.needs_execution_order else None
        self._bucket_bytes = options.bucket_bytes
        self._know(named_parameters)
        self.layers = layers_of(named_parameters, owners)
        assigned = assignment.assign(compressor, self.layers, self._ranks)
        using = [pair for pair, one in zip(named_parameters, assigned) if one.uses_moments]
        self.source = source_of(compressor, using, options.passes, self._tells, tracking)
        self.judged = False
        self.places: dict[torch.nn.Parameter, tuple[Bucket, int]] = {}
        self._adopt(list(self._plan(self.named_parameters)))

    @property
    def _ranks(self) -> int:
        return self._participants.rank_and_size[1]

    @property
    def _tells(self) -> bool:
        """Return True if this rank logs what all would."""
        return bool(self._participants.process_set.rank() == 0)

    def _adopt(self, buckets: list[Bucket]) -> None:
        self.buckets = buckets
        self.places.clear()
        for bucket in buckets:
            for slot, p in enumerate(bucket.parameters):
                self.places[p] = bucket, slot

    def _know(self, named_parameters: Named) -> None:
        self.named_parameters = list(named_parameters)
        self.ordered_parameters = [p for _, p in named_parameters]
        self.names = {p: name for name, p in named_parameters}

    def _plan(self, named_parameters: Named, placed: Collection[Bucket] = ()) -> Iterator[Bucket]:
        """Yield new buckets in the order in which backward fills them: last layers first.

        Args:
            named_parameters: (name, parameter) of all that is reduced.
            placed: existing buckets; their layers are left out.

        Raises:
            ValueError: a parameter's dtype is not supported; a compressor cannot take it.
        """
        for title, p in named_parameters:
            if p.dtype not in _DTYPES:
                known = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
                raise ValueError(f"{title} has dtype {p.dtype}; what is reduced is {known}")
        layers = {layer[0]: layer for layer in self.layers}
        new = layers_of([pair for pair in named_parameters if pair[0] not in layers])
        layers |= {layer[0]: layer for layer in new}
        self.used = [layers[name] for name, _ in named_parameters]
        by_name = dict(named_parameters)
        devices = [p.device for _, p in named_parameters]
        ops_by_device = {device: TorchOps(device) for device in devices}
        placed_names = {title for bucket in placed for title in bucket.layout.names}
        left_out = [at for at, layer in enumerate(self.used) if layer[0] in placed_names]
        target, ranks = self._bucket_bytes or BUCKET_BYTES, self._ranks
        plan = assignment.plan(self.compressor, self.used, target, devices, left_out, ranks)
        # If layers may change buckets, once their order is known, slot 0 leads all of them.
        place = self._participants.place
        turns = 1 if place is None or self.compressor.needs_execution_order else place.slots
        for index, (one, layout) in enumerate(plan, len(placed)):
            parameters, leader = [by_name[title] for title in layout.names], index % turns
            ops = ops_by_device[parameters[0].device]
            stores = one.uses_moments and self.source in STORED
            moment = ops.zeros((layout.size,)) if stores else None
            flat = ops.zeros((layout.size,), layout.dtype)
            scaled = one.in_halves(layout)
            if not self._participants.leads(leader):
                one = NoneCompressor()  # only the leader has state
            state = one.start(ops, layout, ranks)
            title = naming.bucket(self.name, index, layout)
            bucket = Bucket(title, layout, one, ops, parameters, flat, moment, state)
            bucket.leader, bucket.scaled = leader, scaled
            yield bucket

    def add(self, named_parameters: Named, step: int) -> list[Bucket]:
        """Plan buckets for parameters that join, on all ranks before the same step.

        The ranks compare their configuration again. Methods that learn start to learn the new
        layers at this step.

        Args:
            named_parameters: those that join.
            step: number of exchanges before this one.

        Returns:
            The new buckets.

        Raises:
            ValueError: the compressor orders the layers of the whole model (LGC, or a partition
                with it); second moments of the parameters are not tracked; a dtype is not
                supported.
        """
        _require_data(named_parameters)
        names = ", ".join(name for name, _ in named_parameters)
        if self.compressor.needs_execution_order:
            raise ValueError(
                f"the compressor plans the whole model at once: {names} cannot join. Build a new "
                "DistributedOptimizer once all that will be trained requires gradients. It is "
                f"{self.compressor}"
            )
        untracked = [
            name
            for name, p in named_parameters
            if not tracker.is_tracked(p) and not tracker.is_sent_dense(p)
        ]
        if self.source == "sample" and untracked:
            raise ValueError(
                "moments='sample' needs hvd.track_moments(model) before its parameters join; not "
                f"tracked: {', '.join(untracked)}"
            )
        if self.source == "sample":
            self.compressor = leaving_dense(self.compressor, named_parameters)
        everything = [*self.named_parameters, *named_parameters]
        new = list(self._plan(everything, self.buckets))
        for bucket in new:
            bucket.since = step
            bucket.state = retrained(bucket.compressor, bucket.ops, bucket.state, step)
        self._know(everything)
        self.layers += self.used[len(self.used) - len(named_parameters) :]
        self._adopt([*self.buckets, *new])
        return new

    @property
    def plan(self) -> Plan:
        """Return all that was decided, for rollback; joined parameters included."""
        arrived = None if self.arrived is None else list(self.arrived)
        decided = list(self.named_parameters), list(self.layers), list(self.used), list(self.order)
        return Plan(*decided, arrived, list(self.buckets))

    @plan.setter
    def plan(self, plan: Plan) -> None:
        self._know(plan.named)
        self.layers = list(plan.layers)
        self.used, self.order = list(plan.used), list(plan.order)
        self.arrived = None if plan.arrived is None else list(plan.arrived)
        self._adopt(list(plan.buckets))

    def fix_order(self) -> None:
        """Fix the execution order; gradients that arrive later are those of unused layers."""
        assert self.arrived is not None
        self.order, self.arrived = list(dict.fromkeys(self.arrived))[::-1], []

    def unorder(self) -> None:
        """Plan the buckets in the model's order, until a step shows the execution order again."""
        self.arrived, self.order = [], []
        self._adopt(list(self._plan(self.named_parameters)))

    def reorder(self, order: Sequence[str]) -> None:
        """Plan the buckets for this execution order, the same on all ranks.

        The new buckets inherit velocities, and residuals where their compressor has them.
        """
        self.arrived, self.order = None, list(order)
        known, ranks, names = dict(self.named_parameters), self._ranks, as_used(self.layers, order)
        layers = {layer[0]: layer for layer in self.layers}
        before = assignment.assign(self.compressor, self.used, ranks)
        after = assignment.assign(self.compressor, [layers[name] for name in names], ranks)
        if dict(zip((name for name, _, _ in self.used), before)) == dict(zip(names, after)):
            return
        left = self.buckets
        self._adopt(list(self._plan([(name, known[name]) for name in names])))
        carry_over(left, self.buckets)

    @property
    def assigned(self) -> list[tuple[Compressor, Layout]]:
        """Return the buckets with their compressors, whichever ranks lead them."""
        target = self._bucket_bytes or BUCKET_BYTES
        return assignment.plan(self.compressor, self.used, target, ranks=self._ranks)

    def report(self, tells: bool | None = None, scope: str = "") -> None:
        """Log once what begins, on one rank; see `announcement`, and `warn_if_unprofitable`.

        Args:
            tells: this rank does; None for the first one of those that exchange.
            scope: as in `announcement`.
        """
        if self.judged or not self.ordered:
            return
        self.warn_if_unprofitable()
        if self._tells if tells is None else tells:
            among_hosts = self._participants.place is not None
            scope = scope or ("between hosts" if among_hosts else "")
            announce(announcement(self.compressor, self.assigned, self._ranks, scope=scope))

    def warn_if_unprofitable(self) -> None:
        """Warn once, on one rank, if the compressor does not pay off on this model."""
        if self.judged or not self.ordered:
            return
        self.judged = True
        if self._tells:
            for line in worth.warnings(self.compressor, self.assigned, self._ranks):
                LOGGER.warning("%s", line)

    def rename(self, name: str) -> None:
        """Change the prefix of all names on the timeline."""
        self.name = name
        for place, bucket in enumerate(self.buckets):
            bucket.name = naming.bucket(name, place, bucket.layout)

    @property
    def ordered(self) -> bool:
        """Return True if the buckets follow the execution order, or need not."""
        return self.arrived is None

    @property
    def moments_of_layers(self) -> list[str]:
        """Describe how the per-sample moments of each layer in `used` are found; [] if not used."""
        if self.source != "sample":
            return []
        known = dict(self.named_parameters)
        return [tracker.how(known[name]) for name, _, _ in self.used]


def leaving_dense(compressor: Compressor, named_parameters: Named) -> Compressor:
    """Return the compressor without the layers that `track_moments(..., others="dense")` excludes.

    They are exchanged dense.
    """
    if not compressor.uses_moments or getattr(compressor, "moments", "") not in ("auto", "sample"):
        return compressor
    apart = [name for name, p in named_parameters if tracker.is_sent_dense(p)]
    if not apart:
        return compressor
    rules = [(assignment.Named(glob.escape(name)), NoneCompressor()) for name in apart]
    return assignment.Partition((*rules, (assignment.Named("*"), compressor)))


def carry_over(before: Sequence[Bucket], after: Sequence[Bucket]) -> None:
    """Copy velocities to the new buckets, and residuals where the new compressor has them."""
    velocities: dict[str, torch.Tensor] = {}
    residuals: dict[str, torch.Tensor] = {}
    for bucket in before:
        one = bucket.compressor
        if not isinstance(one, Handover):
            continue
        for kept, vector in (
            (velocities, one.velocity(bucket.state)),
            (residuals, one.residual(bucket.state)),
        ):
            if vector is not None:
                kept.update(zip(bucket.layout.names, bucket.cut(vector)))
    for bucket in after:
        one, ops, state = bucket.compressor, bucket.ops, bucket.state
        if not isinstance(one, Handover):
            continue
        if set(bucket.layout.names) <= set(velocities):
            state = one.with_velocity(state, bucket.joined(velocities))
        kept_before = set(bucket.layout.names) <= set(residuals)
        if kept_before and one.residual(state) is not None:
            nothing = ops.zeros((bucket.layout.size,))
            state, _ = one.inherit(ops, state, nothing, bucket.joined(residuals))
        bucket.state = state


def as_used(layers: Sequence[Layer], order: Sequence[str]) -> list[str]:
    """Return layer names in the order of use, with unused layers in the middle."""
    used = set(order)
    unused = [name for name, _, _ in layers if name not in used]
    middle = len(order) // 2
    return [*order[:middle], *unused, *order[middle:]]


def layers_of(named_parameters: Named, owners: Named | None = None) -> list[Layer]:
    """Return the `Layer` of each parameter: (name, shape, dtype), a `Weight` if its use is known.

    A complex parameter is described as a real one of shape [..., 2].

    Args:
        named_parameters: what is reduced.
        owners: the same of the model, if `named_parameters` are copies of its parameters.
    """
    owners = named_parameters if owners is None else owners
    kernels = _kernels([p for _, p in owners if p.dim() > 2 and not p.is_complex()])
    layers: list[Layer] = []
    for (name, p), (_, owner) in zip(named_parameters, owners):
        real = as_real(p.detach())
        described = name, tuple(real.shape), str(real.dtype).removeprefix("torch.")
        known = kernels.get(id(owner))
        layers.append(described if known is None else Weight(*described, convolves=known))
    return layers


def _kernels(parameters: Sequence[torch.nn.Parameter]) -> dict[int, bool]:
    """Return, by id, True for parameters of convolutions; omit those of unknown modules."""
    kernels: dict[int, bool] = {}
    for module, p in owners_of(parameters):
        known = convolving(type(module))
        if known is not None:
            kernels[id(p)] = known or kernels.get(id(p), False)
    return kernels


def _require_data(named_parameters: Named) -> None:
    """Check that all parameters have data.

    Raises:
        ValueError: one is on the device "meta", where tensors have no data.
    """
    empty = [name for name, p in named_parameters if p.is_meta]
    if empty:
        raise ValueError(
            f"on the device meta, where tensors have no data: {', '.join(empty[:8])}. Materialize "
            "them first, by model.to_empty(device=...) and an initialisation or by "
            "load_state_dict(..., assign=True); then make the optimizer"
        )
