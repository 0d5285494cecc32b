"""End of an optimizer's exchange: sync rounds, then the gradients that are still missing.

See `step_sync` for the messages of the ranks and their consequences.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import Any

import torch
from horovod.torch import optimizer as _stock

from hvd_gradcomp.torch import grad_delivery, parameters
from hvd_gradcomp.torch.comm import horovod
from hvd_gradcomp.torch.step_sync import (
    CHANGED,
    HERE,
    LATE,
    SPARSE,
    GradientChangedError,
    OutOfStepError,
    SyncMessage,
    all_plain,
    all_set_alike,
    any_told,
    changed_alone,
    digest_of,
    read,
    usual,
)

_STOCK: Any = _stock._DistributedOptimizer


def ending(optimizer: Any, last: bool, joined: bool = False) -> Generator[None, None, bool]:
    """Run sync rounds until the exchange has ended here; yield while waiting for other ranks.

    Args:
        optimizer: a `DistributedOptimizerMixin`, as in all functions below.
        last: this rank has no more gradients in this step; go on until no rank can have any.
        joined: this rank has run out of batches, and contributes zeros.

    Returns:
        True if there was an exchange, False if all ranks have joined.
    """
    engine, rounds = optimizer._gradcomp, optimizer._rounds
    try:
        while not rounds.closed:
            optimizer._arrivals.news = False
            parameters.join(optimizer)
            engine.agreement.agree()
            words = yield from _tell(optimizer, last, joined)
            if all(word.joined for word in words):
                return False
            ended = rounds.ended
            names = [optimizer._parameter_names[p] for p in engine.ordered_parameters]
            ranks = optimizer.process_set.ranks or range(len(words))
            try:
                late = rounds.hear(words, names, ranks)
            except GradientChangedError:
                if not ended:  # leaves no collective in flight
                    yield from _end(optimizer)
                raise
            except OutOfStepError:
                engine.abandon()
                raise
            if rounds.ended and not ended:
                yield from _end(optimizer)
            came = [engine.ordered_parameters[i] for i in late]
            yield from optimizer._late.add_up(optimizer, came)
            if rounds.closed:
                _leave_unused(optimizer)
            if not last:
                break
        return True
    except BaseException:  # including KeyboardInterrupt
        optimizer._abandon()
        raise


def has_everything(optimizer: Any) -> bool:
    """Return True if this rank lacks no gradient."""
    return all(code & (HERE | LATE) for code in _codes(optimizer))


def check_mixed(optimizer: Any) -> None:
    """Check gradients that some ranks reduced in backward and others in `step`.

    Raises:
        GradientChangedError: a gradient has changed since, which the others could not do alike.
    """
    changed = optimizer._versions.changed()
    if optimizer._rounds.closed and optimizer._rounds.mixed and changed:
        name = optimizer._parameter_names[changed[0]]
        optimizer._begin()
        raise GradientChangedError(changed_alone(name, optimizer.process_set.rank()))


def _leave_unused(optimizer: Any) -> None:
    """Set `p.grad` to None for layers that no rank has used, if their reduced gradient is zero.

    So the optimizer applies neither weight decay nor momentum to them, as on a single rank.
    """
    for place in optimizer._rounds.unused:
        p = optimizer._gradcomp.ordered_parameters[place]
        if p.grad is not None:
            values = p.grad._values() if p.grad.is_sparse else p.grad
            if not bool(values.any()):
                p.grad = None
                optimizer._versions.forget(p)


def _tell(optimizer: Any, last: bool, joined: bool) -> Any:
    """Run one round: send this rank's `SyncMessage` and return those of all ranks."""
    engine, rounds = optimizer._gradcomp, optimizer._rounds
    watch, known = horovod.waiting.among(optimizer.process_set), rounds.sparse
    codes = [*usual(len(engine.ordered_parameters), known)] if joined else _codes(optimizer)
    settings = 0 if joined else digest_of(engine.in_step)
    said = last, rounds.ended, codes, settings, engine.summed, watch.pending, joined
    word = SyncMessage(engine.steps, *said)
    heads = yield from engine.agreement.tell(word.head(known), "end")
    if any_told(heads):
        watch.complete()
    if not all_set_alike(heads):
        engine.compare_step()
    layers: Sequence[Sequence[int]] = [usual(len(codes), known)] * len(heads)
    if not all_plain(heads):
        layers = yield from engine.agreement.tell(codes, "end.layers")
    return read(heads, layers)


def _codes(optimizer: Any) -> list[int]:
    return [_code(optimizer, p) for p in optimizer._gradcomp.ordered_parameters]


def _code(optimizer: Any, p: torch.nn.Parameter) -> int:
    taken = p in optimizer._handles and optimizer._handles[p][0] is not None
    here = taken or optimizer._rounds.ended or not p.requires_grad
    sparse = taken and grad_delivery.goes_sparse(optimizer, p)
    changed = optimizer._versions.has_changed(p)
    return HERE * here | SPARSE * sparse | LATE * (p in optimizer._late) | CHANGED * changed


def _end(optimizer: Any) -> Iterator[None]:
    """End the exchange, with zeros for missing gradients; then `p.grad` is reduced."""
    engine, rounds, handles = optimizer._gradcomp, optimizer._rounds, optimizer._handles
    engine.order_is_known()
    parameters.leave_out(optimizer, engine.begin())
    order = engine.ordered_parameters
    missing = []
    for place, p in enumerate(order):
        if p in optimizer._requires_update and handles.get(p, (None, None))[0] is None:
            missing.append(p)
            if p.grad is None and place in rounds.sparse - rounds.both:
                p.grad = grad_delivery.no_rows(p)
            handles[p] = optimizer._allreduce_grad_async(p)
    for place in sorted(rounds.both):
        p = order[place]
        handles[p] = grad_delivery.make_dense(optimizer, p), None
    for p in handles:
        if p.grad is None:  # dropped since it was taken, after a failed backward
            p.grad = torch.zeros_like(p)
    try:
        yield from engine.finishing()
        _STOCK.synchronize(optimizer)
    finally:
        engine.clear()
    optimizer._synchronized = False
    for p in order:
        optimizer._allreduce_delay[p] = 0
    optimizer._versions.only(order)
    if not rounds.closed:
        optimizer._late.watch(missing)
