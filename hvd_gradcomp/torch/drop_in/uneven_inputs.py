"""`hvd.join()`, for ranks that have run out of batches."""

from __future__ import annotations

import gc

import horovod.torch as horovod
from horovod.common.exceptions import HorovodInternalError

from hvd_gradcomp.runtime import errors
from hvd_gradcomp.runtime.driver import run_until_done
from hvd_gradcomp.torch.comm import horovod as comm_horovod
from hvd_gradcomp.torch.comm.broadcast_objects import broadcast_parameters
from hvd_gradcomp.torch.comm.horovod import gather_objects
from hvd_gradcomp.torch.drop_in.broadcast_state import hand_out_plain
from hvd_gradcomp.torch.drop_in.grad_synchronizer import synchronizers


def join(device: int = -1) -> int:
    """Wait until all ranks have run out of batches, and take part in their exchanges until then.

    All ranks call it, e.g. at the end of an epoch. A rank that has joined contributes zero
    gradients and its compressor's residual; means are still taken over all ranks. It works with
    every compressor, and with `hierarchical=True`. Afterwards all ranks have the parameters and the
    optimizers' state of the rank that joined last; a model's buffers are not changed.

    Until all have joined, the other ranks must call no collectives but those of their optimizers:
    any other, such as `hvd.allreduce` of a metric, is a DeadlockError on all ranks, and so is
    L-BFGS, which needs the mean of a loss. If gradients are only summed (no compression, half
    precision), Horovod's own join is used, which adds zeros to any allreduce.

    Args:
        device: as in Horovod.

    Returns:
        The rank that joined last; with a compressor, the highest of several.

    Raises:
        DeadlockError: on all ranks, if a rank waits for something else.
    """
    gc.collect()  # what nobody refers to takes part in nothing, on any rank
    optimizers = sorted(synchronizers.items(), key=lambda pair: pair[1].reducer.transport.name)
    reducers = [synchronizer.reducer for _, synchronizer in optimizers]
    made = {reducer.transport.name: reducer.steps for reducer in reducers}
    with errors.explain_errors(HorovodInternalError, "hvd.join()"):
        if all(
            reducer.participants.place is None and reducer.planner.compressor.is_linear
            for reducer in reducers
        ):
            last = int(horovod.join(device))
            everybody = _gathered(made)
            for _, synchronizer in optimizers:  # all go on from the same step
                reducer = synchronizer.reducer
                name = reducer.transport.name
                reducer.steps = max(steps.get(name, 0) for steps in everybody)
                synchronizer.compare_again()
        else:
            # Side by side: which optimizer the others step next is not known here.
            run_until_done([each.take_part() for _, each in optimizers], comm_horovod.pauses())
            everybody = _gathered(made)
            ranks = range(len(everybody))
            last = max(ranks, key=lambda rank: (sum(everybody[rank].values()), rank))
        for optimizer, synchronizer in optimizers:
            reducer = synchronizer.reducer
            name, process_set = reducer.transport.name, reducer.participants.process_set
            among = process_set.ranks or range(len(everybody))
            root = max(among, key=lambda rank: (everybody[rank].get(name, 0), rank))
            named = reducer.planner.named_parameters
            broadcast_parameters(named, root, process_set=process_set)
            hand_out_plain(optimizer, root, process_set)
    return last


def _gathered(made: dict[str, int]) -> list[dict[str, int]]:
    """Gather each rank's exchange counts, by reducer name."""
    return gather_objects(made, dict[str, int], "gradcomp.join", horovod.global_process_set)
