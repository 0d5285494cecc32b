"""Assignment of layers to compressors and buckets.

Rules, in this order:

* A compressor assigns the layers (`Compressor.of_layers`): `partition` by its rules; methods made
  for some layers leave the others to another compressor; most take all.
* A layer is sent dense, in buckets of such layers, if compression saves nothing: if its share of a
  payload (`layer_bytes`, ibid.) is at least 4 bytes for each element, or if it has no elements.
* If the optimizer's momentum was taken over, layers whose compressor does not correct momentum
  get theirs after the exchange.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod
from typing import Any, Union

from hvd_gradcomp.algorithms.combined.wrappers import corrected, part
from hvd_gradcomp.algorithms.dense import NoneCompressor
from hvd_gradcomp.core import validate
from hvd_gradcomp.core.layers import ROLES, Layer, Traits, traits_of
from hvd_gradcomp.core.layout import Layout, outputs_first, plan_buckets
from hvd_gradcomp.method.compressor import Compressor, Context, Program, State, derived
from hvd_gradcomp.method.handover import Correction, Handover, correction_of
from hvd_gradcomp.ops import Ops, Tensor

_WHOLE = 1 << 62


@dataclass(frozen=True)
class Role:
    """Rule that matches layers by role; made by `role`."""

    names: tuple[str, ...]

    def __repr__(self) -> str:
        return f"role({', '.join(map(repr, self.names))})"

    def matches(self, layer: Traits) -> bool:
        """Return True if the layer has one of the roles."""
        return not layer.roles.isdisjoint(self.names)


@dataclass(frozen=True)
class Smaller:
    """Rule that matches layers with fewer elements; made by `smaller`."""

    size: int

    def __repr__(self) -> str:
        return f"smaller({self.size})"

    def matches(self, layer: Traits) -> bool:
        """Return True if the layer has fewer elements."""
        return layer.size < self.size


@dataclass(frozen=True)
class Named:
    """Rule that matches layer names by a shell-style pattern."""

    pattern: str

    def __repr__(self) -> str:
        return repr(self.pattern)

    def matches(self, layer: Traits) -> bool:
        """Return True if the layer's name matches."""
        return fnmatchcase(layer.name, self.pattern)


Rule = Union[Role, Smaller, Named]


def role(*names: str) -> Role:
    """Match layers by role, for `partition`, judged by name and shape.

    Args:
        names: of "bias" (named bias or beta), "norm" (a vector named weight or gamma, and its
            bias), "embedding" (embed in its name), "first" and "last" (the first and the last
            layer with a matrix or more, and its bias).

    Raises:
        ValueError: a role is unknown.
    """
    for name in names:
        if name not in ROLES:
            raise ValueError(f"role {validate.not_among(name, ROLES)}")
    if not names:
        raise ValueError(f"role() needs at least one of {', '.join(ROLES)}")
    return Role(names)


def smaller(size: int) -> Smaller:
    """Match layers with fewer elements, for `partition`.

    Raises:
        ValueError: the size is not a positive integer.
    """
    rule = Smaller(size)
    validate.whole(rule, "size", low=1)
    return rule


@dataclass(frozen=True)
class Partition(Handover):
    """Compressors for each layer, by rules; made by `partition`."""

    rules: tuple[tuple[Rule, Compressor], ...]

    runs = False

    def __post_init__(self) -> None:
        if len(self._sources) > 1:
            raise ValueError(
                f"partition: its compressors take moments from {sorted(self._sources)}; give all "
                "of them the same moments="
            )

    def __str__(self) -> str:
        return f"partition([{', '.join(f'({rule!r}, {c})' for rule, c in self.rules)}])"

    @property
    def _sources(self) -> set[str]:
        return {getattr(c, "moments", "") for _, c in self.rules if c.uses_moments}

    @derived
    def moments(self) -> str:
        """Source of second moments, shared by all its compressors that use some."""
        return next(iter(self._sources), "")

    @derived
    def uses_moments(self) -> bool:
        return any(c.uses_moments for _, c in self.rules)

    @property
    def correction(self) -> Correction | None:
        known = {correction_of(c) for _, c in self.rules} - {None}
        if len(known) > 1:
            raise ValueError(
                "the compressors of a partition correct different momenta, and an optimizer has "
                f"one. Give all of them the same momentum= and nesterov=. Got {self}"
            )
        return known.pop() if known else None

    def corrected(self, momentum: float, nesterov: bool) -> Compressor:
        return Partition(tuple((r, corrected(c, momentum, nesterov)) for r, c in self.rules))

    @derived
    def needs_execution_order(self) -> bool:
        return any(c.needs_execution_order for _, c in self.rules)

    def of_layers(self, layers: Sequence[Layer], ranks: int) -> list[Compressor]:
        """Return the compressor of each layer.

        Raises:
            ValueError: a rule matches no layer; two match one layer with different compressors;
                no rule matches a layer.
        """
        chosen = self._by_rule(layers)
        whole: list[Compressor] = list(chosen)
        for method in dict.fromkeys(chosen):  # each may assign its layers in turn
            places = [place for place, other in enumerate(chosen) if other == method]
            inner_compressors = method.of_layers([layers[place] for place in places], ranks)
            for place, inner in zip(places, inner_compressors):
                whole[place] = inner
        return whole

    def _by_rule(self, layers: Sequence[Layer]) -> list[Compressor]:
        traits = traits_of(layers)
        rest = [c for rule, c in self.rules if rule == Named("*")]
        rules = [(rule, c) for rule, c in self.rules if rule != Named("*")]
        compressors: list[Compressor] = []
        matched: set[int] = set()
        for layer in traits:
            hits = [i for i, (rule, _) in enumerate(rules) if rule.matches(layer)]
            matched.update(hits)
            chosen = {rules[i][1] for i in hits}
            if len(chosen) > 1:
                named = " and ".join(repr(rules[i][0]) for i in hits)
                raise ValueError(
                    f"partition: {named} conflict: both match {layer.name}, with different "
                    "compressors. Make one of them narrower"
                )
            if not hits and not rest:
                raise ValueError(
                    f'partition: no rule matches {layer.name}; end with ("*", ...) for the rest'
                )
            compressors.append(chosen.pop() if hits else rest[0])
        for place, (rule, _) in enumerate(rules):
            if place not in matched:
                names = ", ".join(t.name for t in traits[:8])
                raise ValueError(
                    f"partition: {rule!r} matches no layer; there are {names}"
                    + (f" and {len(traits) - 8} more" if len(traits) > 8 else "")
                )
        return compressors

    def init(self, ops: Ops, layout: Layout) -> State:
        raise TypeError("a partition has no state: each of its compressors has buckets of its own")

    def aggregate(
        self, ops: Ops, context: Context, gradient: Tensor, state: State, **extra: Tensor
    ) -> Program:
        raise TypeError("a partition runs nothing: each of its compressors has buckets of its own")


def partition(
    rules: Mapping[Any, Compressor | None] | Iterable[tuple[Any, Compressor | None]],
) -> Partition:
    """Choose a compressor for each layer by rules.

    Args:
        rules: (rule, compressor) pairs or a mapping. A rule is a pattern for the layer's name
            ("encoder.*", "*.bias"), `role(...)` or `smaller(size)`; "*" matches all layers that
            no other rule matches. None as a compressor is no compression.

    Returns:
        A value for `compression=` of `DistributedOptimizer`.

    Raises:
        TypeError: a rule or a compressor is something else.
        ValueError: there are no rules. When the optimizer is made: a rule matches no layer; two
            match one layer with different compressors; no rule matches a layer.

    >>> print(partition([(role("bias", "norm"), None), ("*", NoneCompressor())]))
    partition([(role('bias', 'norm'), NoneCompressor()), ('*', NoneCompressor())])
    """
    pairs = list(rules.items() if isinstance(rules, Mapping) else rules)
    if not pairs:
        raise ValueError("partition: there are no rules")
    made: list[tuple[Rule, Compressor]] = []
    for rule, compressor in pairs:
        if isinstance(rule, str):
            rule = Named(rule)
        if not isinstance(rule, (Role, Smaller, Named)):
            raise TypeError(f"partition: a rule is a pattern, role() or smaller(), got {rule!r}")
        made.append((rule, part(f"partition: {rule!r}", compressor)))
    return Partition(tuple(made))


def assign(
    compressor: Compressor, layers: Sequence[Layer], ranks: int = 1, filters_last: bool = False
) -> list[Compressor]:
    """Return the compressor of each layer, by the rules at the head of this file.

    Args:
        layers: (name, shape, dtype) in the order of the model.
        ranks: number of ranks that exchange.
        filters_last: see `Layout`.

    Raises:
        ValueError: a compressor does not fit the layers or the ranks; or it takes momentum over,
            and there is no optimizer.
    """
    chosen = compressor.of_layers(layers, ranks)
    momentum, nesterov = correction_of(compressor) or (0.0, False)
    if momentum is None:
        raise ValueError(
            "there is no optimizer here to take the momentum over from; give momentum=0.9, or "
            f"momentum=0 to go without. Got {compressor}"
        )
    assigned = []
    for (name, shape, _), method in zip(layers, chosen):
        share: float | None = 0.0
        if prod(shape):  # so that no method divides by zero
            stored = outputs_first(name, shape) if filters_last else shape
            share = method.layer_bytes(stored)
        if share is not None and share >= 4 * prod(shape):
            method = NoneCompressor()
        assigned.append(corrected(method, momentum, bool(nesterov)))
    return assigned


def plan(
    compressor: Compressor,
    layers: Sequence[Layer],
    bucket_bytes: int,
    devices: Sequence[Any] | None = None,
    left_out: Collection[int] = (),
    ranks: int = 1,
    filters_last: bool = False,
) -> list[tuple[Compressor, Layout]]:
    """Plan the buckets of a model, last layers first, each with its compressor.

    Args:
        layers: (name, shape, dtype) in the order of the model.
        bucket_bytes: target size of a bucket.
        devices: device of each layer, if they differ.
        left_out: positions of layers that get no bucket.
        ranks: number of ranks that exchange.
        filters_last: see `Layout`.
    """
    groups: dict[tuple[Any, Compressor], list[Layer]] = {}
    places = devices or [None] * len(layers)
    assigned = assign(compressor, layers, ranks, filters_last)
    described = [
        item for place, item in enumerate(zip(layers, assigned, places)) if place not in left_out
    ]
    for (name, shape, dtype), method, device in reversed(described):
        native = dtype if dtype in method.native_dtypes else "float32"
        groups.setdefault((device, method), []).append((name, shape, native))
    buckets = []
    for (_, method), members in groups.items():
        target = _WHOLE if method.whole_model else bucket_bytes
        for layout in plan_buckets(members, target, method.block, filters_last):
            layout = layout.with_outputs_first() if method.outputs_first else layout
            method.check(layout)
            buckets.append((method, layout))
    return buckets
