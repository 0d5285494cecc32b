"""The probe on PyTorch: hooks take what a probed step looks at, before anybody exchanges it.

A gradient is exchanged within backward, in place; after backward `p.grad` is reduced. So what is
looked at is copied by a hook of the parameter, which runs once the gradient is accumulated and
before Horovod's. Hooks are there only where the next step is probed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import horovod.torch as horovod
import torch

from hvd_gradcomp.engine.stack import run
from hvd_gradcomp.foundation.collectives import Allreduce
from hvd_gradcomp.ops.torch import TorchOps
from hvd_gradcomp.torch.parameters import layers_of
from hvd_gradcomp.watching import probe

_names = (f"gradcomp.probe.{number}" for number in itertools.count())
_HOST = torch.device("cpu")


class Probe(probe.Probe):
    """Looks at the gradients of a model every so many steps; the same readings on all ranks.

    probe = Probe(model.named_parameters(), every=50)
    ...
    loss.backward()
    probe.step()
    optimizer.step()

    What is seen is this rank's gradient as backward leaves it: after all passes of
    `backward_passes_per_step`, with the factor of a loss scaler (nothing here depends on one that
    stays), and before clipping. Parameters that backward does not reach count as zero. Training is
    the same to the bit as without.

    Between probed steps `step` counts, and no hook is there. A probed step gathers on the device,
    copies once to the host for each layer, and waits for one allreduce; see `watching.probe`.

    Args:
        named_parameters: usually `model.named_parameters()`; those that are trained are probed.
        every: a step in so many is probed, the first one too.
        process_set: the ranks that take part.
        **options: those of `watching.probe.Probe`; ranks of `pair` are those in the set.

    Raises:
        ValueError: Horovod is not initialized, or an argument is out of range.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
        every: int = 50,
        *,
        process_set: Any = horovod.global_process_set,
        **options: Any,
    ) -> None:
        if not horovod.is_initialized():
            raise ValueError("call hvd.init() before Probe(...)")
        trained = [(name, p) for name, p in named_parameters if p.requires_grad]
        super().__init__(layers_of(trained), every, **options)
        if _takes_part(process_set):
            self.require_pair(process_set.size())
        self.process_set = process_set
        self.steps = 0
        self._name = next(_names)
        self._parameters = [p for _, p in trained]
        self._taken: list[torch.Tensor | None] = [None] * len(trained)
        self._index: dict[int, torch.Tensor] = {}
        self._ops: dict[torch.device, TorchOps] = {}
        self._handles: list[Any] = []
        self._prepare()

    def step(self, moments: Sequence[torch.Tensor] | None = None) -> tuple[probe.Reading, ...]:
        """Counts a step; where it is probed, all ranks exchange, and the readings are returned.

        Call it on all ranks, after backward and before `optimizer.step()`.

        Args:
            moments: sums of squared sample gradients of each trained parameter, for the density
                of Variance; without them `q = g*g`.
        """
        step, self.steps = self.steps, self.steps + 1
        readings: tuple[probe.Reading, ...] = ()
        if self._handles:
            self.remove()
            # Not a gradient has passed a hook: they were made otherwise, by `autograd.grad` say.
            passed = any(x is not None for x in self._taken)
            taken = self._taken if passed else [self._take(i) for i in range(len(self._taken))]
            self._taken = [None] * len(taken)
            squares = None
            if moments is not None:
                squares = self._on_host([self._cut(i, q) for i, q in enumerate(moments)])
            rank, size = self.process_set.rank(), self.process_set.size()
            here = TorchOps(_HOST)
            with torch.no_grad():
                program = self.program(here, step, self._on_host(taken), rank, size, squares)
                readings = tuple(run(program, self._sum))
        self._prepare()
        return readings

    def remove(self) -> None:
        """Takes the hooks off that wait for the next probed step; that step is not probed."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _prepare(self) -> None:
        """Hooks, where the next step is probed."""
        if not self.due(self.steps) or not _takes_part(self.process_set):
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
        """A copy of what is looked at, on the tensor's device."""
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

    def _sum(self, request: Allreduce) -> torch.Tensor:
        return horovod.allreduce(
            request.tensor, name=self._name, op=horovod.Sum, process_set=self.process_set
        )


def _takes_part(process_set: Any) -> bool:
    if process_set is horovod.global_process_set:
        return True
    return horovod.rank() in (process_set.ranks or ())
