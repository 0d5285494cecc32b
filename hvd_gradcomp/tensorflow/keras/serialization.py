"""Configuration of a distributed optimizer, beside Keras's own.

See the head of `hvd_gradcomp.tensorflow.keras.optimizer`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import horovod.tensorflow as horovod
import keras

from hvd_gradcomp import __version__
from hvd_gradcomp.method.compressor import Compressor
from hvd_gradcomp.planning import configuration
from hvd_gradcomp.tensorflow.reduce.options import ExchangeOptions
from hvd_gradcomp.tensorflow.reduce.reducer import LOGGER

_OPS = {"Average": horovod.Average, "Sum": horovod.Sum}
_MARK = "hvd_gradcomp"
_overrides: dict[str, Any] = {}  # replaces saved arguments while `load_model` loads


@contextmanager
def overriding(options: Mapping[str, Any]) -> Iterator[None]:
    """Make `read` return these arguments instead of the saved ones, in this context."""
    _overrides.update(options)
    try:
        yield
    finally:
        _overrides.clear()


def entry(config: dict[str, Any]) -> str:
    """Choose an argument that the plain optimizer takes and ignores; `decay` with a warning."""
    if "inner_optimizer" in config:
        return "dynamic"
    return "gradcomp" if "decay" in config else "decay"


def split_entry(config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a configuration into one without our entry, and the entry."""
    for name in ("decay", "dynamic", "gradcomp"):
        entry = config.get(name)
        if isinstance(entry, dict) and _MARK in entry:
            return {k: v for k, v in config.items() if k != name}, entry
    return dict(config), {}


def with_changes(config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration with some changes, applied to the optimizer inside a loss scaler."""
    if "inner_optimizer" not in config:
        return {**config, **changes}
    inner = config["inner_optimizer"]
    inner = {**inner, "config": with_changes(inner["config"], changes)}
    return {**config, "inner_optimizer": inner}


def written(compressor: Compressor, options: ExchangeOptions, base: type) -> dict[str, Any]:
    """Return the arguments of `DistributedOptimizer` as plain data.

    Args:
        compressor: as the user passed it.
        options: the other arguments.
        base: the class of the plain optimizer.
    """
    try:
        compression = configuration.as_config(compressor)
    except TypeError:  # a compressor of a user's own
        compression = None
    process_set = options.process_set
    is_global = process_set is horovod.global_process_set
    return {
        "compression": compression,
        **vars(options),
        _MARK: __version__,
        "optimizer": keras.saving.get_registered_name(base),
        "op": next(name for name, op in _OPS.items() if op == options.op),
        "process_set": None if is_global else list(process_set.ranks),
    }


def read(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the saved arguments of `DistributedOptimizer`, or those given in their place.

    Raises:
        ValueError: an argument is not known here.
    """
    known = {k: v for k, v in saved.items() if k not in (_MARK, "optimizer", "plain", "local")}
    known = {k: v for k, v in known.items() if k not in _overrides}
    if saved.get("local", ()) is None:
        raise ValueError(
            "it was saved before it was built, so which of its layers are local is not known: make "
            "it anew with hvd.PartialDistributedOptimizer"
        )
    if "op" in known:
        known["op"] = _OPS[known["op"]]
    if "compression" in known:
        known["compression"] = configuration.from_config(known["compression"])
        if known["compression"] is None:
            raise ValueError(
                "its compressor is no plain data and was not saved: give "
                "hvd.load_model(..., compression=...)"
            )
    if known.get("process_set") is not None:
        raise ValueError(
            f"it was saved for the ranks {known['process_set']} alone: give "
            "hvd.load_model(..., process_set=...)"
        )
    known.pop("process_set", None)
    return {**known, **_overrides}


def named(name: str) -> type:
    """Return an optimizer class by its name: a registered one, or Keras's.

    Raises:
        TypeError: there is none.
    """
    optimizer_class = keras.saving.get_registered_object(name) or vars(keras.optimizers).get(name)
    if optimizer_class is None:
        raise TypeError(
            f"there is no optimizer {name!r} here: pass custom_objects= or custom_optimizers=, or "
            "decorate its class with @keras.saving.register_keras_serializable()"
        )
    return optimizer_class


def load_variables(
    store: Mapping[str, Any], variables: Sequence[Any], plain_here: int, plain: int, same: bool
) -> None:
    """Load the variables of another optimizer, as far as they fit.

    Args:
        store: what is loaded, by place.
        variables: of the optimizer that loads; those of the plain optimizer come first.
        plain_here: how many of these are the plain optimizer's.
        plain: the same of what is loaded.
        same: whether the others are of an exchange like this.
    """

    def fits(place: int, variable: Any) -> bool:
        return tuple(store[str(place)].shape) == tuple(variable.shape)

    count, placed = len(store.keys()), list(enumerate(variables))
    pairs = [pair for pair in placed[:plain_here][:plain] if fits(*pair)]
    of_exchange = placed[plain_here:]
    same = same and count == len(variables) and plain == plain_here
    if same and all(fits(*pair) for pair in of_exchange):
        pairs += of_exchange
    elif of_exchange and count > plain:
        LOGGER.warning(
            "the exchange begins anew: the saved one had another compressor or number of ranks, "
            "or it is hierarchical, whose state only hvd.save_checkpoint keeps"
        )
    for place, variable in pairs:
        variable.assign(store[str(place)])
