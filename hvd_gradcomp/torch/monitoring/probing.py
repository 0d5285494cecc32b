"""Gradient probe for PyTorch: hooks copy the sampled gradients before they are exchanged.

A gradient is exchanged within backward, in place; after backward `p.grad` is reduced. So a hook of
the parameter copies the samples, after the gradient is accumulated and before Horovod's or
DistributedDataParallel's hooks. Hooks are registered only if the next step is probed.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from hvd_gradcomp.core.collectives import Allreduce
from hvd_gradcomp.monitoring import probe
from hvd_gradcomp.ops.torch import TorchOps
from hvd_gradcomp.runtime.program_runner import run
from hvd_gradcomp.torch.comm.c10d import C10dBackend, ProcessGroup
from hvd_gradcomp.torch.interop.dynamo import interpreted
from hvd_gradcomp.torch.interop.inference import outside_inference

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

    Between probed steps `step` only counts, and there are no hooks. A probed step copies the
    samples of each layer to the host once, and waits for one allreduce; see `monitoring.probe`.

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
        self._ranks = _ranks_of(process_set)
        trained = [(name, p) for name, p in named_parameters if p.requires_grad]
        layers = [(name, _real(p.detach()).shape) for name, p in trained]
        super().__init__(layers, every, **options)
        if self._ranks is not None:
            self.require_pair(self._ranks.group.size())
        self.steps = 0
        self._parameters = [p for _, p in trained]
        self._copies: dict[int, torch.Tensor] = {}  # samples of the layers that a hook has seen
        self._handles: list[Any] = []
        self._prepare()

    @outside_inference()
    def step(self, moments: Sequence[torch.Tensor] | None = None) -> tuple[probe.Reading, ...]:
        """Count a step; if it is probed, exchange with all ranks and return the readings.

        Call it on all ranks, after backward and before `optimizer.step()`.

        Args:
            moments: sums of squared sample gradients of each trained parameter, for the density
                of Variance; without them `q = g*g`.
        """
        step, self.steps = self.steps, self.steps + 1
        readings: tuple[probe.Reading, ...] = ()
        if self._handles and self._ranks is not None:
            self.remove()
            # If no hook has run, gradients were set otherwise, e.g. from `autograd.grad`.
            grads = [p.grad for p in self._parameters]
            copies, self._copies = self._copies or self._sampled(grads), {}
            squares = None if moments is None else self._on_host(self._sampled(moments))
            group, total = self._ranks
            where = step, self._on_host(copies), group.rank(), group.size()
            with torch.no_grad():
                readings = run(self.program(TorchOps(_HOST), *where, squares), total)
        self._prepare()
        return readings

    def remove(self) -> None:
        """Remove the hooks for the next probed step, which is then not probed."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _prepare(self) -> None:
        """Register hooks if the next step is probed."""
        if not self.due(self.steps) or self._ranks is None:
            return
        for i, parameter in enumerate(self._parameters):
            hook = partial(self._copy, i)
            self._handles.append(parameter.register_post_accumulate_grad_hook(hook))

    @interpreted
    def _copy(self, i: int, parameter: torch.nn.Parameter) -> None:
        """Copy a sample of a gradient; a hook of its accumulation."""
        if parameter.grad is not None:
            self._copies[i] = self._sample(i, parameter.grad)

    def _sampled(self, tensors: Sequence[torch.Tensor | None]) -> dict[int, torch.Tensor]:
        return {i: self._sample(i, x) for i, x in enumerate(tensors) if x is not None}

    @torch.no_grad()
    def _sample(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        """Copy the sampled elements, on the tensor's device."""
        x = _real(x.detach().to_dense() if x.is_sparse else x.detach())
        samples = x.reshape(-1)[:: self.samples[layer].stride]
        return samples.to(torch.float32, copy=True)

    def _on_host(self, copies: dict[int, torch.Tensor]) -> torch.Tensor:
        absent = {"dtype": torch.float32, "device": _HOST}
        counts = enumerate(sample.taken for sample in self.samples)
        return torch.cat(
            [copies[i].to(_HOST) if i in copies else torch.zeros(n, **absent) for i, n in counts]
        )


def _real(x: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


class _Ranks(NamedTuple):
    """Ranks that a probe exchanges with."""

    group: Any  # with `rank()` and `size()`
    total: Callable[[Allreduce], torch.Tensor]  # sum of a tensor over them


def _ranks_of(process_set: Any) -> _Ranks | None:
    """Return the ranks of a process set or process group; None if this rank is none of them.

    Args:
        process_set: None for those of the initialized library.

    Raises:
        ValueError: neither library is initialized.
    """
    of_horovod = hasattr(process_set, "process_set_id")
    imported = "horovod.torch" in sys.modules
    horovod: Any = import_module("horovod.torch") if imported else None
    started = imported and getattr(horovod, "is_initialized", bool)()
    if started and (of_horovod or process_set is None):
        return _in_horovod(horovod, process_set or horovod.global_process_set)
    if not of_horovod and dist.is_available() and dist.is_initialized():
        return _in_torch(process_set) if dist.get_rank(process_set) >= 0 else None
    raise ValueError(
        "call hvd.init() before Probe(...); with DistributedDataParallel "
        "torch.distributed.init_process_group(...)"
    )


def _in_horovod(horovod: Any, process_set: Any) -> _Ranks | None:
    name = next(_names)  # on all ranks, so that names agree
    everybody = process_set is horovod.global_process_set
    if not everybody and horovod.rank() not in (process_set.ranks or ()):
        return None

    def total(request: Allreduce) -> torch.Tensor:
        summed: torch.Tensor = horovod.allreduce(
            request.tensor, name=name, op=horovod.Sum, process_set=process_set
        )
        return summed

    return _Ranks(process_set, total)


def _in_torch(process_group: Any) -> _Ranks:
    """Make a group of the probe's own, apart from other collectives."""
    group = ProcessGroup(process_group)
    transport = C10dBackend(group, "probe")

    def total(request: Allreduce) -> torch.Tensor:
        on_device = request._replace(tensor=request.tensor.to(group.device))
        return transport.wait(transport.allreduce(on_device, "probe", group)).to(_HOST)

    return _Ranks(group, total)
