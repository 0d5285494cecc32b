"""Comparison of what ranks of local steps are about to exchange."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Optional

import torch

from hvd_gradcomp.runtime.exchange_state import (
    ExchangeState,
    States,
    digests_of,
    diverged,
    out_of_step,
)
from hvd_gradcomp.torch.local.fragment import Fragment
from hvd_gradcomp.torch.tensor_exchange import RankSync, TensorExchange
from hvd_gradcomp.torch.wrapped_optimizer import refuse_thawed, thawed

Refusal = Callable[[], Optional[Exception]]  # the error with which a rank refuses to begin
REMEDY = "Give all ranks the same parameters at first, by broadcast_parameters or a seed"
_RESTART = (
    f"{REMEDY}, and call restart() on all of them after setting parameters in mid-training. A "
    "module that writes to its own parameters in forward makes them differ too"
)


class ExchangeComparison:
    """Comparison before each exchange, so that ranks never wait for what others do not send.

    Args:
        sync: of the ranks.
        settings: that must be equal on all ranks.
        inner: the inner optimizer.
        parameters: that are exchanged.
        counts_steps: ranks exchange after as many steps on all of them; not with a deadline.

    Attributes:
        settings: as given.
    """

    def __init__(
        self,
        sync: RankSync,
        settings: str,
        inner: torch.optim.Optimizer,
        parameters: Sequence[torch.nn.Parameter],
        counts_steps: bool,
    ) -> None:
        self.settings = settings
        self._sync, self._inner, self._known = sync, inner, set(parameters)
        self._counts_steps = counts_steps

    def compare(
        self,
        number: int,
        clock: int,
        exchange: TensorExchange,
        *,
        asked: bool = False,
        fragment: Fragment | None = None,
    ) -> States:
        """Compare what the ranks are about to exchange; return the state of each.

        Args:
            number: of the fragment, or negative for something else.
            clock: steps that the schedule counts.
            exchange: that all ranks are about to start.
            asked: in `exchange()`, where ranks may have made different numbers of steps.
            fragment: that is exchanged, if it is one.

        Raises:
            OutOfStepError: on all ranks, if it is something else.
            DivergedError: on all ranks, if their global parameters differ.
            MismatchError: on all ranks, if they train different models.
        """
        own = ExchangeState(
            number,
            asked,
            exchange.reducer.steps,
            clock,
            0 if fragment is None else int(fragment.moved),
            0 if fragment is None else fragment.digest(),
            fault=thawed(self._inner, self._known),
        )
        every = self._gather(own, counts_steps=True)
        exchange.agree()
        return every

    def compare_start(
        self,
        number: int,
        digests: Sequence[int],
        exchanges: Sequence[TensorExchange],
        refusal: Refusal,
    ) -> None:
        """Compare what the ranks begin with, before the first step: nothing is lost by an error.

        Args:
            number: a negative one, which no exchange has.
            digests: of the global parameters of each fragment.
            exchanges: that the ranks will make.
            refusal: returns the error with which this rank refuses to begin, if it does.

        Raises:
            MismatchError: on all ranks, if they train different models, or in another way.
            DivergedError: on all ranks, if their global parameters differ.
            Exception: that of `refusal`.
        """
        self._sync.compare_settings(self.settings, refusal())
        for exchange in exchanges:
            exchange.agree()
        self._gather(ExchangeState(number, 0, 0, 0, 0, sum(digests), 0), counts_steps=False)

    def compare_loaded(self, number: int, clock: int, loaded: int) -> None:
        """Compare where the ranks go on after a load.

        Args:
            number: a negative one, which no exchange has.
            clock: steps that the schedule counts.
            loaded: what must be equal on all ranks.

        Raises:
            OutOfStepError: on all ranks, if they go on from different places.
        """
        own = ExchangeState(number, 0, loaded, clock, 0, 0, thawed(self._inner, self._known))
        # With a deadline each rank loads a state after as many steps as it had made.
        self._gather(own, self._counts_steps)

    def _gather(self, own: ExchangeState, counts_steps: bool) -> States:
        words = self._sync.gather([*map(int, own)])
        every = {rank: ExchangeState(*said) for rank, said in words.items()}
        if error := out_of_step(every, counts_steps):
            self._sync.compare_settings(self.settings)
            raise error
        if different := diverged(digests_of(every), "parameters", _RESTART):
            raise different
        refuse_thawed({rank: state.fault for rank, state in every.items()})
        return every
