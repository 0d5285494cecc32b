"""Communication hook of `DistributedDataParallel`, step by step; see `ddp`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hvd_gradcomp.ops import NonFiniteGradientError
from hvd_gradcomp.runtime.step_header import Kind, StepHeader, values
from hvd_gradcomp.torch.comm.c10d import ProcessGroup
from hvd_gradcomp.torch.hooks.ddp_bucket import DDPBucket, copy_out_unused
from hvd_gradcomp.torch.hooks.hook_exchange import HookExchange
from hvd_gradcomp.torch.interop.autograd_callbacks import after_backward, backward_id
from hvd_gradcomp.torch.interop.dynamo import interpreted
from hvd_gradcomp.torch.reduce.backend import GroupBackend
from hvd_gradcomp.torch.reduce.bucketing import BucketPlanner
from hvd_gradcomp.torch.reduce.reducer import Reducer
from hvd_gradcomp.torch.reduce.sparse_grads import SparseGradients


class GatheredRows:
    """Rows of sparse gradients that have no bucket, in one step.

    Args:
        sparse: gathers them.
    """

    def __init__(self, sparse: SparseGradients) -> None:
        self._sparse = sparse
        self._pending: dict[torch.nn.Parameter, Callable[[], torch.Tensor]] = {}
        self._rows: dict[torch.nn.Parameter, torch.Tensor] = {}

    def gather(self, p: torch.nn.Parameter, name: str, rows: torch.Tensor) -> None:
        """Start to gather the rows of a parameter."""
        self._pending[p] = self._sparse.gather(name, rows)

    def wait(self) -> list[torch.nn.Parameter]:
        """Wait for the rows of all ranks; return the parameters for which they are not finite."""
        self._rows = {p: wait().coalesce() for p, wait in self._pending.items()}
        self._pending.clear()
        return [p for p, rows in self._rows.items() if not rows.values().isfinite().all()]

    def reduced(self, p: torch.nn.Parameter) -> torch.Tensor | None:
        """Return the rows of a parameter, if they were gathered."""
        return self._rows.get(p)

    def clear(self) -> None:
        """Forget the step."""
        self._pending.clear()
        self._rows.clear()


class DDPExchange(HookExchange):
    """Exchange of one model's gradients, step by step.

    Args:
        reducer: reduces the buckets.
        model: whose gradients these are; it is not kept alive.
        group: the ranks.
        transport: the reducer's.
        sparse: gathers rows.
        names: those of the parameters.
        releases: release a bucket of DDP while ours has its gradients.
    """

    def __init__(
        self,
        reducer: Reducer,
        model: DistributedDataParallel,
        group: ProcessGroup,
        transport: GroupBackend,
        sparse: SparseGradients,
        names: Mapping[torch.nn.Parameter, str],
        *,
        releases: bool,
    ) -> None:
        super().__init__(reducer, transport, [group])
        self._model, self._group = weakref.ref(model), group
        self._sparse, self._names = sparse, names
        self._releases, self._order_hooks = releases, _watch_order(reducer.planner)
        self._rows = GatheredRows(sparse)
        self._pending: list[DDPBucket] = []  # in this step
        self._joined, self._taking_part = False, group.size()

    @torch.no_grad()
    def reduce(self, grad_bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Exchange the gradients of one DDP bucket; the last one ends the exchange."""
        bucket = DDPBucket.of(grad_bucket)
        first = not self._pending
        if first:
            self._joined = backward_id() == -1  # `model.join()` calls the hook outside of backward
        self._pending.append(bucket)
        try:
            if first:
                self._begin()
            if self._error is None:
                self._fill_buckets(bucket.pairs)
                if self._releases:
                    bucket.release()
            if grad_bucket.is_last() and self._error is None:
                self._finish_programs()
        except Exception as error:
            self._fail(error)
        if grad_bucket.is_last():
            self._copy_out()
        return bucket.future

    def _begin(self) -> None:
        """Begin a step; see `_begin_step`.

        Raises:
            OutOfStepError: on all ranks.
        """
        self._require_connections()
        reducer, planner = self._reducer, self._reducer.planner
        reorders = planner.arrived is not None and reducer.steps > 0
        kind = Kind.JOINED if self._joined else Kind.STEP
        self._begin_step(kind, at_once=self._joined or reorders)
        if reorders:
            for handle in self._order_hooks:
                handle.remove()
            orders = self._group.gather_objects(planner.order, list[str])
            planner.reorder(next(filter(None, orders), []))  # a rank that had joined has seen none
        planner.report()

    def _take_headers(self, headers: dict[int, StepHeader]) -> None:
        if self._joined:  # it has no loss that a GradScaler could have scaled
            self._reducer.adopt_policy(bool(values(headers, "policy")))
        self._taking_part = sum(each.takes_part for each in headers.values())

    def _fill_buckets(self, pairs: Sequence[tuple[torch.nn.Parameter, torch.Tensor]]) -> None:
        reducer = self._reducer
        reducer.programs.resume_led()
        earlier = reducer.programs.running
        dense: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
        for p, gradient in pairs:
            name = self._names.get(p)
            if gradient.is_sparse and name is not None:
                if p not in reducer.planner.places:
                    reducer.programs.agree()
                    self._rows.gather(p, name, gradient.coalesce())
                    continue
                gradient = self._sparse.as_dense(name, gradient)
            if p not in reducer.planner.places:
                raise ValueError(_fixed_by_ddp(f"one of shape {tuple(p.shape)}"))
            dense.append((p, gradient))
        reducer.mark_all_ready(dense)
        reducer.programs.resume_earlier(earlier)

    def _finish_programs(self) -> None:
        """Run all programs to their ends, in the same order on all ranks.

        Raises:
            NonFiniteGradientError: on all ranks.
            Exception: an error of one of this rank's programs.
        """
        reducer, planner = self._reducer, self._reducer.planner
        reducer.programs.agree()  # there may be nothing to send
        absent = [b.layout.names[slot] for b in reducer.buckets for slot in sorted(b.absent)]
        if absent:
            raise ValueError(_fixed_by_ddp(", ".join(absent)))
        if planner.arrived is not None and reducer.steps == 0:
            planner.fix_order()
        reducer.programs.wait_all()
        nonfinite = [self._names[p] for p in self._rows.wait()]
        if nonfinite:  # on all ranks, as all have the same rows
            listed = ", ".join(nonfinite)
            what = f"a rank has a NaN or an infinity in the sparse gradient of {listed}"
            reducer.programs.errors.append(NonFiniteGradientError(what))
        reducer.commit_or_roll_back()

    def _copy_out(self) -> None:
        """Return the reduced gradients to DDP; raise an error only after its backward has ended.

        So the model is not left in the middle of a step.
        """
        buckets, self._pending = self._pending, []
        error, reducer, model = self._pop_error(), self._reducer, self._model()
        factor = 1.0
        if not getattr(model, "_divide_by_initial_world_size", True):  # the user's, of `join`
            factor = self._group.size() / max(self._taking_part, 1)
        for bucket in buckets:
            bucket.allocate()
            if error is None:
                self._copy_reduced(bucket.pairs, factor)
            else:
                bucket.fill(float("nan"))
            bucket.future.set_result(bucket.buffer)
        reducer.finish_step()
        self._rows.clear()
        if error is not None:
            reducer.sources.clear()
            reducer.scaling.reset()
            if self._joined:
                raise error
            after_backward(lambda: _raise(error))
            return
        if self._joined or reducer.rolled_back or model is None:
            return
        if model.find_unused_parameters or model.static_graph:
            gradients = [each for bucket in buckets for each in bucket.maybe_unused()]
            after_backward(lambda: copy_out_unused(gradients))

    def _copy_reduced(
        self, pairs: Sequence[tuple[torch.nn.Parameter, torch.Tensor]], factor: float
    ) -> None:
        """Copy reduced gradients to those of DDP, each times a factor."""
        reducer = self._reducer
        dense: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
        for p, gradient in pairs:
            if gradient.is_sparse:
                gradient.copy_(self._reduced_sparse(gradient, p))
                reducer.mark_copied(p)
            else:
                dense.append((p, gradient))
        reducer.copy_out(dense)
        if factor != 1.0:
            for _, gradient in pairs:
                gradient.mul_(factor)

    def _reduced_sparse(self, gradient: torch.Tensor, p: torch.nn.Parameter) -> torch.Tensor:
        """Return the reduced gradient of a parameter whose gradient in DDP is sparse."""
        rows = self._rows.reduced(p)
        if rows is not None:
            rows = rows.to(gradient.dtype)
            if self._reducer.rolled_back:
                rows.values().fill_(float("nan"))
            return rows
        return self._reducer.reduced_grad(p).to(gradient.dtype).to_sparse(1)


def _fixed_by_ddp(which: str) -> str:
    return (
        "DistributedDataParallel and ddp.compress saw other parameters that require a gradient: "
        f"{which}. Freeze and thaw layers before DistributedDataParallel(model), and build both "
        "anew to change them"
    )


def _watch_order(planner: BucketPlanner) -> list[Any]:
    """Register hooks that record the order of the layers in the first backward."""
    named = [] if planner.ordered else planner.named_parameters
    return [p.register_hook(partial(_note, weakref.ref(planner), name)) for name, p in named]


@interpreted
def _note(alive: weakref.ref[BucketPlanner], name: str, _: torch.Tensor) -> None:
    planner = alive()
    if planner is not None and planner.arrived is not None:
        planner.arrived.append(name)


def _raise(error: Exception) -> None:
    raise error
