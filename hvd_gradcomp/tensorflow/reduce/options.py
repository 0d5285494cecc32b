"""Options of an exchange, as tapes and optimizers take them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import horovod.tensorflow as horovod
from horovod.tensorflow import mpi_ops

from hvd_gradcomp.algorithms.dense import as_compressor
from hvd_gradcomp.core import validate
from hvd_gradcomp.method.compressor import Compressor
from hvd_gradcomp.runtime import hierarchy
from hvd_gradcomp.runtime.program_runner import HostPosition

_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class ExchangeOptions:
    """Options of an exchange; `DistributedGradientTape` and `DistributedOptimizer` describe them.

    Two are equal if they differ in their process sets alone.
    """

    sparse_as_dense: bool | None = None
    gradient_predivide_factor: float = 1.0
    op: Any = horovod.Average
    backward_passes_per_step: int = 1
    average_aggregated_gradients: bool = False
    process_set: Any = field(default=horovod.global_process_set, compare=False)
    scale_local_gradients: bool = True
    batch_size: int | None = None
    hierarchical: bool = False
    nonfinite: str | None = None
    verify_every: int = 0
    rollback: bool = False

    def resolve_compressor(
        self, compression: Any, what: str, horovod_only: Mapping[str, Any] = _NOTHING
    ) -> Compressor:
        """Return the compressor that `compression=` stands for; refuse what cannot work.

        Args:
            compression: as the user passed it.
            what: the function that was called.
            horovod_only: arguments that Horovod's function has and ours does not.

        Raises:
            ValueError: Horovod is not initialised; groups or Adasum are asked for; an option is
                unknown; hosts or Horovod are not as `hierarchical` needs them.
            TypeError: `compression` is no compressor, or an argument is unknown.
        """
        validate.exchange(
            what,
            initialized=horovod.is_initialized(),
            horovod_only=horovod_only,
            unused=("device_dense", "device_sparse"),  # they place collectives, which ours does
            op=self.op,
            allowed=(horovod.Average, horovod.Sum),
        )
        _ = self.position
        compressor = as_compressor(compression, horovod.Compression)
        validate.policy(self.nonfinite)
        return compressor

    @property
    def averages(self) -> bool:
        """Return True if gradients are averaged, not summed."""
        return bool(self.op == horovod.Average)

    @property
    def position(self) -> HostPosition | None:
        """Return the position of this rank among hosts; None unless only their sums are compressed.

        Raises:
            ValueError: hosts or Horovod are not as `hierarchical` needs them.
        """
        if not self.hierarchical:
            return None
        return hierarchy.place_of(mpi_ops, self.process_set, self.averages)

    def with_policy(self, scaled: bool) -> ExchangeOptions:
        """Return the same with a policy for non-finite gradients.

        Args:
            scaled: whether the loss is scaled; then "skip" is the default.
        """
        return replace(self, nonfinite=self.nonfinite or ("skip" if scaled else "raise"))

    def __str__(self) -> str:
        """Describe what must be equal on all ranks."""
        return (
            f"op={'Average' if self.averages else 'Sum'}, "
            f"gradient_predivide_factor={self.gradient_predivide_factor}, "
            f"sparse_as_dense={self.sparse_as_dense}, hierarchical={self.hierarchical}, "
            f"nonfinite={self.nonfinite}, rollback={self.rollback}"
        )
