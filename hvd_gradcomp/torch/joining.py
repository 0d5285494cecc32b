"""`hvd.join()`, for ranks that have run out of batches."""

from __future__ import annotations

import horovod.torch as horovod
from horovod.common.exceptions import HorovodInternalError

from hvd_gradcomp.engine import failures
from hvd_gradcomp.torch.engine import gather_objects, living


def join(device: int = -1) -> int:
    """Like Horovod's own, which only knows how to add gradients up as they are.

    With any compressor but `NoneCompressor` and `FP16Compressor` it is refused at once, on the rank
    that calls it; the others see it end. Stock Horovod ends with "unordered_map::at" there.

    Args:
        device: as in Horovod.

    Returns:
        The rank that joined last.

    Raises:
        RuntimeError: a compressor is in use whose payloads cannot be left out, or
            `hierarchical=True`.
    """
    failures.refuse_join(living)
    with failures.named(HorovodInternalError, "hvd.join()"):
        last = int(horovod.join(device))
        # All ranks go on from the same step, also those that had fewer batches.
        made = {engine.name: engine.steps for engine in living}
        world = horovod.global_process_set
        everybody = gather_objects(made, dict[str, int], "gradcomp.join", world)
    for engine in living:
        engine.steps = max(steps.get(engine.name, 0) for steps in everybody)
        engine.compare_again()
    return last
