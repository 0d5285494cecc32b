"""Options of an exchange, which Horovod's optimizer and the hook of DDP have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hvd_gradcomp.core import validate


@dataclass(frozen=True)
class ExchangeOptions:
    """Options of one model's exchange.

    Args:
        passes: backward passes for each exchange.
        batch_size: samples that a rank sees for each exchange, for `moments="microbatch"`.
        bucket_bytes: target size of a bucket; 25 MiB if None.
        nonfinite: policy for a step with a non-finite gradient; None for that of the loss scaler,
            or an error without one.
        rollback: keep the state from before an exchange until the next one, for `rollback`.
        scaler: of the loss; None looks for one, False for none.

    Raises:
        ValueError: one of them is out of range.
    """

    passes: int = 1
    batch_size: int | None = None
    bucket_bytes: int | None = None
    nonfinite: str | None = None
    rollback: bool = True
    scaler: Any = None

    def __post_init__(self) -> None:
        validate.policy(self.nonfinite)
        if not isinstance(self.rollback, bool):
            raise ValueError(f"rollback must be True or False, got {self.rollback!r}")
        if self.batch_size is not None and self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {self.batch_size}")
        validate.count("backward_passes_per_step", self.passes, low=1)

    def for_hook(self) -> ExchangeOptions:
        """Return the same, for a hook of PyTorch's, which cannot leave out a step.

        Raises:
            ValueError: the policy for non-finite gradients does so.
        """
        if self.nonfinite not in (None, "raise", "propagate"):
            raise ValueError(
                f"nonfinite must be 'raise', 'propagate' or None, got {self.nonfinite!r}: a hook "
                "cannot leave out the optimizer's step. A GradScaler does, by itself"
            )
        return self
