"""Reducer of one optimizer over Horovod; `exchange` runs programs, this module checks agreement.

Every collective has a name, see `runtime.naming`: hooks fire in another order on each rank, and
Horovod matches collectives by name.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Set
from contextlib import AbstractContextManager
from typing import Any

import torch
from horovod.common.exceptions import HorovodInternalError
from horovod.torch import mpi_ops

from hvd_gradcomp.core.compressor import Compressor
from hvd_gradcomp.runtime import config_check, errors, hierarchy, typed_json
from hvd_gradcomp.runtime.unique_names import UniqueNames
from hvd_gradcomp.torch import parameters
from hvd_gradcomp.torch.bucket import Bucket, Named
from hvd_gradcomp.torch.bucketing import BucketPlanner
from hvd_gradcomp.torch.comm import horovod
from hvd_gradcomp.torch.config_check import ConfigCheck
from hvd_gradcomp.torch.exchange import LOGGER
from hvd_gradcomp.torch.parameters import as_real
from hvd_gradcomp.torch.step_sync import StepSync

_ALIKE = (
    "Freeze and thaw the same parameters on all ranks, before the same step, and scale the loss on "
    "all of them or on none"
)
TITLES = UniqueNames("gradcomp")


def gather_objects(item: Any, kind: Any, name: str, process_set: Any) -> list[Any]:
    """Gather an item of type `kind` from every rank; see `runtime.typed_json`."""

    def allgather(mine: bytes) -> Iterator[bytes]:
        data = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        length = torch.tensor([data.numel()], dtype=torch.int32, device="cpu")
        # Named as on TensorFlow, should another rank run that.
        lengths = horovod.allgather(length, f"{name}.sz", process_set).wait()
        everything = horovod.allgather(data, f"{name}.t", process_set).wait()
        return (piece.numpy().tobytes() for piece in everything.split(lengths.tolist()))

    return typed_json.gather(item, kind, allgather, process_set.ranks)


class Peers:
    """Ranks of a reducer; see `bucketing.Peers`.

    Args:
        name: of the collectives.
        process_set: the ranks.
    """

    def __init__(self, name: str, process_set: Any) -> None:
        self._name, self._set = name, process_set

    def global_rank(self) -> int:
        return int(mpi_ops.rank())

    def gather_rows(self, row: torch.Tensor) -> torch.Tensor:
        every: torch.Tensor = mpi_ops.allgather(row[None], self._name, self._set)
        return every

    def gather_named(self, numbers: dict[str, int]) -> list[dict[str, int]]:
        return gather_objects(numbers, dict[str, int], self._name, self._set)


class HorovodReducer(BucketPlanner):
    """Reducer of one optimizer over Horovod.

    Args:
        named_parameters, compressor: see `BucketPlanner`.
        settings: other settings that must be equal on all ranks, for the configuration check.
        chose_rows: sparse gradients are compressed as dense ones by default, not by request.
        how: for `BucketPlanner` and `Reducer`; by default there are no hosts and no scaler, and a
            non-finite gradient is an error.
    """

    def __init__(
        self,
        named_parameters: Named,
        compressor: Compressor,
        *,
        settings: str = "",
        chose_rows: bool = False,
        **how: Any,
    ) -> None:
        super().__init__(
            named_parameters,
            compressor,
            horovod.HorovodBackend(),
            tracking="hvd.track_moments(model) before DistributedOptimizer",
            **how,
        )
        myself = weakref.proxy(self)
        self.agreement = ConfigCheck(
            myself, settings, lambda item, kind: myself._gather_objects(item, kind)
        )
        self._frozen: set[torch.nn.Parameter] | None = None  # known once a step has begun
        self._chose_rows = chose_rows
        self.sync = StepSync()

    def _explained(self, what: str) -> AbstractContextManager[None]:
        return errors.explain_errors(HorovodInternalError, what)

    @property
    def peers(self) -> Peers:
        return Peers(f"{self.name}.verify", self.process_set)

    def _make_groups(self, place: hierarchy.HostPosition) -> hierarchy.Groups:
        return hierarchy.groups_of(mpi_ops, place, self._gather_objects)

    def _plan(self, named_parameters: Named, placed: Collection[Bucket] = ()) -> Iterator[Bucket]:
        for name, p in named_parameters:
            if not horovod.takes(p.device):
                raise ValueError(
                    f"{name} is on {p.device}, and this Horovod was built without collectives for "
                    "tensors there. Build it for this PyTorch with HOROVOD_GPU_OPERATIONS=NCCL "
                    "(hvd-gradcomp build-horovod), or train on the CPU"
                )
        return super()._plan(named_parameters, placed)

    def add(self, named_parameters: Named) -> None:
        super().add(named_parameters)
        self.agreement.reached = False

    def count(self, sent: torch.Tensor) -> None:
        """Count the traffic of a tensor that was summed outside the buckets."""
        self.ledger.sent(sent)
        self.ledger.received(sent)

    def compare_again(self) -> None:
        """Repeat the configuration check before the next step."""
        self.agreement.reached = False
        self.ledger.digest()
        self.summed = 0
        self.sync.forget()

    @property
    def in_step(self) -> dict[str, str]:
        """Return the settings that must be equal on all ranks in this step; {} before it begins."""
        if self._frozen is None:
            return {}
        frozen = [name for name, p in self._named if p in self._frozen]
        scaled = any(bucket.scaled for bucket in self.buckets)
        return {
            "the loss scale, in which gradients are added up": str(self.scaling.known * scaled),
            "parameters that are frozen": ", ".join(frozen) or "none",
            "a gradient that is not finite (nonfinite=, or a loss scaler)": self._policy,
        }

    def compare_step(self) -> None:
        """Compare the settings of this step over the ranks; all ranks call it.

        Raises:
            MismatchError: on all ranks, naming the difference.
        """
        every = self._gather_objects(self.in_step, dict[str, str])
        ranks = self.process_set.ranks or range(len(every))
        begun = {rank: one for rank, one in zip(ranks, every) if one}
        config_check.agree(list(begun.values()), list(begun), _ALIKE)

    def _gather_objects(self, item: Any, kind: Any) -> list[Any]:
        with errors.explain_errors(HorovodInternalError, "the exchange of what the ranks train"):
            return gather_objects(item, kind, f"{self.name}.handshake", self.process_set)

    def begin(self) -> Set[torch.nn.Parameter]:
        """Begin a step, unless it has begun; return its frozen parameters."""
        if self._frozen is None:
            self.commit()
            self.agreement.agree()
            if self._arrived is not None and self.steps > 0:
                self.reorder(self._gather_objects(self.order, list[str])[0])
            self.judge()
            self._begin_step()
            self._frozen = {p for p in self.parameters if not p.requires_grad}
            self.sources.forget(self._frozen)
            for bucket in self.buckets:
                held = {slot for slot, p in enumerate(bucket.parameters) if p in self._frozen}
                bucket.refresh()
                parameters.mask_frozen(bucket, held, self.steps)
        return self._frozen

    def mark_ready(self, parameter: torch.nn.Parameter, gradient: torch.Tensor | None) -> None:
        """Take a gradient; start the program of its bucket if it was the last one.

        Args:
            gradient: dense, of the parameter's shape or one number; None stands for zero.
        """
        if parameter in self.begin():
            return  # frozen between forward and backward
        if self._arrived is not None:
            self._arrived.append(self._name_of[parameter])
        self._copy_to_bucket(parameter, gradient)

    def mark_sparse_ready(self, parameter: torch.nn.Parameter, gradient: torch.Tensor) -> None:
        """Count a sparse gradient, which Horovod gathers by itself; put zeros into its bucket."""
        values, indices = gradient._values(), gradient._indices()
        for part in (values, indices):
            self.ledger.sent(part)
        name = self._name_of[parameter]
        self.ledger.gathered[name] = self.ledger.gathered.get(name, 0) + values.numel()
        # In its bucket it is zero; or NaN, which tells the other ranks that it is not finite.
        nothing = (as_real(values) * 0).sum().to(as_real(parameter.detach()).dtype)
        self.mark_ready(parameter, None if not nothing.is_cuda and nothing == 0 else nothing)

    def say_rows_are_compressed(self, parameter: torch.nn.Parameter) -> None:
        """Log once that sparse gradients are compressed as dense ones, if that is by default."""
        if self._chose_rows and self.process_set.rank() == 0:
            LOGGER.info(
                "the sparse gradient of %s is compressed as a dense one: its bucket has room for "
                "it in any case, so gathered rows would come on top (sparse_as_dense=None)",
                self._name_of[parameter],
            )
        self._chose_rows = False

    def gathered(self, rows: torch.Tensor) -> torch.Tensor:
        """Count a gathered sparse gradient; return it."""
        for part in (rows._values(), rows._indices()):
            self.ledger.received(part)
        return rows

    def finish(self) -> None:
        """Run every started program to its end.

        Raises:
            PayloadError: and the like, from a program; after all other programs have ended, so
                that no rank waits for this one.
        """
        horovod.complete([self.finishing()])

    def reduced_grad(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """Run `finish`; return the reduced gradient, in shape and dtype of the one it replaces.

        If the parameter is not contiguous, the gradient has its strides: fused optimizers iterate
        over both in memory order.
        """
        reduced, replaced = self._taken(parameter), parameter.grad
        dtype = parameter.dtype if replaced is None else replaced.dtype
        if parameter.is_contiguous():
            return reduced.to(dtype)
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False).copy_(reduced)

    def abort(self) -> None:
        """End a step that has failed."""
        self.scaling.forget()
        if self._open:
            self.abandon()
        else:
            self.clear()

    def clear(self) -> None:
        """End a step after all results were taken: release them and the frozen parameters."""
        self._frozen = None
        self.sources.end_step()
        self.scaling.end_step()
        if self._arrived:  # in a step that was left out, of layers that it had not used
            self._arrived.clear()
        for bucket in self.buckets:
            bucket.result = None
            parameters.restore_frozen(bucket)

    def abandon(self) -> None:
        """Abort an exchange, e.g. after another rank's end; the configuration check is repeated."""
        self._frozen = None
        self.compare_again()
        interrupted, self._open, self.errors = self._open, False, []
        self._can_discard = False
        self.sources.forget()
        if self._arrived:
            self._arrived.clear()
        self.scaling.end_step()
        for bucket in self.buckets:
            bucket.end(undo=interrupted)
            parameters.restore_frozen(bucket)
            bucket.abandon()
            bucket.streams.clear()
            bucket.result = None
            bucket.absent = set(range(len(bucket.parameters)))
