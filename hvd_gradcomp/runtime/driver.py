"""Driver of exchanges that run side by side, each a generator that yields while it waits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator


def run_until_done(exchanges: Iterable[Iterator[None]], pause: Callable[[], None]) -> None:
    """Run exchanges to their ends, side by side; a blocked one never blocks the others.

    Args:
        exchanges: each yields while it waits for other ranks.
        pause: called whenever all of them wait.

    Raises:
        Exception: the first one that an exchange raised, after all others have ended.

    >>> def exchange(name, rounds):
    ...     for number in range(rounds):
    ...         print(name, number)
    ...         yield
    >>> run_until_done([exchange("a", 2), exchange("b", 1)], lambda: print("pause"))
    a 0
    b 0
    pause
    a 1
    pause
    """
    running, errors = list(exchanges), []
    while running:
        for exchange in list(running):
            try:
                next(exchange)
            except StopIteration:
                running.remove(exchange)
            except Exception as error:
                running.remove(exchange)
                errors.append(error)
        if running:
            pause()
    if errors:
        raise errors[0]
