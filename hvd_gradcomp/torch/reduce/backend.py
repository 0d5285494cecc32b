"""Protocol of the transports."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from hvd_gradcomp.runtime.program_runner import Transport
from hvd_gradcomp.runtime.step_header import StepHeader
from hvd_gradcomp.torch.comm.c10d import ProcessGroup
from hvd_gradcomp.torch.reduce.bucket import Named


class Backend(Transport, Protocol):
    """Transport between the ranks of one reducer; its collectives return handles with `ready()`.

    Attributes:
        name: prefix of the names of collectives.
        library: that moves the tensors, for messages.
        version: of Horovod, for the configuration check.
        failure: the class of its errors.
        hangs_up: a rank that fails closes its connections, so that ranks that wait for it fail too.
    """

    name: str
    library: str
    version: str
    failure: type[Exception]
    hangs_up: bool

    def check(self, named_parameters: Named) -> None:
        """Raise a ValueError if there are no collectives for the device of a parameter."""

    def global_rank(self) -> int:
        """Return this rank's number in the whole job."""

    def gather_objects(self, item: Any, kind: Any, what: str) -> list[Any]:
        """Gather an item of type `kind` from every rank; see `runtime.typed_json`."""

    def gather_rows(self, row: torch.Tensor) -> torch.Tensor:
        """Gather the row of every rank, to verify replicas."""


class GroupBackend(Backend, Protocol):
    """Transport between the ranks of a group of `torch.distributed`, as `backend=` makes it.

    The shortest way to one is a subclass of `C10dBackend` with five collectives of its own.
    """

    def gather_headers(self, header: StepHeader, what: str) -> dict[int, StepHeader]:
        """Gather the header of every rank, by its global rank; `what` begins or ends, for errors.

        Raises:
            RuntimeError: a rank has failed.
        """

    def start_headers(self, header: StepHeader, what: str) -> Callable[[], dict[int, StepHeader]]:
        """Start to gather the headers; return a function that waits for those of all ranks.

        Other collectives may be submitted in between, in the same order on all ranks.
        """


# Makes a transport from a group and the prefix of its names, as `C10dBackend` does. All ranks of
# the group call it together.
MakeBackend = Callable[[ProcessGroup, str], GroupBackend]
