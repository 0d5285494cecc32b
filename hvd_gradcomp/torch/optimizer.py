"""`DistributedOptimizer`: Horovod's own, with the exchange replaced.

The class of a distributed optimizer takes from Horovod's how it is set up, and `synchronize`, which
hands out what a callable in the place of a handle returns; that is the whole seam. When gradients
are exchanged is decided in `exchanging`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import horovod.torch as horovod
import torch
from horovod.torch import mpi_ops
from horovod.torch import optimizer as _stock

from hvd_gradcomp.algorithms.dense import as_compressor
from hvd_gradcomp.core import validate
from hvd_gradcomp.runtime import hierarchy
from hvd_gradcomp.torch import momentum
from hvd_gradcomp.torch.comm import horovod as comm_horovod
from hvd_gradcomp.torch.engine import TITLES, HorovodReducer
from hvd_gradcomp.torch.optimizer_mixin import class_of, derived

_SEAM = ("_register_hooks", "synchronize", "step", "zero_grad")


def DistributedOptimizer(  # noqa: N802 - the name that users of Horovod know
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    compression: Any = None,
    backward_passes_per_step: int = 1,
    op: Any = horovod.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool | None = None,
    process_set: Any = horovod.global_process_set,
    *,
    batch_size: int | None = None,
    bucket_bytes: int | None = None,
    hierarchical: bool = False,
    nonfinite: str | None = None,
    rollback: bool = True,
    scaler: Any = None,
    verify_every: int = 0,
) -> torch.optim.Optimizer:
    """Wraps an optimizer so that gradients are exchanged compressed before each step.

    A drop-in for `horovod.torch.DistributedOptimizer`. One rank alone compresses as well, so a
    compressor's effect on accuracy can be tried without a cluster.

    The result is like the optimizer, whatever that was made with, with its hooks and state. The
    loss of a closure is reduced as well for `torch.optim.LBFGS`, which decides by it.

    The exchange ends with the last backward of a step: `p.grad` holds the reduced gradient then,
    to be clipped, unscaled or replaced as without Horovod. A layer that a rank has no gradient for
    counts as zero there. Where a step has several backwards, and they share no layers, the first
    such step sends what comes after the first one uncompressed. `step` and `synchronize` end the
    exchange where no backward has: with fewer passes than `backward_passes_per_step`, and on a rank
    that has called none. The others wait for such a rank in backward, until it calls `step`. So let
    all ranks call backward equally often, each for the same optimizers, or have no collectives of
    your own between backward and `step`.

    Args:
        optimizer: any `torch.optim.Optimizer`; its parameters are floating point.
        named_parameters: usually `model.named_parameters()`. Needed unless the order of
            parameters names them well enough: without it they are called by their place.
        compression: a compressor of this package, or Horovod's `Compression.none` or `.fp16`.
        backward_passes_per_step: gradients are accumulated over this many passes.
        op: `hvd.Average` or `hvd.Sum`.
        gradient_predivide_factor: splits the averaging before and after the sum; with
            compressors that gather, only the product counts.
        num_groups, groups: refused. Buckets already group the layers, see `bucket_bytes`.
        sparse_as_dense: with False the rows of sparse gradients are gathered by Horovod,
            uncompressed, besides a bucket that has zeros in their place. None, as True, compresses
            them as dense ones, which moves fewer bytes, and says so once; in `p.grad` they are
            sparse again. With `torch.optim.SparseAdam`, which takes no other gradients on any
            rank, None gathers.
        process_set: the ranks that take part.
        batch_size: samples that a rank sees for each step, over all passes. With it
            `moments="microbatch"` are right on average; without it batches count as large, and
            moments leave out the square of the mean gradient over the number of samples.
        bucket_bytes: target size of a bucket; 25 MiB if None.
        hierarchical: reduce inside each host as dense tensors, and exchange compressed between
            hosts; to the compressor a host is one rank, with the samples of all its own. All hosts
            have the same number of ranks. Needs `hvd.init(process_sets="dynamic")` where that is
            more than one.
        nonfinite: what becomes of a step in which a gradient of any rank has a NaN or an infinity.
            All ranks do the same. "raise": a NonFiniteGradientError. "skip": `step()` changes
            nothing, neither here nor in what the compressor keeps, and the step is counted in
            `compression_stats(...).skipped`; gradients are NaN, so that a GradScaler leaves the
            step out as well. "propagate": as "skip", but `step()` applies the NaN. The last two
            take as much memory again as the compressor's state. None: "skip" with a GradScaler,
            else "raise".
        rollback: keep the compressor's state from before an exchange until the next one, so that a
            step can be left out: by `optimizer.discard_step()`, or `zero_grad()` without `step()`
            on all ranks. Takes as much memory again as the compressor's state. With False such a
            step stays in the residual; that is right where gradients of several exchanges are put
            together by hand and applied by one `step`.
        scaler: the `torch.amp.GradScaler` that scales the loss. It need not be given: None takes
            the last one that has scaled a loss since its last update. False for none of them.
        verify_every: after the update of every so many steps, `verify` the optimizer; 0 for never.

    Returns:
        An instance of the optimizer's class, as Horovod makes it. Backward exchanges for the one
        that was made last of those that train a parameter.

    Raises:
        ValueError: Horovod is not initialised; `op` is neither Average nor Sum; groups are
            asked for; names are missing or repeated; a parameter cannot be compressed; hosts or
            Horovod are not as `hierarchical` needs them; the optimizer is distributed already.
        TypeError: `compression` is no compressor, or `optimizer` no optimizer.
        MismatchError: at the first step, on all ranks, if they do not train the same model.
        GradientChangedError: in the next backward, `step` or `synchronize`, if a gradient was
            changed before it was reduced (on all ranks), or on a rank while others had called
            `step` without backward. That ranks change reduced gradients in other ways is not seen;
            `verify_every` sees what comes of it.
        OutOfStepError: in backward or `step`, on all ranks, if they are in different steps.
        DivergedError: in `step`, on all ranks, with `verify_every`.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer= takes a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if type(optimizer).__module__ == _stock.__name__:
        raise ValueError(
            f"optimizer= is distributed already: pass the {type(optimizer).__name__} that it was "
            "made from, or make another one over the same parameters"
        )
    validate.count("verify_every", verify_every)
    validate.exchange(
        "DistributedOptimizer",
        initialized=horovod.is_initialized(),
        groups=groups,
        num_groups=num_groups,
        op=op,
        allowed=(horovod.Average, horovod.Sum),
    )
    validate.policy(nonfinite)
    if not isinstance(rollback, bool):
        raise ValueError(f"rollback must be True or False, got {rollback!r}")
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    place = None
    if hierarchical:
        place = hierarchy.place_of(mpi_ops, process_set, op == horovod.Average)
    compressor = as_compressor(compression, horovod.Compression)
    compressor, gives_up = momentum.hand_over(optimizer, compressor)
    if named_parameters is not None:
        named_parameters = list(named_parameters)
    validate.count("backward_passes_per_step", backward_passes_per_step, low=1)
    factor = gradient_predivide_factor
    if factor != 1.0 and op != horovod.Average:
        raise ValueError("gradient_predivide_factor splits an average: it needs op=hvd.Average")
    title = TITLES.take()
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
        horovod.Compression.none,  # ours comes after it
        backward_passes_per_step,
        op,
        factor,
        None,
        compresses_rows,
        process_set,
    )
    distributed.defaults = dict(optimizer.defaults)  # of groups that join; here, of the class
    distributed.state.update(optimizer.state)  # what was loaded before; Horovod makes it anew
    settings = (
        f"op={'Average' if op == horovod.Average else 'Sum'}, backward_passes_per_step="
        f"{backward_passes_per_step}, gradient_predivide_factor={factor}, "
        f"sparse_as_dense={sparse_as_dense}, bucket_bytes={bucket_bytes}, "
        f"hierarchical={hierarchical}, nonfinite={nonfinite}, rollback={rollback}, "
        f"verify_every={verify_every}"
    )
    ranks = process_set.size() if place is None else place.hosts
    prescale, postscale = scales(op, factor, ranks)
    engine = HorovodReducer(
        _reduced(distributed, named_parameters),
        compressor,
        name=title,
        prescale=prescale,
        postscale=postscale,
        process_set=process_set,
        passes=backward_passes_per_step,
        batch_size=batch_size,
        bucket_bytes=bucket_bytes,
        nonfinite=nonfinite,
        rollback=rollback,
        scaler=scaler,
        place=place,
        settings=settings,
        chose_rows=compresses_rows and sparse_as_dense is None,
    )
    takeover = None
    if gives_up:
        own = momentum.momentum_of(distributed)
        assert own is not None
        takeover = momentum.MomentumTransfer(distributed, *own)
        if process_set.rank() == 0:
            momentum.LOGGER.info(
                "momentum=%g, nesterov=%s are taken over from %s by the compressor",
                *own,
                type(optimizer).__name__,
            )
    distributed._exchange_by(engine, takeover, verify_every)
    return distributed


def scales(op: Any, predivide: float, ranks: int) -> tuple[float, float]:
    """(prescale, postscale) of a `Context`."""
    return (1.0 / predivide, predivide / ranks) if op == horovod.Average else (1.0, 1.0)


def check_seam(cls: type) -> None:
    """Requires that Horovod's optimizer can be taken part in, as 0.28.1's can.

    Args:
        cls: one that Horovod made for an optimizer, or `_DistributedOptimizer`, their pattern.

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


def reducer_of(optimizer: Any) -> HorovodReducer:
    """The engine behind an optimizer.

    Raises:
        TypeError: the optimizer was not made by `hvd_gradcomp.torch.DistributedOptimizer`.
    """
    engine = getattr(optimizer, "_gradcomp", None)
    if engine is None:
        raise TypeError(
            f"{type(optimizer).__name__} exchanges nothing compressed here: pass the optimizer "
            "that hvd_gradcomp.torch.DistributedOptimizer returned, on a rank of its process set"
        )
    return engine


def _reduced(
    distributed: Any, named_parameters: list[tuple[str, torch.nn.Parameter]] | None
) -> list[tuple[str, torch.nn.Parameter]]:
    """The parameters that the optimizer trains, by name, in the user's order."""
    names = distributed._parameter_names
    trained = {p for group in distributed.param_groups for p in group["params"]}
    # A parameter that is tied may have been given by each of its names.
    order = list(dict.fromkeys(p for _, p in named_parameters or ()))
    if not named_parameters:  # Horovod sorts the names it makes up as text; ours go by place
        order = [p for group in distributed.param_groups for p in group["params"]]
    return [(names[p], p) for p in order if p in trained and p.requires_grad]
