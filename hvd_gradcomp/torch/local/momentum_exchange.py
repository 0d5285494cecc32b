"""`MomentumExchange`: Adam whose momentum is exchanged compressed, instead of gradients.

Compressed gradients harm Adam, since it divides by the root of the mean of their squares: what
error feedback sends late and in one piece becomes a small step. So here each rank adds its gradient
to the momentum that all ranks have in common, the momentum travels through the compressor with its
error feedback, and the mean over ranks is everybody's momentum. The second moment comes from dense
gradients of the first steps and is fixed then: 1-bit Adam (Tang et al. 2021), section 3, with any
compressor in the place of the sign.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from hvd_gradcomp.algorithms.combined.local_steps import LocalSchedule
from hvd_gradcomp.algorithms.dense import NoneCompressor, as_compressor
from hvd_gradcomp.checkpoint.schema import CheckpointError
from hvd_gradcomp.core import validate
from hvd_gradcomp.method.handover import correction_of
from hvd_gradcomp.ops import NonFiniteGradientError
from hvd_gradcomp.runtime.exchange_state import diverged
from hvd_gradcomp.runtime.step_header import Kind, StepHeader, compare
from hvd_gradcomp.torch.interop.dynamo import interpreted
from hvd_gradcomp.torch.interop.inference import outside_inference
from hvd_gradcomp.torch.interop.shards import is_sharded, local_part
from hvd_gradcomp.torch.local.fixed_variance import FixedVarianceAdam
from hvd_gradcomp.torch.local.fragment import digest as digest_of
from hvd_gradcomp.torch.local.ranks import REMEDY
from hvd_gradcomp.torch.local.sharding import Sharding
from hvd_gradcomp.torch.local.tensor_exchange import (
    Connection,
    RankSync,
    TensorExchange,
    copied,
)
from hvd_gradcomp.torch.local.warmup import WarmUp
from hvd_gradcomp.torch.local.wrapped_optimizer import (
    KEPT,
    WrappedOptimizer,
    device_of,
    loss_of,
    named_of,
    refuse_thawed,
    thawed,
)
from hvd_gradcomp.torch.reduce.options import ExchangeOptions


class MomentumExchangeOptimizer(WrappedOptimizer):
    """Adam that exchanges momenta; `MomentumExchange` makes it.

    With betas b1, b2, mean gradients g of the first `warmup_steps` T, and local gradients g_i after
    them: `m_i = b1 * m + (1 - b1) * g_i`; m is the mean over ranks of what the compressor sends of
    m_i and of what it kept; `v` is that of step T, corrected by `1 - b2**T`; the update is
    Adam's, or AdamW's.

    Args:
        optimizer: an `Adam` or `AdamW`.
        named_parameters: (name, parameter) of all that it trains; by place if None.
        connect: returns the connection of one exchange, by its name.
        compression: of the momenta.
        warmup_steps: first steps, dense; at least 1.
        stock: Horovod's `Compression`, if there is Horovod.
        bucket_bytes, nonfinite: as in `DistributedOptimizer`.
        sharding: of the model, if this rank has shards of it.

    Attributes:
        steps_made: so far, skipped ones included.
    """

    @outside_inference()
    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None,
        connect: Callable[[str], Connection],
        compression: Any,
        warmup_steps: int,
        *,
        stock: Any = None,
        bucket_bytes: int | None = None,
        nonfinite: str | None = None,
        sharding: Sharding | None = None,
    ) -> None:
        super().__init__(optimizer, sharding)
        self._adam = FixedVarianceAdam(optimizer, warmup_steps)
        validate.count("warmup_steps", warmup_steps, low=1)
        validate.skip_or_raise(nonfinite, "a momentum that is not finite stays so")
        compressor = as_compressor(compression, stock)
        if (correction_of(compressor) or (0,))[0] != 0:
            raise ValueError(
                "the compressor corrects a momentum of its own, and a momentum is what travels: "
                f"pass momentum=0. It is {compressor}"
            )
        self._named = named_of(optimizer, named_parameters)
        self._warmup_steps, self._skips = warmup_steps, nonfinite == "skip"
        settings = (
            f"{type(optimizer).__name__}, {warmup_steps=}, {bucket_bytes=}, {nonfinite=}, "
            f"betas={[group['betas'] for group in optimizer.param_groups]}"
        )

        parts = [(name, _part_of(p)) for name, p in self._named]

        def exchange(name: str, what: Any) -> TensorExchange:
            # A step that is not finite on some rank is undone on all; then it is seen to.
            options = ExchangeOptions(bucket_bytes=bucket_bytes, nonfinite="skip", scaler=False)
            return TensorExchange(parts, self._named, what, connect(name), options, settings)

        self._sync = RankSync(connect("sync"), device_of(self._named))
        self.description = self._sync.described(self._named, compressor, settings)
        parameters = [p for _, p in self._named]
        self._warmup = WarmUp(optimizer, parameters, exchange("gradients", NoneCompressor()))
        self._momenta = exchange("momenta", compressor)
        self.steps_made = self._skipped = 0
        self._compared = False  # since these ranks take part
        self._claim_parameters("MomentumExchange", self._named)

    # -- one step ------------------------------------------------------------------------------

    @interpreted
    @outside_inference()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Exchange, and update the parameters; on all ranks alike.

        Raises:
            OutOfStepError: on all ranks, if they are in different steps.
            MismatchError: on all ranks, in the first step, if they train different models.
            DivergedError: on all ranks, in the first step, if their parameters differ.
            TypeError, ValueError: in the first step, on all ranks, if the model was sharded since,
                or something else exchanges it.
            NonFiniteGradientError: on all ranks, if a gradient of one of them is not finite; not
                with nonfinite="skip", nor with a GradScaler: then all ranks skip the step.
        """
        self._check_superseded()
        loss = loss_of(closure)
        self.unscale()
        warm = self.steps_taken < self._warmup_steps
        self._compare(self._warmup.exchange if warm else self._momenta)
        means = self._warmup.average() if warm else self._average_momenta()
        self.steps_made += 1
        if means is None:
            self._skipped += 1
            if not (self.scaled or self._skips):
                raise NonFiniteGradientError(
                    f"a gradient of some rank is not finite in step {self.steps_made}"
                )
            return loss
        if warm:
            self._warmup.apply(means)
            if self.steps_taken == self._warmup_steps:
                self._warmup.exchange.release()
        else:
            self._adam.update({p: mean for (_, p), mean in zip(self._named, means)})
        return loss

    @torch.no_grad()
    def _average_momenta(self) -> list[torch.Tensor] | None:
        self._momenta.start(copied(self._adam.local_momenta([p for _, p in self._named])))
        return self._momenta.finish()

    def _compare(self, exchange: TensorExchange) -> None:
        known, digest = {p for _, p in self._named}, 0
        if not self._compared:
            self._sync.compare_settings(self.description, self._refusal())
            digest = digest_of(torch.clone(local_part(p)).contiguous() for p in known)
        header = StepHeader(
            Kind.STEP,
            self.steps_made,
            clock=self.steps_taken,
            digest=digest,
            fault=thawed(self.inner, known),
        )
        rows = self._sync.start_gather([*header])()
        headers = {rank: StepHeader(*row) for rank, row in rows.items()}
        if error := compare(headers):
            self._sync.compare_settings(self.description)
            raise error
        refuse_thawed({rank: each.fault for rank, each in headers.items()})
        exchange.agree()
        digests = {rank: each.digest for rank, each in headers.items()}
        if different := diverged(digests, "parameters", REMEDY, self._sync.replicas):
            raise different
        self._compared = True

    def compare_again(self) -> None:
        super().compare_again()
        self._compared = False

    # -- what it keeps, and what it has done ---------------------------------------------------

    @property
    def exchanges(self) -> tuple[list[TensorExchange], list[TensorExchange]]:
        return [self._momenta], [self._warmup.exchange]

    @property
    def exchange_schedule(self) -> LocalSchedule:
        return LocalSchedule(every=1, warmup_steps=self._warmup_steps)

    @property
    def steps_taken(self) -> int:
        return self.steps_made - self._skipped

    @outside_inference()
    def state_dict(self, mode: str = "sharded") -> dict[str, Any]:
        """Return the inner optimizer's state, and under "gradcomp" that of the exchange.

        Each rank saves its own residuals; `hvd.save_checkpoint` does so.
        """
        kept = {
            "steps": self.steps_made,
            "skipped": self._skipped,
            "warmup_steps": self._warmup_steps,
            "shard": self._shard,
            "gradients": self._warmup.exchange.save(mode),
            "momenta": self._momenta.save(mode),
        }
        return {**self.inner.state_dict(), KEPT: kept}

    @outside_inference()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of `state_dict`, or that of a plain Adam, whose steps count as the first.

        Raises:
            CheckpointError: it is of another format, compressor, model or number of ranks.
        """
        kept = state_dict.get(KEPT)
        if kept is not None:
            self._check_fits(kept)
            for exchange, saved in self._exchanges_in(kept):
                exchange.load(saved)
        self.load_inner(state_dict)
        self.load_rounds(state_dict)

    def _check_fits(self, saved: Any) -> None:
        then = saved.get("warmup_steps") if isinstance(saved, dict) else saved
        if not isinstance(saved, dict) or then != self._warmup_steps:
            raise CheckpointError(
                f"the state was saved with warmup_steps={then}, and here it is {self._warmup_steps}"
            )
        if saved["shard"] != self._shard:
            raise CheckpointError(
                f"the state was saved with another shard: {saved['shard']}, and here it is "
                f"{self._shard}"
            )

    def _exchanges_in(self, saved: dict[str, Any]) -> list[tuple[TensorExchange, dict[str, Any]]]:
        return [(self._momenta, saved["momenta"]), (self._warmup.exchange, saved["gradients"])]

    def load_rounds(self, state_dict: dict[str, Any]) -> None:
        kept = state_dict.get(KEPT)
        if kept is not None:
            self.steps_made, self._skipped = kept["steps"], kept["skipped"]
            return
        steps = [int(self.state[p]["step"]) for _, p in self._named if "step" in self.state[p]]
        self.steps_made, self._skipped = min(steps, default=0), 0


def _part_of(p: torch.nn.Parameter) -> torch.nn.Parameter:
    """Return this rank's part of a parameter, as one that is not sharded, with the same memory."""
    return torch.nn.Parameter(local_part(p), requires_grad=False) if is_sharded(p) else p
