"""`DistributedOptimizer`: Horovod's own, with the exchange replaced.

Horovod's optimizer asks `self._allreduce_grad_async(p)` for a handle when the gradient of `p` is
ready, and a handle may be a callable that returns the reduced tensor. That is the whole seam: the
class that Horovod makes for each optimizer gets that method from here, and everything else (hooks,
counting of backward passes, `synchronize`, `skip_synchronize`) stays Horovod's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import horovod.torch as horovod
import torch
from horovod.torch import mpi_ops
from horovod.torch import optimizer as _stock

from hvd_gradcomp import description, hierarchy, validate
from hvd_gradcomp.algorithms.dense import as_compressor
from hvd_gradcomp.stats import CompressionStats
from hvd_gradcomp.torch import checkpoint, digests, lending, moments, momentum, parameters
from hvd_gradcomp.torch.engine import TITLES, Engine

_SUPPORTS_SCALING = "_step_supports_amp_scaling"  # as PyTorch calls it
_SEAM = ("_allreduce_grad_async", "_register_hooks", "synchronize", "step", "zero_grad")


class _LeftOutError(Exception):
    """Leaves an optimizer's step from within its closure."""

    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.loss = loss


def DistributedOptimizer(  # noqa: N802 - the name that users of Horovod know
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    compression: Any = None,
    backward_passes_per_step: int = 1,
    op: Any = horovod.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: Any = horovod.global_process_set,
    *,
    batch_size: int | None = None,
    bucket_bytes: int | None = None,
    hierarchical: bool = False,
    nonfinite: str | None = None,
    scaler: Any = None,
    verify_every: int = 0,
) -> torch.optim.Optimizer:
    """Wraps an optimizer so that gradients are exchanged compressed before each step.

    A drop-in for `horovod.torch.DistributedOptimizer`. One rank alone compresses as well, so a
    compressor's effect on accuracy can be tried without a cluster.

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
        sparse_as_dense: compress sparse gradients as dense ones. Otherwise they are gathered by
            Horovod, uncompressed.
        process_set: the ranks that take part.
        batch_size: samples that a rank sees for each step, over all passes. Sharpens
            `moments="microbatch"`; unknown batch sizes count as large.
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
        scaler: the `torch.amp.GradScaler` that scales the loss. It need not be given: None takes
            the last one that has scaled a loss since its last update. False for none of them.
        verify_every: after the update of every so many steps, `verify` the optimizer; 0 for never.

    Returns:
        An instance of the optimizer's class, as Horovod makes it. Backward exchanges for the one
        that was made last of those that train a parameter.

    Raises:
        ValueError: Horovod is not initialised; `op` is neither Average nor Sum; groups are
            asked for; names are missing or repeated; a parameter cannot be compressed; hosts or
            Horovod are not as `hierarchical` needs them.
        TypeError: `compression` is no compressor.
        MismatchError: at the first step, on all ranks, if they do not train the same model.
        DivergedError: in `step`, on all ranks, with `verify_every`.
    """
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
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    place = None
    if hierarchical:
        place = hierarchy.place_of(mpi_ops, process_set, op == horovod.Average)
    compressor = as_compressor(compression, horovod.Compression)
    compressor, gives_up = momentum.settle(optimizer, compressor)
    if named_parameters is not None:
        named_parameters = list(named_parameters)
    distributed = horovod.DistributedOptimizer(
        optimizer,
        named_parameters=named_parameters,
        backward_passes_per_step=backward_passes_per_step,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        sparse_as_dense=sparse_as_dense,
        process_set=process_set,
    )
    distributed.state.update(optimizer.state)  # what was loaded before; Horovod makes it anew
    cls, title = type(distributed), TITLES.take()
    check_seam(cls)
    average = op == horovod.Average
    factor = gradient_predivide_factor
    settings = (
        f"op={'Average' if average else 'Sum'}, backward_passes_per_step="
        f"{backward_passes_per_step}, gradient_predivide_factor={factor}, "
        f"sparse_as_dense={sparse_as_dense}, bucket_bytes={bucket_bytes}, "
        f"hierarchical={hierarchical}, nonfinite={nonfinite}, "
        f"verify_every={verify_every}"
    )
    if not process_set.included():
        return distributed
    ranks = process_set.size() if place is None else place.hosts
    prescale, postscale = scales(op, factor, ranks)
    try:
        distributed._gradcomp = Engine(
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
            scaler=scaler,
            place=place,
            settings=settings,
        )
    except Exception:  # an error keeps what it is about, with Horovod's hooks
        parameters.disarm(distributed, distributed._requires_update)
        raise
    for name, method in _methods(cls).items():
        setattr(cls, name, method)
    distributed._takeover, distributed._in_step = None, False
    distributed._verify_every = verify_every
    if gives_up:
        own = momentum.momentum_of(distributed)
        assert own is not None
        distributed._takeover = momentum.Takeover(distributed, *own)
        if process_set.rank() == 0:
            momentum.LOGGER.info(
                "momentum=%g, nesterov=%s are taken over from %s by the compressor",
                *own,
                cls.__name__,
            )
    if not distributed._requires_update:  # Horovod skips its hooks where there is one rank
        distributed._register_hooks()
    parameters.take_over(distributed, distributed._gradcomp.parameters)
    return distributed


def scales(op: Any, predivide: float, ranks: int) -> tuple[float, float]:
    """(prescale, postscale) of a `Context`."""
    return (1.0 / predivide, predivide / ranks) if op == horovod.Average else (1.0, 1.0)


def check_seam(cls: type) -> None:
    """Requires that Horovod's optimizer can be taken part in, as 0.28.1's can.

    Args:
        cls: one that Horovod made for an optimizer, or `_DistributedOptimizer`, their pattern.

    Raises:
        RuntimeError: a method is missing, or `synchronize()` takes no callable for a handle.
    """
    missing = [name for name in _SEAM if name not in vars(cls)]
    if not missing and "callable" not in vars(cls)["synchronize"].__code__.co_names:
        missing = ["callable handles in synchronize"]
    missing += [name for name in lending.SEAM if not hasattr(mpi_ops, name)]
    if missing or cls.__module__ != _stock.__name__:
        raise RuntimeError(
            f"this Horovod's optimizer is built otherwise than 0.28.1's (no {missing}): "
            "hvd_gradcomp cannot take part in it. Install horovod==0.28.1"
        )


def compression_stats(optimizer: torch.optim.Optimizer) -> CompressionStats:
    """What this rank's exchanges have moved so far, measured; see `CompressionStats`.

    Raises:
        TypeError: the optimizer was not made by `hvd_gradcomp.torch.DistributedOptimizer`.
    """
    return engine_of(optimizer).stats()


def describe(optimizer: torch.optim.Optimizer) -> str:
    """Prints, and returns, what each layer gets: compressor and bytes a step; nothing is sent.

    Bytes are a rank's (with `hierarchical=True` a host's), of the layer's share of a payload. For
    compressors whose rule decides how much is sent, 4 bytes for each element that will be.

    Raises:
        TypeError: the optimizer was not made by `hvd_gradcomp.torch.DistributedOptimizer`.
    """
    engine = engine_of(optimizer)
    table = description.describe(
        engine.compressor, engine.used, len(engine.buckets), engine.seat[1]
    )
    print(table)
    return table


def retrain(optimizer: torch.optim.Optimizer) -> None:
    """Lets the compressor learn anew from the next step on: GradiVeQ's basis, LGC's autoencoder.

    To be called by all ranks at the same step. Other compressors have nothing to learn.

    Raises:
        TypeError: the optimizer was not made by `hvd_gradcomp.torch.DistributedOptimizer`.
    """
    engine_of(optimizer).retrain()


def verify(optimizer: torch.optim.Optimizer) -> None:
    """Compares parameters and replicated state of the compressor over the ranks, bit by bit.

    To be called by all ranks of the process set at the same place, between steps. Buffers, such as
    the running means of a batch normalization, are each rank's own and not looked at.

    Raises:
        DivergedError: on all ranks, naming the first tensor that differs, and where.
        TypeError: the optimizer was not made by `hvd_gradcomp.torch.DistributedOptimizer`.
    """
    digests.check(engine_of(optimizer))


def engine_of(optimizer: Any) -> Engine:
    """The engine behind an optimizer.

    Raises:
        TypeError: as in `compression_stats`.
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
    order = [p for _, p in named_parameters] if named_parameters else list(names)
    if not named_parameters:  # Horovod sorts the names it makes up as text; ours go by place
        order = [p for group in distributed.param_groups for p in group["params"]]
    return [(names[p], p) for p in order if p in trained and p.requires_grad]


def _methods(cls: Any) -> dict[str, Callable[..., Any]]:
    """What replaces Horovod's methods in the class that it made for this one optimizer."""

    def _allreduce_grad_async(self: Any, p: torch.nn.Parameter) -> tuple[Callable[[], Any], None]:
        engine: Engine = self._gradcomp
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        if p.grad.is_sparse and not self.sparse_as_dense:
            engine.give_sparse(p, p.grad)
            average, name = self.op == horovod.Average, self._parameter_names[p]
            handle = lending.sparse_allreduce(p.grad, name, self.process_set, average)
            return _sparse_result(handle, engine), None
        engine.give(p, p.grad.to_dense() if p.grad.is_sparse else p.grad)
        return lambda: engine.take(p), None

    def _sparse_result(handle: Callable[[], Any], engine: Engine) -> Callable[[], Any]:
        def wait() -> torch.Tensor:
            engine.finish()
            return engine.take_sparse(handle())

        return wait

    def synchronize(self: Any) -> None:
        self._gradcomp.order_is_known()
        try:
            parameters.join(self)
            parameters.leave_out(self, self._gradcomp.begin())
            stock_synchronize(self)
        except Exception:
            self._handles.clear()
            for p in self._allreduce_delay:  # the next backward begins a step
                self._allreduce_delay[p] = self.backward_passes_per_step
            raise
        finally:
            self._gradcomp.clear()
        if self._in_step and not self._gradcomp.undone:  # called by the user, the step does it
            _decay(self)

    def _decay(self: Any) -> None:
        if self._takeover is not None:
            self._takeover.decay()

    def step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
        if self._takeover is not None:
            self._takeover.check()
        self._gradcomp.scaling.check_stepped(self)
        self._in_step = True
        try:
            loss = _step(self, closure)
        finally:
            self._in_step = False
        if self._verify_every and self._gradcomp.steps % self._verify_every == 0:
            digests.check(self._gradcomp)
        return loss

    def _step(self: Any, closure: Callable[[], Any] | None) -> Any:
        engine: Engine = self._gradcomp
        if closure is None or not self._should_synchronize:
            # If synchronize() was called, Horovod would exchange once more; here that would add
            # what was exchanged to the residual a second time.
            if self._should_synchronize and (self._handles or not self._synchronized):
                self.synchronize()
            elif not engine.leaves_out:
                _decay(self)
            self._synchronized = False
            return None if engine.leaves_out else super(cls, self).step(closure)

        def reduced_closure() -> Any:
            # Horovod reduces before the closure computes the gradients; they are reduced here.
            with torch.enable_grad():
                loss = closure()
            self.synchronize()
            self._synchronized = False
            if engine.leaves_out:
                raise _LeftOutError(loss)
            return loss

        self._synchronized = False
        try:
            return super(cls, self).step(reduced_closure)
        except _LeftOutError as left_out:
            return left_out.loss

    def _supports_scaling(self: Any) -> bool:
        """`GradScaler.step` asks for this before it looks at gradients: here they get reduced."""
        if self._handles and self._should_synchronize:
            self._gradcomp.scaling.check_reduced(self)
            self.synchronize()
        return bool(vars(self).get(_SUPPORTS_SCALING, False))

    def _set_supports_scaling(self: Any, value: bool) -> None:
        vars(self)[_SUPPORTS_SCALING] = value

    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        if self._handles:
            raise AssertionError(
                "zero_grad() was called after backward() and before step() or synchronize(); "
                "it would clear gradients that are being exchanged. Where backward() has raised an "
                "error the other ranks wait for this one: call step() to go on with the gradients "
                "that there are, or end the process"
            )
        for parameter in self._parameter_names:
            moments.discard(parameter)
        super(cls, self).zero_grad(set_to_none=set_to_none)

    def add_param_group(self: Any, param_group: dict[str, Any]) -> None:
        if self._handles:
            raise RuntimeError(
                "add_param_group() was called after backward() and before step(): parameters join "
                "between steps, on all ranks between the same two"
            )
        super(cls, self).add_param_group(param_group)
        try:
            parameters.name(self, self.param_groups[-1])
            parameters.join(self)
        except ValueError:
            self.param_groups.pop()
            raise
        if self._takeover is not None:
            self._takeover.take()

    def state_dict(self: Any, mode: str = "sharded") -> dict[str, Any]:
        """With what the compressor keeps: this rank's, or that of all ranks, which all call it.

        See `hvd.save_checkpoint` for the two modes.
        """
        plain = super(cls, self).state_dict()
        if self._takeover is not None:
            plain = self._takeover.restored(plain)
        return {**plain, "gradcomp": checkpoint.save(self._gradcomp, mode)}

    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        parameters.join(self)  # unfrozen since the optimizer was made, as in the run that saved
        plain = {key: value for key, value in state_dict.items() if key != "gradcomp"}
        if "gradcomp" in state_dict:
            checkpoint.load(self._gradcomp, state_dict["gradcomp"])
        stock_load(self, plain)
        if self._takeover is not None:
            self._takeover.take()

    stock_synchronize, stock_load = cls.synchronize, cls.load_state_dict
    replaced = (_allreduce_grad_async, synchronize, step, zero_grad, add_param_group)
    methods: dict[str, Any] = {
        method.__name__: method for method in (*replaced, state_dict, load_state_dict)
    }
    return {**methods, _SUPPORTS_SCALING: property(_supports_scaling, _set_supports_scaling)}
