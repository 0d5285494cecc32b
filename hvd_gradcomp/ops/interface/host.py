"""Decisions on the host, and checks that stop a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hvd_gradcomp.ops.errors import PayloadError
from hvd_gradcomp.ops.tensors import Tensor


class HostControl(ABC):
    """Ops for decisions on the host, and for checks that stop a step.

    Attributes:
        dynamic_shapes: shapes may depend on values (a CPU, eager or in a TensorFlow graph).
            False on a GPU, where it would be a host read, and under XLA.
    """

    dynamic_shapes: bool

    @abstractmethod
    def cond(self, dense: Any, if_true: Callable[[], Any], if_false: Callable[[], Any]) -> Any:
        """Run one of two branches. A Python bool chooses now, a tensor while the graph runs."""

    @abstractmethod
    def warn(self, condition: Any, message: str) -> None:
        """Log a warning if a condition on results of `staged` holds."""

    @abstractmethod
    def stage(self, x: Tensor) -> Tensor:
        """Start to copy a small tensor to the host, without waiting for it."""

    @abstractmethod
    def staged(self, x: Tensor) -> Any:
        """Return a host scalar or a `stage` result: an int, or the scalar tensor in a graph."""

    @abstractmethod
    def pick(self, condition: Any, x: Any, y: Any) -> Any:
        """Return `x if condition else y` for results of `staged`."""

    @abstractmethod
    def bisect(self, ascending: Sequence[int], x: Any) -> Any:
        """Return the number of values that are less than x, for an x from `staged`."""

    @abstractmethod
    def choice(self, values: Sequence[int], index: Any) -> Any:
        """Return `values[index]` for an index from `staged`."""

    @abstractmethod
    def require(self, facts: Mapping[str, Tensor], error: type[Exception] = PayloadError) -> Any:
        """Raise `error` if a fact does not hold for every rank; facts are bool [world].

        The key is the message; `{ranks}` in it becomes the ranks that fail. Returns None if the
        facts were checked at once; otherwise bool [world], and ranks that are False must not
        contribute: on a GPU the error is raised one step later (see `ops.torch`), in a graph when
        it runs.
        """

    @abstractmethod
    def found_finite(self) -> Any:
        """Return True if all gradients that `require` checked in this step are finite.

        Always True where `require` raises; an error that is still pending on a GPU is raised now.
        """
