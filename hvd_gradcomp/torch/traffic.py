"""Counter of a rank's traffic, and checksums of what it has received."""

from __future__ import annotations

import torch

_SENT, _RECEIVED, _SKIPPED = range(3)  # of the counters
_PRIME = 2**31 - 1


class TrafficCounter:
    """Counter of this rank's traffic.

    Attributes:
        counters: bytes sent, bytes received, steps skipped.
        gathered: values of sparse gradients gathered uncompressed, by the layer's name.
        waited: seconds in which steps stood still for exchanges.
    """

    def __init__(self) -> None:
        self.counters = [0, 0, 0]
        self.gathered: dict[str, int] = {}
        self.waited = 0.0
        self._heard: list[torch.Tensor] = []

    def sent(self, tensor: torch.Tensor) -> None:
        """Count a tensor that was passed to a collective."""
        self.counters[_SENT] += tensor.numel() * tensor.element_size()

    def received(self, tensor: torch.Tensor) -> None:
        """Count a tensor that a collective returned."""
        self.counters[_RECEIVED] += tensor.numel() * tensor.element_size()

    def skipped(self) -> int:
        """Count a skipped step; return the number of them."""
        self.counters[_SKIPPED] += 1
        return self.counters[_SKIPPED]

    def heard(self, reply: torch.Tensor) -> None:
        """Checksum a result that must be bit-identical on all ranks."""
        if not reply.is_cuda:
            self._heard.append(sum_of_bits(reply))

    def digest(self) -> int:
        """Return a digest of the results since the last call; 0 for none."""
        sums, self._heard = self._heard, []
        return sum(int(x) for x in sums) % _PRIME

    @property
    def totals(self) -> tuple[list[int], dict[str, int]]:
        """Return copies of what is counted, for checkpoints and rollback."""
        return list(self.counters), dict(self.gathered)

    @totals.setter
    def totals(self, totals: tuple[list[int], dict[str, int]]) -> None:
        counters, gathered = totals
        self.counters, self.gathered = list(counters), dict(gathered)


def sum_of_bits(x: torch.Tensor) -> torch.Tensor:
    """Return a checksum that any flipped bit changes."""
    data = x.detach().reshape(-1).view(torch.uint8)
    whole = data.shape[0] // 8 * 8
    return data[:whole].view(torch.int64).sum() + data[whole:].sum()
