"""Gradient probe for PyTorch: hooks copy the probed gradients before they are exchanged.

A gradient is exchanged within backward, in place; after backward `p.grad` is reduced. So a hook of
the parameter copies the probed elements, after the gradient is accumulated and before Horovod's or
DistributedDataParallel's hooks. Hooks are registered only if the next step is probed.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Any, Protocol

import torch
import torch.distributed as dist

from hvd_gradcomp.core.collectives import Allreduce
from hvd_gradcomp.monitoring import probe
from hvd_gradcomp.ops.torch import TorchOps
from hvd_gradcomp.runtime.program_runner import run
from hvd_gradcomp.torch.bucketing import layers_of
from hvd_gradcomp.torch.comm.c10d import C10dBackend, ProcessGroup

_names = (f"gradcomp.probe.{number}" for number in itertools.count())
_HOST = torch.device("cpu")


class Probe(probe.Probe):
    """Probe of a model's gradients every so many steps; all ranks get the same readings.

    probe = Probe(model.named_parameters(), every=50)
    ...
    loss.backward()
    probe.step()
    optimizer.step()

    The probe reads this rank's gradient as backward leaves it: after all passes of
    `backward_passes_per_step`, with the factor of a loss scaler (readings do not depend on a
    constant one), and before clipping. Parameters that backward does not reach count as zero.
    Training is bit-identical with and without the probe.

    Between probed steps `step` only counts, and there are no hooks. A probed step gathers on the
    device, copies once to the host for each layer, and waits for one allreduce; see
    `monitoring.probe`.

    Args:
        named_parameters: usually `model.named_parameters()`; trainable ones are probed.
        every: one step in so many is probed, beginning with the first.
        process_set: the ranks that take part, of Horovod; or a process group of
            `torch.distributed`. None for all ranks of Horovod, if it is initialized, else for all
            of `torch.distributed`.
        **options: those of `monitoring.probe.Probe`; `pair` numbers ranks within the set.

    Raises:
        ValueError: neither is initialized, or an argument is out of range.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
        every: int = 50,
        *,
        process_set: Any = None,
        **options: Any,
    ) -> None:
        ranks = _ranks_of(process_set)
        trained = [(name, p) for name, p in named_parameters if p.requires_grad]
        super().__init__(layers_of(trained), every, **options)
        if ranks.takes_part:
            self.require_pair(ranks.size())
        self._ranks = ranks
        self.steps = 0
        self._parameters = [p for _, p in trained]
        self._taken: list[torch.Tensor | None] = [None] * len(trained)
        self._index: dict[int, torch.Tensor] = {}
        self._ops: dict[torch.device, TorchOps] = {}
        self._handles: list[Any] = []
        self._prepare()

    def step(self, moments: Sequence[torch.Tensor] | None = None) -> tuple[probe.Reading, ...]:
        """Count a step; if it is probed, exchange with all ranks and return the readings.

        Call it on all ranks, after backward and before `optimizer.step()`.

        Args:
            moments: sums of squared sample gradients of each trained parameter, for the density
                of Variance; without them `q = g*g`.
        """
        step, self.steps = self.steps, self.steps + 1
        readings: tuple[probe.Reading, ...] = ()
        if self._handles:
            self.remove()
            # If no hook has run, gradients were set otherwise, e.g. from `autograd.grad`.
            passed = any(x is not None for x in self._taken)
            taken = self._taken if passed else [self._take(i) for i in range(len(self._taken))]
            self._taken = [None] * len(taken)
            squares = None
            if moments is not None:
                squares = self._on_host([self._cut(i, q) for i, q in enumerate(moments)])
            rank, size = self._ranks.rank(), self._ranks.size()
            here = TorchOps(_HOST)
            with torch.no_grad():
                program = self.program(here, step, self._on_host(taken), rank, size, squares)
                readings = tuple(run(program, self._ranks.sum))
        self._prepare()
        return readings

    def remove(self) -> None:
        """Remove the hooks for the next probed step, which is then not probed."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _prepare(self) -> None:
        """Register hooks if the next step is probed."""
        if not self.due(self.steps) or not self._ranks.takes_part:
            return
        for i, parameter in enumerate(self._parameters):

            def hook(_: torch.nn.Parameter, i: int = i) -> None:
                self._taken[i] = self._take(i)

            self._handles.append(parameter.register_post_accumulate_grad_hook(hook))

    def _take(self, layer: int) -> torch.Tensor | None:
        gradient = self._parameters[layer].grad
        return None if gradient is None else self._cut(layer, gradient)

    @torch.no_grad()
    def _cut(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        """Copy the probed elements, on the tensor's device."""
        x = x.detach()
        x = x.to_dense() if x.is_sparse else x
        ops = self._ops.setdefault(x.device, TorchOps(x.device))
        index = self._index.get(layer)
        if index is None or index.device != x.device:
            index = self._index[layer] = ops.words(self.places(layer))
        return ops.cast(ops.gather(ops.reshape(x, (-1,)), index), "float32")

    def _on_host(self, pieces: Sequence[torch.Tensor | None]) -> torch.Tensor:
        rows = [
            torch.zeros(count, dtype=torch.float32, device=_HOST) if x is None else x.to(_HOST)
            for x, count in zip(pieces, self.taken)
        ]
        return torch.cat(rows)


class _Ranks(Protocol):
    """Ranks that a probe exchanges with.

    Attributes:
        takes_part: this rank is one of them.
    """

    takes_part: bool

    def rank(self) -> int:
        """Return this rank's index among them."""

    def size(self) -> int:
        """Return the number of ranks."""

    def sum(self, request: Allreduce) -> torch.Tensor:
        """Return the sum of a tensor over them."""


class _OfHorovod:
    def __init__(self, horovod: Any, process_set: Any) -> None:
        self._horovod = horovod
        everybody = process_set is None or process_set is horovod.global_process_set
        self._set = horovod.global_process_set if everybody else process_set
        self.takes_part = everybody or horovod.rank() in (process_set.ranks or ())
        self._name = next(_names)

    def rank(self) -> int:
        return int(self._set.rank())

    def size(self) -> int:
        return int(self._set.size())

    def sum(self, request: Allreduce) -> torch.Tensor:
        total: torch.Tensor = self._horovod.allreduce(
            request.tensor, name=self._name, op=self._horovod.Sum, process_set=self._set
        )
        return total


class _OfDistributed:
    """Ranks of `torch.distributed`, in a group of the probe's own, apart from other collectives."""

    def __init__(self, group: Any) -> None:
        self.takes_part = dist.get_rank(group) >= 0
        if self.takes_part:
            self._group = ProcessGroup(group)
            self._transport = C10dBackend(self._group, "probe")

    def rank(self) -> int:
        return self._group.rank()

    def size(self) -> int:
        return self._group.size()

    def sum(self, request: Allreduce) -> torch.Tensor:
        there = request._replace(tensor=request.tensor.to(self._group.device))
        total = self._transport.wait(self._transport.allreduce(there, "probe", self._group))
        return total.to(_HOST)


def _ranks_of(process_set: Any) -> _Ranks:
    """Return the ranks of a process set or process group; if None, of the initialized library.

    Raises:
        ValueError: neither library is initialized.
    """
    of_horovod = hasattr(process_set, "process_set_id")
    found = "horovod.torch" in sys.modules
    horovod: Any = import_module("horovod.torch") if found else None
    started = found and getattr(horovod, "is_initialized", bool)()
    if started and (of_horovod or process_set is None):
        return _OfHorovod(horovod, process_set)
    if not of_horovod and dist.is_available() and dist.is_initialized():
        return _OfDistributed(process_set)
    raise ValueError(
        "call hvd.init() before Probe(...); with DistributedDataParallel "
        "torch.distributed.init_process_group(...)"
    )
