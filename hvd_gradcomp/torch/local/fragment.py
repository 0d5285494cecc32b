"""Fragment of a model: parameters that are exchanged together, and their global copies."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, groupby
from typing import Any

import torch

from hvd_gradcomp.algorithms.combined.local_steps import cut
from hvd_gradcomp.runtime.local_rounds import Agreement, Fragment
from hvd_gradcomp.torch.interop.shards import local_part
from hvd_gradcomp.torch.local.max_norm import Table, shortened, tables_of, was_shortened
from hvd_gradcomp.torch.local.outer import OuterOptimizer
from hvd_gradcomp.torch.local.sharding import Sharding
from hvd_gradcomp.torch.local.tensor_exchange import Connection, TensorExchange, copied
from hvd_gradcomp.torch.reduce.bucket import Named, as_real
from hvd_gradcomp.torch.reduce.options import ExchangeOptions
from hvd_gradcomp.torch.reduce.reducer import copy_all
from hvd_gradcomp.torch.reduce.reducer_state import reset_local

_PRIME = 2**31 - 1
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes

try:  # quicker than `torch.equal`
    _memcmp: Any = ctypes.CDLL(None).memcmp
    _memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
except (AttributeError, OSError, TypeError):  # where the process has no C library by this name
    _memcmp = None

Connect = Callable[[str], Connection]  # returns the connection of one exchange, by its name


class TensorFragment(Fragment):
    """Fragment of parameters; of those that are sharded this rank holds and exchanges its part.

    Args:
        parameters: of the model.
        copies: the global parameters, this rank's parts of them, in float32 if the model's are
            narrower.
        outer: the optimizer that moves them.
        exchange: of the pseudogradients.
        tables: embeddings with `max_norm` among the parameters, by place.
        keeps_sent: keep the pseudogradients in flight, where steps are made before they arrive.

    Attributes:
        parameters, copies, exchange: as given.
        sent: pseudogradients in flight; None if none are, or they are not kept.
    """

    exchange: TensorExchange

    def __init__(
        self,
        parameters: list[torch.nn.Parameter],
        copies: list[torch.nn.Parameter],
        outer: OuterOptimizer,
        exchange: TensorExchange,
        tables: dict[int, Table],
        keeps_sent: bool,
    ) -> None:
        self.parameters, self.copies, self.exchange = parameters, copies, exchange
        self._checksum = Checksum(copies)
        self._outer, self._tables, self._keeps_sent = outer, tables, keeps_sent
        self.sent: list[torch.Tensor] | None = None
        self.moved = 0

    @property
    def in_flight(self) -> bool:
        return self.sent is not None or self.exchange.started

    @property
    def _parts(self) -> list[torch.Tensor]:
        """Return this rank's parts of the parameters; `fully_shard` may move their memory."""
        return [local_part(p) for p in self.parameters]

    def digest(self) -> int:
        return self._checksum.digest()

    # -- an exchange ---------------------------------------------------------------------------

    def _write_pseudogradient(self, place: int, memory: torch.Tensor) -> None:
        """Write the global parameter minus that of this rank; zeros where nothing trains.

        In the model's precision, with which the ranks began: what only the copies can express is
        not taken back.
        """
        c, p = self.copies[place], self.parameters[place]
        if not p.requires_grad:
            memory.zero_()
        elif type(p) is torch.nn.Parameter and p.dtype == c.dtype == memory.dtype:
            torch.sub(c, p, out=memory)
        else:
            begun = c.detach().to(p.dtype).to(c.dtype)
            torch.sub(as_real(begun), as_real(local_part(p)), out=memory)

    @torch.no_grad()
    def send(self, agree: Agreement) -> None:
        if not self._keeps_sent:
            self.exchange.start(self._write_pseudogradient, agree)
            return
        sent = [torch.zeros_like(c, requires_grad=False) for c in self.copies]
        for place, x in enumerate(sent):
            self._write_pseudogradient(place, as_real(x))
        self.exchange.start(copied(sent), agree)
        self.sent = sent

    def resume(self) -> None:
        if self.sent is not None and not self.exchange.started:
            self.exchange.start(copied(self.sent))

    def receive(self) -> list[torch.Tensor] | None:
        self.sent = None
        return self.exchange.finish()

    def drop(self) -> None:
        self.exchange.abort()
        self.sent = None

    def forget(self) -> None:
        reset_local(self.exchange.reducer, counts=False)

    @torch.no_grad()
    def step(self, means: Sequence[torch.Tensor]) -> None:
        self._outer.step(
            [
                (c, mean if p.requires_grad else None)
                for c, p, mean in zip(self.copies, self.parameters, means)
            ]
        )

    # -- global parameters and those of the rank -----------------------------------------------

    @torch.no_grad()
    def hand_out(self, blend: float) -> None:
        if not blend:
            copy_all(self._parts, self.copies)
            self.moved = 0
            return
        for c, part in zip(self.copies, self._parts):
            part.copy_(blend * part + (1.0 - blend) * c)

    @torch.no_grad()
    def take_copies(self, keeps_equal: bool = True) -> None:
        for c, part in zip(self.copies, self._parts):
            c.copy_(torch.where(_differs(part, c), part.to(c.dtype), c) if keeps_equal else part)
        self.moved = 0

    @torch.no_grad()
    def take_set(self) -> None:
        """Take over what was set since this rank's parameters were the global ones.

        That is what has other values, but for rows of embeddings that a forward has shortened:
        each rank looks up others, so these are part of its training. What this rank has not sent
        of these elements is dropped.
        """
        if self.moved:
            return
        places = {}
        for place, (c, part) in enumerate(zip(self.copies, self._parts)):
            if part.device.type == "cpu" and _has_bits(part, c):  # nearly always
                continue
            is_set = _differs(part, c)
            if place in self._tables:
                rows = c.detach().to(part.dtype)
                is_set &= ~was_shortened(self._tables[place], rows, part).unsqueeze(1)
            c.copy_(torch.where(is_set, part.to(c.dtype), c))
            places[place] = is_set
        if places:
            self.exchange.forget(places)

    @torch.no_grad()
    def before_warm_step(self) -> None:
        """Shorten all rows of embeddings, where a forward has shortened those that it looked up."""
        for place, table in self._tables.items():
            p = self.parameters[place].detach()
            rows = self.copies[place].detach().to(p.dtype)
            is_set = _differs(p, rows).any(1) & ~was_shortened(table, rows, p)
            p.copy_(torch.where(is_set.unsqueeze(1), p, shortened(table, rows)))

    @torch.no_grad()
    def after_warm_step(self) -> None:
        for place in self._tables:
            self.copies[place].copy_(self.parameters[place])

    def after_idle_round(self) -> None:
        self.hand_out(0.0)  # rows that a forward has shortened

    # -- checkpoints ---------------------------------------------------------------------------

    def save(self, mode: str) -> dict[str, Any]:
        """Return the state; with mode="consolidated" what any number of ranks loads."""
        saved = {
            "global": [c.detach().clone() for c in self.copies],
            "local": [part.clone() for part in self._parts],
            "moved": self.moved,
            "sent": None if self.sent is None else [x.clone() for x in self.sent],
            "exchange": self.exchange.save(mode),
        }
        return without_local(saved) if mode == "consolidated" else saved

    @torch.no_grad()
    def load(self, saved: dict[str, Any], started: bool) -> None:
        """Load a state of `save`, without the compressor's.

        Args:
            saved: of any rank; one that is not this rank's own gives the global parameters.
            started: set the model's parameters as well: the training had begun.
        """
        is_own = self.owns(saved)
        self.exchange.abort()
        for c, value in zip(self.copies, saved["global"]):
            c.copy_(value)
        self.sent = None
        self.moved = saved["moved"] if is_own else 0
        if is_own and saved["sent"] is not None:
            self.sent = [x.to(c.device, copy=True) for x, c in zip(saved["sent"], self.copies)]
        if started:
            for part, value in zip(self._parts, saved["local"] if is_own else saved["global"]):
                part.copy_(value)

    def owns(self, saved: dict[str, Any]) -> bool:
        """Return True if a state was saved by this rank, with its own parameters."""
        process_set = self.exchange.reducer.participants.process_set
        return saved["local"] is not None and saved["exchange"]["rank"] == process_set.rank()


def _differs(p: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """Return True where parameters have other bits than global ones in the model's precision."""
    local, shared = _bits(p, c)
    differs = local != shared
    return differs.any(-1) if p.is_complex() else differs


def _bits(p: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bits of parameters, and of global ones in the model's precision, as integers."""
    local, shared = as_real(p), as_real(c.detach().to(p.dtype))
    bits = _BITS[local.element_size()]
    return local.view(bits), shared.view(bits)


def _has_bits(p: torch.Tensor, c: torch.Tensor) -> bool:
    """Return True if parameters on a CPU have the bits of global ones in the model's precision."""
    if p.dtype == c.dtype and p.is_contiguous() and c.is_contiguous() and _memcmp is not None:
        return bool(_memcmp(p.data_ptr(), c.data_ptr(), p.nbytes) == 0)
    return torch.equal(*_bits(p, c))


def without_local(saved: dict[str, Any]) -> dict[str, Any]:
    """Return a fragment's saved state without what belongs to one rank between two exchanges."""
    return {**saved, "local": None, "sent": None}


class Checksum:
    """Checksum of the bits of some tensors, which a rank's memory layout does not change.

    Args:
        tensors: dense ones, of which neighbours in memory are padded with zeros; see `neighbours`.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        self._places = [x.data_ptr() for x in tensors]
        self._pieces = _pieces(tensors)

    @torch.no_grad()
    def digest(self) -> int:
        """Return the sum of all words of 64 bits, modulo a prime."""
        moved = any(x.data_ptr() != place for x, place in zip(self._tensors, self._places))
        if self._pieces is None or moved:  # a user has replaced the memory of one
            return digest(self._tensors)
        return _sum(self._pieces)


def digest(tensors: Iterable[torch.Tensor]) -> int:
    """Return the checksum of dense tensors; see `Checksum`."""
    return _sum(_padded(x) for x in tensors)


def _sum(pieces: Iterable[torch.Tensor]) -> int:
    return sum(int(x.sum()) for x in pieces) % 2**64 % _PRIME


def _pieces(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
    """Return the pieces of memory that have all tensors, as words of 64 bits.

    None if the tensors do not begin and end with whole words.
    """
    pieces: list[torch.Tensor] = []
    for _, group in groupby(tensors, key=lambda x: (x.untyped_storage().data_ptr(), x.device)):
        some = [x for x in group if x.numel()]
        if not some:
            continue
        first = some[0]
        storage = first.untyped_storage()
        begin = first.storage_offset() * first.element_size()
        end = max(x.storage_offset() * x.element_size() + x.nbytes for x in some)
        words = -(-(end - begin) // 8)
        if begin % 8 or begin + 8 * words > storage.nbytes():
            return None
        empty = torch.empty(0, dtype=torch.int64, device=first.device)
        pieces.append(empty.set_(storage, begin // 8, (words,)))
    return pieces


def _padded(x: torch.Tensor) -> torch.Tensor:
    """Return a copy of a dense tensor in the order of its memory, as words of 64 bits."""
    data = x.detach().as_strided((x.numel(),), (1,), x.storage_offset()).view(torch.uint8)
    padded = data.new_zeros(-(-len(data) // 8) * 8)
    padded[: len(data)] = data
    return padded.view(torch.int64)


def lengths_of_units(names: Sequence[str], sharding: Sharding) -> list[int]:
    """Return the number of parameters of each unit; those of a unit follow each other."""
    return [len([*group]) for _, group in groupby(names, key=sharding.units.__getitem__)]


def make_fragments(
    named: Named,
    units: Sequence[int],
    outer: OuterOptimizer,
    number: int,
    connect: Connect,
    options: ExchangeOptions,
    settings: str,
    keeps_sent: bool,
) -> list[TensorFragment]:
    """Cut a model into fragments of about as many elements each.

    Args:
        named: (name, parameter) of all that is exchanged.
        units: numbers of consecutive parameters that stay together.
        outer: has the global parameters, in the same order, and the compressor.
        number: of the fragments.
        connect: returns the connection of each exchange.
        options: of the exchanges.
        settings: that must be equal on all ranks.
        keeps_sent: see `TensorFragment`.

    Raises:
        ValueError: there are fewer units than fragments; the compressor cannot take them.
    """
    fragments = []
    tables = tables_of([p for _, p in named])
    ends = [0, *accumulate(units)]
    sizes = [sum(p.numel() for _, p in named[a:b]) for a, b in zip(ends, ends[1:])]
    for place, some in enumerate(cut(sizes, number)):
        part = range(ends[some.start], ends[some.stop])
        owners, copies = [named[at] for at in part], [outer.copies[at] for at in part]
        shapes = [(name, c) for (name, _), c in zip(owners, copies)]
        connection = connect(f"local{place}")
        exchange = TensorExchange(shapes, owners, outer.compressor, connection, options, settings)
        inside = {at - part.start: tables[at] for at in part if at in tables}
        parameters = [p for _, p in owners]
        fragment = TensorFragment(parameters, copies, outer, exchange, inside, keeps_sent)
        fragment.take_copies()
        fragments.append(fragment)
    return fragments
