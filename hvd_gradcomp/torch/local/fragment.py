"""Fragment of a model: parameters that are exchanged together, and their global copies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hvd_gradcomp.algorithms.local_steps import cut
from hvd_gradcomp.core.compressor import Compressor
from hvd_gradcomp.torch.bucket import Named, as_real
from hvd_gradcomp.torch.local.max_norm import Table, shortened, tables_of, was_shortened
from hvd_gradcomp.torch.options import ExchangeOptions
from hvd_gradcomp.torch.reducer import sum_of_bits
from hvd_gradcomp.torch.tensor_exchange import Connection, TensorExchange

_PRIME = 2**31 - 1
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}  # dtypes of global copies

Connect = Callable[[str], Connection]  # returns the connection of one exchange, by its name


@dataclass
class Fragment:
    """Parameters that are exchanged together.

    Attributes:
        parameters: of the model.
        copies: the global parameters, in float32 if the model's are narrower.
        exchange: of the pseudogradients.
        tables: embeddings among the parameters, by place.
        sent: pseudogradients that travel; None if none do.
        moved: this rank has made a step, or blended, since its parameters were the global ones.
    """

    parameters: list[torch.nn.Parameter]
    copies: list[torch.nn.Parameter]
    exchange: TensorExchange
    tables: dict[int, Table]
    sent: list[torch.Tensor] | None = None
    moved: bool = False

    def pseudogradients(self) -> list[torch.Tensor]:
        """Return the global parameters minus those of this rank; zeros where nothing trains.

        In the model's precision, with which the ranks began: what only the copies can express is
        not taken back.
        """
        return [
            c.detach().to(p.dtype).to(c.dtype) - p.detach()
            if p.requires_grad
            else torch.zeros_like(c)
            for c, p in zip(self.copies, self.parameters)
        ]

    @torch.no_grad()
    def send(self) -> None:
        """Start the exchange of the pseudogradients."""
        self.sent = self.pseudogradients()
        self.exchange.start(self.sent)

    def receive(self) -> list[torch.Tensor] | None:
        """End the exchange; return the mean pseudogradients, None if it was undone on all ranks."""
        self.sent = None
        return self.exchange.finish()

    def drop(self) -> None:
        """Drop what travels; the compressor's state is as before."""
        self.exchange.abort()
        self.sent = None

    @torch.no_grad()
    def take_copies(self) -> None:
        """Set the global parameters to those of this rank.

        What is equal in the model's precision stays as precise as it is.
        """
        for c, p in zip(self.copies, self.parameters):
            c.copy_(torch.where(_differs(p, c), p.to(c.dtype), c))
        self.moved = False

    @torch.no_grad()
    def take_set(self) -> None:
        """Take over what was set since this rank's parameters were the global ones.

        That is what has other values, but for rows of embeddings that a forward has shortened:
        each rank looks up others, so these are part of its training.
        """
        if self.moved:
            return
        for place, (c, p) in enumerate(zip(self.copies, self.parameters)):
            is_set = _differs(p, c)
            if place in self.tables:
                rows = c.detach().to(p.dtype)
                is_set &= ~was_shortened(self.tables[place], rows, p.detach()).unsqueeze(1)
            c.copy_(torch.where(is_set, p.to(c.dtype), c))

    @torch.no_grad()
    def align_tables(self) -> None:
        """Shorten all rows of embeddings, where a forward has shortened those that it looked up.

        For steps that the ranks make alike, from parameters that are equal.
        """
        for place, table in self.tables.items():
            p = self.parameters[place].detach()
            rows = self.copies[place].detach().to(p.dtype)
            is_set = _differs(p, rows).any(1) & ~was_shortened(table, rows, p)
            p.copy_(torch.where(is_set.unsqueeze(1), p, shortened(table, rows)))

    @torch.no_grad()
    def take_tables(self) -> None:
        """Set the global rows of embeddings to those of this rank, after a step made alike."""
        for place in self.tables:
            self.copies[place].copy_(self.parameters[place])

    def hand_out(self, blend: float) -> None:
        """Set this rank's parameters to the global ones, blended with its own."""
        for c, p in zip(self.copies, self.parameters):
            if blend:
                p.copy_(blend * p + (1.0 - blend) * c)
            else:
                p.copy_(c)
        self.moved = bool(blend)

    def resume(self) -> None:
        """Start the exchange of what travelled when the state was saved that was loaded."""
        if self.sent is not None and not self.exchange.started:
            self.exchange.start(self.sent)

    def digest(self) -> int:
        """Return a checksum of the global parameters."""
        return digest(self.copies)

    def save(self, mode: str) -> dict[str, Any]:
        """Return the state; with mode="consolidated" what any number of ranks loads."""
        saved = {
            "global": [c.detach().clone() for c in self.copies],
            "local": [p.detach().clone() for p in self.parameters],
            "moved": self.moved,
            "sent": None if self.sent is None else [x.clone() for x in self.sent],
            "exchange": self.exchange.save(mode),
        }
        return common(saved) if mode == "consolidated" else saved

    @torch.no_grad()
    def load(self, saved: dict[str, Any], started: bool) -> None:
        """Load a state of `save`, but what the compressor keeps.

        Args:
            saved: of any rank; one that is not this rank's own gives the global parameters.
            started: set the model's parameters as well: the training had begun.
        """
        own = self._is_own(saved)
        self.exchange.abort()
        for c, value in zip(self.copies, saved["global"]):
            c.copy_(value)
        self.sent = None
        self.moved = own and saved["moved"]
        if own and saved["sent"] is not None:
            self.sent = [x.to(c.device, copy=True) for x, c in zip(saved["sent"], self.copies)]
        if started:
            for p, value in zip(self.parameters, saved["local"] if own else saved["global"]):
                p.copy_(value)

    def _is_own(self, saved: dict[str, Any]) -> bool:
        """Return True if a state was saved by this rank, with its own parameters."""
        process_set = self.exchange.reducer.participants.process_set
        return saved["local"] is not None and saved["exchange"]["rank"] == process_set.rank()


def _differs(p: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """Return True where parameters have other bits than global ones in the model's precision."""
    mine, common = as_real(p.detach()), as_real(c.detach().to(p.dtype))
    bits = _BITS[mine.element_size()]
    differs = mine.view(bits) != common.view(bits)
    return differs.any(-1) if p.is_complex() else differs


def common(saved: dict[str, Any]) -> dict[str, Any]:
    """Return a fragment's saved state without what belongs to one rank between two exchanges."""
    return {**saved, "local": None, "sent": None}


def digest(tensors: Iterable[torch.Tensor]) -> int:
    """Return a checksum of contiguous tensors."""
    return int(sum(sum_of_bits(x) % _PRIME for x in tensors)) % _PRIME


def wide(x: torch.Tensor) -> torch.nn.Parameter:
    """Return zeros of a tensor's shape, in float32 if it is narrower."""
    zeros = torch.zeros_like(x, dtype=_WIDE.get(x.dtype, x.dtype), requires_grad=False)
    return torch.nn.Parameter(zeros)


def make_fragments(
    named: Named,
    copies: Sequence[torch.nn.Parameter],
    number: int,
    compressor: Compressor,
    connect: Connect,
    options: ExchangeOptions,
    settings: str,
) -> list[Fragment]:
    """Cut a model into fragments of about as many elements each.

    Args:
        named: (name, parameter) of all that is exchanged.
        copies: the global parameters, in the same order.
        number: of the fragments.
        compressor: of the pseudogradients.
        connect: returns the connection of each exchange.
        options: of the exchanges.
        settings: that must be equal on all ranks.

    Raises:
        ValueError: there are fewer parameters than fragments; the compressor cannot take them.
    """
    fragments = []
    tables = tables_of([p for _, p in named])
    for place, part in enumerate(cut([p.numel() for _, p in named], number)):
        owners, own_copies = [named[at] for at in part], [copies[at] for at in part]
        shapes = [(name, c) for (name, _), c in zip(owners, own_copies)]
        connection = connect(f"local{place}")
        exchange = TensorExchange(shapes, owners, compressor, connection, options, settings)
        inside = {at - part.start: tables[at] for at in part if at in tables}
        fragment = Fragment([p for _, p in owners], own_copies, exchange, inside)
        fragment.take_copies()
        fragments.append(fragment)
    return fragments
