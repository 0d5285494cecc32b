"""What the configuration of a distributed optimizer says, beside what Keras's own does.

See the head of `hvd_gradcomp.tensorflow.keras.optimizer`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import horovod.tensorflow as horovod
import keras

from hvd_gradcomp import __version__
from hvd_gradcomp.algorithms.dense import as_compressor
from hvd_gradcomp.planning import configuration

_OPS = {"Average": horovod.Average, "Sum": horovod.Sum}
_MARK = "hvd_gradcomp"
_instead: dict[str, Any] = {}  # of what was saved, while `load_model` loads


@contextmanager
def in_place_of_what_was_saved(options: Mapping[str, Any]) -> Iterator[None]:
    """Meanwhile `read` gives these arguments instead of what was saved."""
    _instead.update(options)
    try:
        yield
    finally:
        _instead.clear()


def entry(config: dict[str, Any]) -> str:
    """An argument that the plain optimizer takes and ignores, for `decay` with a warning."""
    if "inner_optimizer" in config:
        return "dynamic"
    return "gradcomp" if "decay" in config else "decay"


def parted(config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A configuration without our entry, and that."""
    for name in ("decay", "dynamic", "gradcomp"):
        entry = config.get(name)
        if isinstance(entry, dict) and _MARK in entry:
            return {k: v for k, v in config.items() if k != name}, entry
    return dict(config), {}


def with_changes(config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """A configuration with some changes, made to what a loss scaler is wrapped around."""
    if "inner_optimizer" not in config:
        return {**config, **changes}
    inner = config["inner_optimizer"]
    inner = {**inner, "config": with_changes(inner["config"], changes)}
    return {**config, "inner_optimizer": inner}


def written(given: dict[str, Any], base: type) -> dict[str, Any]:
    """What `DistributedOptimizer` was given, as plain data."""
    compressor = as_compressor(given["compression"], horovod.Compression)
    try:
        compression = configuration.as_config(compressor)
    except TypeError:  # somebody else's
        compression = None
    process_set = given["process_set"]
    everybody = process_set is horovod.global_process_set
    return {
        **given,
        _MARK: __version__,
        "optimizer": keras.saving.get_registered_name(base),
        "compression": compression,
        "op": next(name for name, op in _OPS.items() if op == given["op"]),
        "process_set": None if everybody else list(process_set.ranks),
    }


def read(saved: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `DistributedOptimizer`, but for what is given instead.

    Raises:
        ValueError: there is something that is not known here.
    """
    known = {k: v for k, v in saved.items() if k not in (_MARK, "optimizer", "plain", "local")}
    known = {k: v for k, v in known.items() if k not in _instead}
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
    return {**known, **_instead}


def named(name: str) -> type:
    """The class of an optimizer that is registered, or Keras's.

    Raises:
        TypeError: there is none.
    """
    found = keras.saving.get_registered_object(name) or vars(keras.optimizers).get(name)
    if found is None:
        raise TypeError(
            f"there is no optimizer {name!r} here: pass custom_objects= or custom_optimizers=, or "
            "decorate its class with @keras.saving.register_keras_serializable()"
        )
    return found
