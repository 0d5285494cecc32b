"""State of a sharded model that steps alone, for `torch.distributed.checkpoint`.

What has one name there is one tensor, of whose shards each is written by one of the ranks that have
it. Between rounds hosts have other parameters, so these would be mixed. Hence the global parameters
have the usual names, and what belongs to a rank has a name with the rank in it, as one value that
needs no template to be loaded.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from hvd_gradcomp.torch.interop.inference import outside_inference
from hvd_gradcomp.torch.interop.shards import local_part, sharded_like
from hvd_gradcomp.torch.local.fragment import without_local
from hvd_gradcomp.torch.local.local_steps import LocalStepsOptimizer
from hvd_gradcomp.torch.local.wrapped_optimizer import KEPT

_WRAPPERS = "_checkpoint_wrapped_module.", "_orig_mod."  # that checkpoints leave out of names
_COUNTERS = "steps", "clock", "rounds", "started"


class Checkpoint:
    """Checkpoint of a sharded model and its local steps, in mid-round too.

        dcp.save({"training": fsdp.Checkpoint(model, optimizer)}, checkpoint_id="last")
        dcp.load({"training": fsdp.Checkpoint(model, optimizer)}, checkpoint_id="last")

    All ranks of the mesh call both. On the same mesh training goes on to the bit. With other hosts,
    or other ranks of a host, load with `whole=True`: all go on from the global parameters, with the
    inner optimizer's state of one host for each shard, and the outer optimizer's; what compressors
    keep is lost.

    Under "model" the checkpoint has what a plain model's has, with the global parameters, and under
    "optimizer" an inner optimizer's, both as `get_state_dict` names them: another program can load
    them without this package.

    Args:
        model: the sharded one.
        optimizer: that `fsdp.local_steps` has made.
        whole: leave out what belongs to single ranks.

    Raises:
        TypeError: the optimizer is another one.
    """

    def __init__(self, model: Any, optimizer: LocalStepsOptimizer, whole: bool = False) -> None:
        if not isinstance(optimizer, LocalStepsOptimizer) or optimizer.sharding is None:
            raise TypeError(
                "fsdp.Checkpoint takes the model and what fsdp.local_steps has returned, got "
                f"{type(optimizer).__name__}"
            )
        self._model, self._optimizer, self._whole = model, optimizer, whole
        self._rank = f"rank{dist.get_rank()}"

    @outside_inference()
    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Return what is saved, or the template of what is loaded."""
        optimizer, model = self._optimizer, self._model
        is_empty = not optimizer.inner.state
        kept = optimizer.common_state_dict()[KEPT]
        saved = {
            "model": {**get_model_state_dict(model), **self._global_parameters(kept)},
            "optimizer": get_optimizer_state_dict(model, optimizer.inner),
            "outer": self._outer_state(),
            "counters": {
                **{name: kept[name] for name in _COUNTERS},
                "begins": is_empty and not kept["steps"],
                "outer begins": "\n".join(self._outer_begins()),
            },
        }
        if is_empty:  # PyTorch has made a step of zeros, for the names of what is loaded
            optimizer.inner.state.clear()
        if not self._whole:
            buffers = {name: b.clone() for name, b in model.named_buffers()}
            saved[self._rank] = _packed({"optimizer": optimizer.saved_state(), "buffers": buffers})
        return saved

    @outside_inference()
    @torch.no_grad()
    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Load what `dcp.load` has put into the template.

        Raises:
            CheckpointError: what belongs to this rank is of another mesh, schedule or compressor.
        """
        optimizer, model = self._optimizer, self._model
        if not saved["counters"]["started"]:
            for name, p in optimizer.named:
                local_part(p).copy_(local_part(saved["model"][_named(name)]))
        if not self._whole:
            of_rank = torch.load(io.BytesIO(saved[self._rank]), weights_only=True)
            optimizer.load_state_dict(of_rank["optimizer"])
            for name, buffer in model.named_buffers():
                buffer.copy_(of_rank["buffers"][name])
            return
        if not saved["counters"]["begins"]:
            set_optimizer_state_dict(model, optimizer.inner, saved["optimizer"])
        self._load_outer(saved["outer"], saved["counters"]["outer begins"].split("\n"))
        state = optimizer.saved_state()
        counters = {name: saved["counters"][name] for name in _COUNTERS}
        values = iter(local_part(saved["model"][_named(name)]) for name, _ in optimizer.named)
        fragments = [
            {**without_local(each), "global": [next(values) for _ in each["global"]], "moved": 0}
            for each in state[KEPT]["fragments"]
        ]
        kept = {**state[KEPT], **counters, "fragments": fragments}
        optimizer.load_rounds({**state, KEPT: kept})

    def _global_parameters(self, kept: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Return the global parameters by name, sharded as the model's."""
        values = [x for fragment in kept["fragments"] for x in fragment["global"]]
        named = self._optimizer.named
        if not kept["started"]:
            values = [local_part(p).clone() for _, p in named]
        return {_named(name): sharded_like(p, x) for (name, p), x in zip(named, values)}

    @property
    def _copies(self) -> list[tuple[str, torch.nn.Parameter, torch.Tensor]]:
        """Return name and parameter of what is exchanged, and its global copy."""
        copies = [c for group in self._optimizer.outer.param_groups for c in group["params"]]
        return [(_named(name), p, c) for (name, p), c in zip(self._optimizer.named, copies)]

    def _outer_begins(self) -> list[str]:
        """Return the names of parameters that have no state: no exchange has stepped them yet."""
        state = self._optimizer.outer.state
        return [name for name, _, c in self._copies if not state.get(c)]

    def _outer_state(self) -> dict[str, Any]:
        """Return the outer optimizer's state by parameter, sharded as the model's."""
        with _state_of(self._optimizer.outer) as state:
            return {
                name: {
                    key: sharded_like(p, x) if torch.is_tensor(x) and x.shape == c.shape else x
                    for key, x in state[c].items()
                }
                for name, p, c in self._copies
            }

    def _load_outer(self, saved: dict[str, Any], begins: Collection[str]) -> None:
        """Load the outer optimizer's state, of all parameters but those that it has not stepped."""
        for name, _, c in self._copies:
            for key, x in saved.get(name, {}).items() if name not in begins else ():
                value = local_part(x).clone() if torch.is_tensor(x) else x
                self._optimizer.outer.state[c][key] = value


def _named(name: str) -> str:
    """Return the name of a parameter in a checkpoint."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _packed(state: dict[str, Any]) -> bytes:
    stream = io.BytesIO()
    torch.save(state, stream)
    return stream.getvalue()


@contextmanager
def _state_of(optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    """Yield an optimizer's state; for what has not stepped, that after a step of zeros."""
    groups = optimizer.param_groups
    rates = [group.get("lr") for group in groups]
    parameters = [p for group in groups for p in group["params"]]
    gradients = [p.grad for p in parameters]
    fresh = [not optimizer.state.get(p) for p in parameters]
    if not any(fresh):
        yield optimizer.state
        return
    for group in groups:
        group["lr"] = 0.0
    for p, begins in zip(parameters, fresh):
        p.grad = torch.zeros_like(p) if begins else None
    with torch.enable_grad():
        optimizer.step()
    for p, gradient in zip(parameters, gradients):
        p.grad = gradient
    for group, rate in zip(groups, rates):
        group["lr"] = rate
    try:
        yield optimizer.state
    finally:
        for p, begins in zip(parameters, fresh):
            if begins:
                optimizer.state.pop(p, None)
