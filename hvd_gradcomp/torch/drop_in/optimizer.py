"""`DistributedOptimizer`: Horovod's own, with the exchange replaced.

The class of a distributed optimizer inherits Horovod's set-up and its `synchronize`, which accepts
a callable in place of a handle; that is the whole seam. `optimizer_mixin` decides when gradients
are exchanged.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import horovod.torch as horovod
import torch
from horovod.torch import mpi_ops
from horovod.torch import optimizer as _stock

from hvd_gradcomp.core import validate
from hvd_gradcomp.runtime import hierarchy
from hvd_gradcomp.runtime.program_runner import Participants
from hvd_gradcomp.torch.comm import horovod as comm_horovod
from hvd_gradcomp.torch.drop_in.grad_synchronizer import (
    GradSynchronizer,
    TrainedParameters,
    groups_of,
)
from hvd_gradcomp.torch.drop_in.optimizer_mixin import class_of, derived
from hvd_gradcomp.torch.interop.inference import outside_inference
from hvd_gradcomp.torch.local.wrapped_optimizer import refuse_exchanging
from hvd_gradcomp.torch.reduce.bucketing import BucketPlanner
from hvd_gradcomp.torch.reduce.claims import Claim
from hvd_gradcomp.torch.reduce.momentum import LOGGER, MomentumTransfer, resolve_compressor
from hvd_gradcomp.torch.reduce.options import ExchangeOptions
from hvd_gradcomp.torch.reduce.reducer import Reducer
from hvd_gradcomp.torch.reduce.sparse_grads import SparseGradients
from hvd_gradcomp.torch.reduce.step_sync import ConfigCheck

_SEAM = ("_register_hooks", "synchronize", "step", "zero_grad")


@outside_inference()
def DistributedOptimizer(  # noqa: N802 - the name that users of Horovod know
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    compression: Any = None,
    backward_passes_per_step: int = 1,
    op: Any = horovod.Average,
    gradient_predivide_factor: float = 1.0,
    *,
    sparse_as_dense: bool | None = None,
    process_set: Any = horovod.global_process_set,
    batch_size: int | None = None,
    bucket_bytes: int | None = None,
    hierarchical: bool = False,
    nonfinite: str | None = None,
    rollback: bool = True,
    scaler: Any = None,
    verify_every: int = 0,
    _claims: bool = True,  # False for a part of another exchange, which claims the parameters
    **horovod_only: Any,
) -> torch.optim.Optimizer:
    """Wrap an optimizer so that gradients are exchanged compressed before each step.

    A drop-in for `horovod.torch.DistributedOptimizer`. A single rank compresses too, so a
    compressor's effect on accuracy can be tried without a cluster.

    The result keeps all options, hooks and state of the optimizer. For `torch.optim.LBFGS`, whose
    line search depends on it, the loss of the closure is reduced as well.

    The exchange ends with the last backward of a step: then `p.grad` holds the reduced gradient,
    to be clipped, unscaled or replaced as without Horovod. If a rank has no gradient for a layer,
    it contributes zero. If a step has several backwards that share no layers, the first such step
    sends the gradients of all but the first backward uncompressed. `step` and `synchronize` end the
    exchange if no backward has: after fewer passes than `backward_passes_per_step`, or on a rank
    that called no backward. The other ranks wait in backward until such a rank calls `step`. So
    call backward equally often on all ranks, for the same optimizers, or use no collectives of your
    own between backward and `step`.

    Args:
        optimizer: any `torch.optim.Optimizer`; its parameters are floating point.
        named_parameters: usually `model.named_parameters()`. Needed unless the order of
            parameters names them well enough: without it they are named by their position.
        compression: a compressor of this package, or Horovod's `Compression.none` or `.fp16`.
        backward_passes_per_step: gradients are accumulated over this many passes.
        op: `hvd.Average` or `hvd.Sum`.
        gradient_predivide_factor: splits the averaging before and after the sum; with
            compressors that gather, only the product counts.
        sparse_as_dense: with False Horovod gathers the rows of sparse gradients, uncompressed, in
            addition to a bucket with zeros in their place. None, like True, compresses them as
            dense ones, which moves fewer bytes, and logs that once; in `p.grad` they are sparse
            again. With `torch.optim.SparseAdam`, which requires sparse gradients on all ranks,
            None gathers.
        process_set: the ranks that take part.
        batch_size: samples that a rank sees for each step, over all passes. With it
            `moments="microbatch"` are unbiased; without it batches are assumed to be large, and
            moments omit the square of the mean gradient over the number of samples.
        bucket_bytes: target size of a bucket; 25 MiB if None.
        hierarchical: reduce inside each host as dense tensors, and exchange compressed between
            hosts; to the compressor a host is one rank, with the samples of all its ranks. All
            hosts have the same number of ranks. If that is more than one, it needs
            `hvd.init(process_sets="dynamic")`.
        nonfinite: policy for a step in which a gradient of any rank has a NaN or an infinity, the
            same on all ranks. "raise": a NonFiniteGradientError. "skip": `step()` changes neither
            parameters nor the compressor's state, and the step is counted in
            `compression_stats(...).skipped`; gradients are NaN, so that a GradScaler skips the
            step as well. "propagate": as "skip", but `step()` applies the NaN. The last two double
            the memory of the compressor's state. None: "skip" with a GradScaler, else "raise".
        rollback: keep the compressor's state from before an exchange until the next one, so that a
            step can be skipped: by `optimizer.discard_step()`, or `zero_grad()` without `step()`
            on all ranks. Doubles the memory of the compressor's state. With False a skipped step
            stays in the residual; that is right if gradients of several exchanges are combined by
            hand and applied by one `step`.
        scaler: the `torch.amp.GradScaler` that scales the loss. Usually not needed: None takes the
            last one that has scaled a loss since its last update. False for no scaler.
        verify_every: `verify` the optimizer after every so many steps; 0 for never.
        horovod_only: `num_groups` and `groups` are refused: buckets already group the layers, see
            `bucket_bytes`.

    Returns:
        An instance of the optimizer's class, as Horovod makes it. If several optimizers train a
        parameter, backward exchanges for the one made last.

    Raises:
        ValueError: Horovod is not initialised; `op` is neither Average nor Sum; groups are
            requested; names are missing or repeated; a parameter cannot be compressed; hosts or
            Horovod do not meet the needs of `hierarchical`; the optimizer is distributed already;
            something else exchanges the parameters, such as `DistributedDataParallel`, which is
            also searched at the first step.
        TypeError: `compression` is no compressor, or `optimizer` no optimizer; the model is
            sharded.
        MismatchError: at the first step, on all ranks, if they do not train the same model.
        GradientChangedError: in the next backward, `step` or `synchronize`, if a gradient was
            changed before it was reduced (on all ranks), or on a rank while others had called
            `step` without backward. Different changes of reduced gradients on different ranks are
            not detected; `verify_every` detects the diverged parameters.
        OutOfStepError: in backward or `step`, on all ranks, if they are in different steps.
        DivergedError: in `step`, on all ranks, with `verify_every`.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer= takes a torch.optim.Optimizer, got {type(optimizer).__name__}")
    refuse_exchanging(optimizer)
    validate.count("verify_every", verify_every)
    validate.exchange(
        "DistributedOptimizer",
        initialized=horovod.is_initialized(),
        horovod_only=horovod_only,
        op=op,
        allowed=(horovod.Average, horovod.Sum),
    )
    options = ExchangeOptions(
        backward_passes_per_step, batch_size, bucket_bytes, nonfinite, rollback, scaler
    )
    average = op == horovod.Average
    place = hierarchy.place_of(mpi_ops, process_set, average) if hierarchical else None
    compressor, momentum = resolve_compressor(compression, optimizer, horovod.Compression)
    if named_parameters is not None:
        named_parameters = list(named_parameters)
    factor = gradient_predivide_factor
    if factor != 1.0 and not average:
        raise ValueError("gradient_predivide_factor splits an average: it needs op=hvd.Average")
    name = comm_horovod.TITLES.take()
    if not process_set.included():
        alone: torch.optim.Optimizer = derived(optimizer, {})(
            optimizer.param_groups,
            named_parameters,
            horovod.Compression.none,
            backward_passes_per_step,
            op,
            process_set=process_set,
        )
        alone.defaults = dict(optimizer.defaults)
        return alone
    compresses_rows = sparse_as_dense is True
    if sparse_as_dense is None:
        compresses_rows = not isinstance(optimizer, torch.optim.SparseAdam)
    check_seam(_stock._DistributedOptimizer)
    distributed: Any = class_of(optimizer)(
        optimizer.param_groups,
        named_parameters,
        horovod.Compression.none,  # ours is applied by the reducer
        backward_passes_per_step,
        op,
        factor,
        None,
        compresses_rows,
        process_set,
    )
    distributed.defaults = dict(optimizer.defaults)  # for groups that join; Horovod set the class's
    distributed.state.update(optimizer.state)  # loaded earlier; Horovod starts with none
    settings = (
        f"op={'Average' if average else 'Sum'}, backward_passes_per_step="
        f"{backward_passes_per_step}, gradient_predivide_factor={factor}, "
        f"sparse_as_dense={sparse_as_dense}, bucket_bytes={bucket_bytes}, "
        f"hierarchical={hierarchical}, nonfinite={nonfinite}, rollback={rollback}, "
        f"verify_every={verify_every}"
    )
    transport = comm_horovod.HorovodBackend(name, process_set)
    participants = Participants(process_set, place, transport.make_groups)
    planner = BucketPlanner(
        _reduced(distributed, named_parameters),
        compressor,
        participants,
        options,
        name=name,
        tracking="hvd.track_moments(model) before DistributedOptimizer",
    )
    prescale, postscale = scales(op, factor, participants.rank_and_size[1])
    reducer = Reducer(
        planner,
        transport,
        participants,
        options,
        prescale=prescale,
        postscale=postscale,
        checks_sums=True,
    )
    claim = None
    if _claims:
        claim = Claim("hvd.DistributedOptimizer", reducer.parameters, process_set)
        claim.take()
    transfer = None
    if momentum is not None:
        transfer = MomentumTransfer(distributed, *momentum)
        if process_set.rank() == 0:
            LOGGER.info(
                "momentum=%g, nesterov=%s are taken over from %s by the compressor",
                *momentum,
                type(optimizer).__name__,
            )
    by_default = sparse_as_dense is None
    synchronizer = GradSynchronizer(
        reducer,
        TrainedParameters(
            distributed._parameter_names, groups_of(distributed), backward_passes_per_step
        ),
        ConfigCheck(reducer, settings, claim),
        SparseGradients(
            reducer,
            comm_horovod.sparse_allreduce,
            average=average,
            as_dense=compresses_rows,
            by_default=by_default,
        ),
        average=average,
    )
    distributed._exchange_by(synchronizer, transfer, verify_every)
    return distributed


def scales(op: Any, predivide: float, ranks: int) -> tuple[float, float]:
    """Return (prescale, postscale) for a `Context`."""
    return (1.0 / predivide, predivide / ranks) if op == horovod.Average else (1.0, 1.0)


def check_seam(cls: type) -> None:
    """Check that Horovod's optimizer can be extended, as that of 0.28.1 can.

    Args:
        cls: a class that Horovod made for an optimizer, or its template `_DistributedOptimizer`.

    Raises:
        RuntimeError: a method is missing.
    """
    missing = [name for name in _SEAM if name not in vars(cls)]
    missing += [name for name in comm_horovod.SEAM if not hasattr(mpi_ops, name)]
    if missing or cls.__module__ != _stock.__name__:
        raise RuntimeError(
            f"this Horovod's optimizer is built otherwise than 0.28.1's (no {missing}): "
            "hvd_gradcomp cannot take part in it. Install horovod==0.28.1"
        )


def _reduced(
    distributed: Any, named_parameters: list[tuple[str, torch.nn.Parameter]] | None
) -> list[tuple[str, torch.nn.Parameter]]:
    """Return the (name, parameter) pairs that the optimizer trains, in the user's order."""
    names = distributed._parameter_names
    trained = {p for group in distributed.param_groups for p in group["params"]}
    # A tied parameter may be listed under each of its names.
    order = list(dict.fromkeys(p for _, p in named_parameters or ()))
    if not named_parameters:  # Horovod sorts its generated names as text; use positions
        order = [p for group in distributed.param_groups for p in group["params"]]
    return [(names[p], p) for p in order if p in trained and p.requires_grad]
