"""Exchange of a model's gradients by the communication hook of `DistributedDataParallel`.

Its collectives are matched by order, so they are requested at the same places on all ranks; see
`ddp`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Optional

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hvd_gradcomp.ops import NonFiniteGradientError
from hvd_gradcomp.torch.autograd_callbacks import after_backward, backward_id
from hvd_gradcomp.torch.bucket import as_real
from hvd_gradcomp.torch.bucketing import BucketPlanner
from hvd_gradcomp.torch.comm.c10d import C10dBackend, ProcessGroup, out_of_step
from hvd_gradcomp.torch.reducer import Reducer
from hvd_gradcomp.torch.sparse_grads import SparseGradients
from hvd_gradcomp.torch.step_sync import OutOfStepError

# Parameter, its reduced gradient, its `grad` before the end of backward, and the version of that.
BeforeDelivery = tuple[torch.nn.Parameter, torch.Tensor, Optional[torch.Tensor], int]


class DDPBucket(NamedTuple):
    """Bucket that a hook was called with.

    Attributes:
        future: gets the reduced bucket.
        buffer: the gradients, flat; or a sparse one.
        pairs: each parameter with its gradient, a view of the buffer.
    """

    future: Any
    buffer: torch.Tensor
    pairs: list[tuple[torch.nn.Parameter, torch.Tensor]]

    @classmethod
    def of(cls, bucket: dist.GradBucket) -> DDPBucket:
        """Return the bucket of a hook's call."""
        buffer = bucket.buffer()
        future: Any = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else [])
        return cls(future, buffer, _gradients(bucket))

    def before(self) -> list[BeforeDelivery]:
        """Return each dense gradient with what its parameter has before the end of backward."""
        dense = [(p, gradient) for p, gradient in self.pairs if not gradient.is_sparse]
        return [(p, gradient, p.grad, _version(p.grad)) for p, gradient in dense]

    def release(self) -> None:
        """Release the memory until `allocate`, and every `p.grad` that lies in it."""
        if self.buffer.is_sparse:
            return
        buffer, storage = self.buffer, self.buffer.untyped_storage()
        if storage.nbytes() != buffer.nbytes:
            return
        if buffer.is_cuda:
            buffer.record_stream(torch.cuda.current_stream(buffer.device))
        for p, _ in self.pairs:
            if p.grad is not None and p.grad.untyped_storage().data_ptr() == storage.data_ptr():
                p.grad = None  # DDP sets it when it has the reduced gradient
        storage.resize_(0)

    def allocate(self) -> None:
        """Allocate the memory if it was released."""
        if not self.buffer.is_sparse and not self.buffer.untyped_storage().nbytes():
            self.buffer.untyped_storage().resize_(self.buffer.nbytes)

    def fill(self, value: float) -> None:
        """Set all gradients to a value."""
        (self.buffer._values() if self.buffer.is_sparse else self.buffer).fill_(value)


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


class HookExchange:
    """Exchange of one model's gradients, step by step.

    Args:
        run: reduces the buckets.
        model: whose gradients these are; it is not kept alive.
        group: the ranks.
        transport: of the reducer.
        sparse: gathers rows.
        names: of the parameters.
        releases: release a bucket of DDP while ours has its gradients.
    """

    def __init__(
        self,
        run: Reducer,
        model: DistributedDataParallel,
        group: ProcessGroup,
        transport: C10dBackend,
        sparse: SparseGradients,
        names: Mapping[torch.nn.Parameter, str],
        *,
        releases: bool,
    ) -> None:
        self._run, self._model, self._group = run, weakref.ref(model), group
        self._transport, self._sparse, self._names = transport, sparse, names
        self._releases, self._order_hooks = releases, _watch_order(run.planner)
        self._rows = GatheredRows(sparse)
        self._waiting: list[DDPBucket] = []  # in this step
        self._error: Exception | None = None
        self._joined, self._taking_part = False, group.size()

    @torch.no_grad()
    def take_in(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Take the gradients of one DDP bucket; end the exchange with the last one."""
        waiting = DDPBucket.of(bucket)
        first = not self._waiting
        if first:
            self._joined = backward_id() == -1  # `model.join()` calls the hook where no backward is
        self._waiting.append(waiting)
        try:
            if first:
                self._begin()
            if self._error is None:
                self._give(waiting.pairs)
                if self._releases:
                    waiting.release()
            if bucket.is_last() and self._error is None:
                self._finish()
        except Exception as error:
            self._fail(error)
        if bucket.is_last():
            self._hand_out()
        return waiting.future

    def _begin(self) -> None:
        """Begin a step, after a check that all ranks begin the same one.

        Raises:
            OutOfStepError: on all ranks.
        """
        if self._group.closed:
            raise RuntimeError(
                "the exchange of an earlier step has failed, and what was kept is lost: start all "
                "ranks again, from a checkpoint"
            )
        run, planner = self._run, self._run.planner
        run.begin_step()
        step = [run.steps, int(run.undoes), int(self._joined)]
        said = self._transport.gather_words(step, "the beginning of a step")
        every = list(said.values())
        # Who has joined has no loss that a GradScaler could have scaled.
        words = {(step, undone) for step, undone, joined in every if not joined}
        if len(words) > 1 or any(step != every[0][0] for step, _, _ in every):
            raise out_of_step(said)
        if self._joined:
            run.follow(any(undone for _, undone in words))
        self._taking_part = sum(not joined for *_, joined in every)
        if planner.arrived is not None and run.steps > 0:
            for handle in self._order_hooks:
                handle.remove()
            orders = self._group.gather_objects(planner.order, list[str])
            planner.reorder(next(filter(None, orders), []))  # who had joined has seen none
        if not planner.judged:
            planner.warn_if_unprofitable()

    def _give(self, pairs: Sequence[tuple[torch.nn.Parameter, torch.Tensor]]) -> None:
        run = self._run
        run.programs.resume_led()
        earlier = run.programs.running
        for p, gradient in pairs:
            name = self._names.get(p)
            if gradient.is_sparse and name is not None:
                if p not in run.planner.places:
                    self._rows.gather(p, name, gradient.coalesce())
                    continue
                gradient = self._sparse.as_dense(name, gradient)
            if p not in run.planner.places:
                raise ValueError(_fixed_by_ddp(f"one of shape {tuple(p.shape)}"))
            run.mark_ready(p, gradient)
        run.programs.resume_earlier(earlier)

    def _finish(self) -> None:
        """Run all programs to their ends, in the same order on all ranks.

        Raises:
            NonFiniteGradientError: on all ranks.
            Exception: an error of one of this rank's programs.
        """
        run, planner = self._run, self._run.planner
        absent = [b.layout.names[slot] for b in run.buckets for slot in sorted(b.absent)]
        if absent:
            raise ValueError(_fixed_by_ddp(", ".join(absent)))
        if planner.arrived is not None and run.steps == 0:
            planner.fix_order()
        run.programs.drive()
        bad = [self._names[p] for p in self._rows.wait()]
        if bad:  # on all ranks, as all have the same rows
            what = f"a rank has a NaN or an infinity in the sparse gradient of {', '.join(bad)}"
            run.programs.errors.append(NonFiniteGradientError(what))
        run.end_exchange()

    def _hand_out(self) -> None:
        """Return the reduced gradients to DDP; raise an error only after its backward has ended.

        So the model is not left in the middle of a step.
        """
        waiting, self._waiting = self._waiting, []
        error, self._error = self._error, None
        model = self._model()
        factor = 1.0
        if not getattr(model, "_divide_by_initial_world_size", True):  # the user's, of `join`
            factor = self._group.size() / max(self._taking_part, 1)
        for bucket in waiting:
            bucket.allocate()
            for p, gradient in bucket.pairs if error is None else ():
                gradient.copy_(self._reduced_like(gradient, p))
                if factor != 1.0:
                    gradient.mul_(factor)
                self._run.taken(p)
            if error is not None:
                bucket.fill(float("nan"))
            bucket.future.set_result(bucket.buffer)
        if error is not None:
            self._run.end_step()
            self._rows.clear()
            self._run.sources.forget()
            self._run.scaling.forget()
            if self._joined:
                raise error
            after_backward(lambda: _raise(error))
            return
        self._run.end_step()
        self._rows.clear()
        if self._joined or self._run.undone or model is None:
            return
        if model.find_unused_parameters or model.static_graph:
            before = [pair for bucket in waiting for pair in bucket.before()]
            after_backward(lambda: _deliver(before))

    def _reduced_like(self, gradient: torch.Tensor, p: torch.nn.Parameter) -> torch.Tensor:
        """Return the reduced gradient of a parameter, sparse if DDP's is sparse."""
        rows = self._rows.reduced(p) if gradient.is_sparse else None
        if rows is not None:
            rows = rows.to(gradient.dtype)
            if self._run.undone:
                rows.values().fill_(float("nan"))
            return rows
        reduced = self._run.reduced_grad(p)
        return reduced.to(gradient.dtype).to_sparse(1) if gradient.is_sparse else reduced

    def _fail(self, error: Exception) -> None:
        """Record an error; close the connections unless all ranks have the same error."""
        self._error = error
        if not isinstance(error, (NonFiniteGradientError, OutOfStepError)):
            self._group.hang_up()


def _gradients(bucket: dist.GradBucket) -> list[tuple[torch.nn.Parameter, torch.Tensor]]:
    """Return each parameter of a DDP bucket with its gradient, a view of the bucket.

    The bucket has complex gradients as real ones of shape [..., 2]; `gradients()` ignores that.
    """
    buffer, parameters = bucket.buffer(), bucket.parameters()
    if buffer.is_sparse:  # of one parameter, and `gradients()` has none
        return [(parameters[0], buffer)]
    if not any(p.is_complex() for p in parameters):
        return list(zip(parameters, bucket.gradients()))
    pairs, start = [], buffer.storage_offset()
    for p in parameters:
        real = as_real(p.detach())
        view = buffer.as_strided(real.shape, real.stride(), start)
        pairs.append((p, torch.view_as_complex(view) if p.is_complex() else view))
        start += real.numel()
    return pairs


@torch.no_grad()
def _deliver(before: Sequence[BeforeDelivery]) -> None:
    """Set the reduced gradients of layers that no rank has used, which DDP does not.

    So residuals of such layers are applied. Without one, such a layer has no gradient, as in DDP.

    Args:
        before: of each bucket.
    """
    for p, reduced, gradient, version in before:
        if p.grad is not gradient or _version(p.grad) != version or not reduced.any():
            continue
        if gradient is None:
            p.grad = reduced.clone(memory_format=torch.preserve_format)
        else:
            gradient.copy_(reduced)


def _version(gradient: torch.Tensor | None) -> int:
    return -1 if gradient is None else gradient._version


def _fixed_by_ddp(which: str) -> str:
    return (
        "DistributedDataParallel and ddp.compress saw other parameters that require a gradient: "
        f"{which}. Freeze and thaw layers before DistributedDataParallel(model), and build both "
        "anew to change them"
    )


def _watch_order(planner: BucketPlanner) -> list[Any]:
    """Register hooks that record the order of the layers in the first backward."""
    alive = weakref.ref(planner)

    def seen(name: str) -> Any:
        def hook(_: torch.Tensor) -> None:
            there = alive()
            if there is not None and there.arrived is not None:
                there.arrived.append(name)

        return hook

    named = [] if planner.ordered else planner.named_parameters
    return [p.register_hook(seen(name)) for name, p in named]


def _raise(error: Exception) -> None:
    raise error
