"""What the host decides, and what stops a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hvd_gradcomp.ops.errors import PayloadError
from hvd_gradcomp.ops.tensors import Tensor


class Control(ABC):
    """What the host decides, and what stops a step."""

    @abstractmethod
    def cond(self, dense: Any, if_true: Callable[[], Any], if_false: Callable[[], Any]) -> Any:
        """One of two branches. A Python bool chooses now, a tensor while the graph runs."""

    @abstractmethod
    def map_bytes(self, function: Callable[[bytes], bytes], data: Tensor) -> Tensor:
        """`function` of a uint8 vector's bytes, as a uint8 vector. Waits for the device."""

    @abstractmethod
    def warn(self, condition: Any, message: str) -> None:
        """Logs a warning where a condition, made of what `staged` gives, holds."""

    @abstractmethod
    def stage(self, x: Tensor) -> Tensor:
        """Starts to bring a small tensor to the host, without waiting for it."""

    @abstractmethod
    def staged(self, x: Tensor) -> Any:
        """A host scalar, or what `stage` brought: an int, or the scalar tensor in a graph."""

    @abstractmethod
    def pick(self, condition: Any, x: Any, y: Any) -> Any:
        """`x if condition else y` for what `staged` gives."""

    @abstractmethod
    def bisect(self, ascending: Sequence[int], x: Any) -> Any:
        """How many of the values are less than x, for an x that came from `staged`."""

    @abstractmethod
    def choice(self, values: Sequence[int], index: Any) -> Any:
        """`values[index]` for an index that came from `staged`."""

    @abstractmethod
    def require(self, facts: Mapping[str, Tensor], error: type[Exception] = PayloadError) -> Any:
        """Raises `error` if a fact does not hold for every rank; facts are bool [world].

        The key is the message; `{ranks}` in it becomes the ranks that fail. None if that was
        known at once; otherwise bool [world], and what it is False for must not count: on a GPU
        the failure is raised one step later (see `ops.torch`), in a graph when it runs.
        """

    @abstractmethod
    def found_finite(self) -> Any:
        """Whether the gradients that `require` has looked at in this step are finite, all of them.

        True where it raises an error otherwise; one that is still on its way from a GPU, now.
        """
