"""Places of variables among all that an optimizer trains, and those that are this rank's alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras

from hvd_gradcomp.tensorflow.interop.variables import keep_own, plain_variable


def places_of(optimizer: keras.optimizers.Optimizer, variables: Sequence[Any]) -> list[int]:
    """Return the places of some variables among all.

    Raises:
        ValueError: some are not among them, or one is given twice.
    """
    key = optimizer._var_key
    known = {key(v): i for i, v in enumerate(optimizer._trainable_variables)}
    unknown = [v.path for v in variables if key(v) not in known]
    if unknown:
        raise ValueError(
            f"{', '.join(unknown)} did not train when this optimizer was built: compile the "
            "model with a new DistributedOptimizer, or build it while all that will be trained "
            "is trainable"
        )
    twice = {v.path for i, v in enumerate(variables) if any(v is w for w in variables[:i])}
    if twice:
        raise ValueError(
            f"{', '.join(sorted(twice))} was given twice, with a gradient each: add them up before"
        )
    return [known[key(v)] for v in variables]


def local_places(
    variables: Sequence[Any], find_local: Sequence[Callable[[], list[Any]]], known: frozenset[int]
) -> frozenset[int]:
    """Mark the variables that are this rank's alone, for its own files, and return their places.

    Args:
        variables: all that are trained.
        find_local: functions that return local variables.
        known: places that are known already.

    Raises:
        ValueError: all are local.
    """
    places = {id(plain_variable(v)): place for place, v in enumerate(variables)}
    indices = {places.get(id(plain_variable(v))) for find in find_local for v in find()}
    local = frozenset(place for place in indices if place is not None)
    local |= known
    for place in local:
        keep_own(plain_variable(variables[place]))
    if local and len(local) == len(variables):
        raise ValueError(
            "all that is trained is local, so there is nothing to exchange: use the optimizer "
            "as it is, without hvd.DistributedOptimizer"
        )
    return local
