"""The compressor's state inside `optimizer.state_dict()["gradcomp"]`."""

from __future__ import annotations

from typing import Any

import torch

from hvd_gradcomp.aggregator import is_replicated, leaves, with_leaves
from hvd_gradcomp.torch.engine import Engine

FORMAT = 2


def save(engine: Engine) -> dict[str, Any]:
    """This rank's state: what was accumulated and not yet sent, rungs, steps, and whose it is."""
    return {
        "format": FORMAT,
        "compressor": repr(engine.compressor),
        "rank": engine.process_set.rank(),
        "size": engine.process_set.size(),
        "steps": engine.steps,
        "order": engine.order,
        "buckets": [
            {
                "digest": bucket.layout.digest,
                "names": bucket.layout.names,
                "state": {path: x.detach().clone() for path, x in leaves(bucket.state)},
            }
            for bucket in engine.buckets
        ],
    }


def load(engine: Engine, saved: dict[str, Any]) -> None:
    """Takes a saved state back.

    A state that another rank saved (rank 0's, broadcast to all) brings its replicated fields
    only: its residual belongs to that rank and would be applied once a rank otherwise. This
    rank's own residual stays as it is.

    Raises:
        ValueError: the state is of another format, compressor or model.
    """
    if saved.get("format") != FORMAT:
        raise ValueError(f"gradcomp state has format {saved.get('format')!r}, expected {FORMAT}")
    if saved["compressor"] != repr(engine.compressor):
        raise ValueError(
            f"the checkpoint was made with {saved['compressor']}, this optimizer has "
            f"{engine.compressor!r}; use the same compression= to resume"
        )
    if saved["order"]:
        engine.reorder(saved["order"])
    digests = [bucket.layout.digest for bucket in engine.buckets]
    if [b["digest"] for b in saved["buckets"]] != digests:
        old = {name for b in saved["buckets"] for name in b["names"]}
        new = {name for b in engine.buckets for name in b.layout.names}
        differing = sorted(old ^ new) or ["shapes, dtypes or the order of parameters"]
        raise ValueError(f"the checkpoint is of another model; different: {', '.join(differing)}")
    place = (engine.process_set.rank(), engine.process_set.size())
    own = (saved["rank"], saved["size"]) == place
    for bucket, entry in zip(engine.buckets, saved["buckets"]):
        values: list[torch.Tensor] = []
        for path, current in leaves(bucket.state):
            take = own or is_replicated(bucket.compressor, path)
            values.append(entry["state"][path].to(current.device).clone() if take else current)
        bucket.state = with_leaves(bucket.state, values)
    engine.steps = saved["steps"]
