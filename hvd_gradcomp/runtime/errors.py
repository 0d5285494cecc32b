"""Errors of ranks in different steps, and explanations of failed collectives.

Horovod's own errors rarely name the cause.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_STOPPED = (
    "another rank has stopped, or raised an error, or had no more batches; look at what the other "
    "ranks have written. To go on without a rank that dies use "
)
_GOES_ON = {  # how to continue after a rank has died, by communication library
    "Horovod": "hvd.elastic",
    "torch.distributed": (
        "torchrun --max-restarts=N, which starts all ranks again: load a checkpoint there, with "
        "what state.state_dict() of each rank has saved; with local steps ddp.Elastic"
    ),
}
_CAUSES = {  # by a part of the library's error text
    "with Join": (
        "another rank has called hvd.join(). Until all have, call nothing but what optimizers and "
        "tapes exchange; or give all ranks the same number of batches"
    ),
    "same name as another": (
        "this rank has asked for it twice: two threads use one optimizer, or a step began before "
        "the last one had ended"
    ),
    "Timed out waiting": (  # from gloo, through torch.distributed
        "another rank has not come to it in the timeout= of the process group: it had fewer "
        "batches (with model.join(): lets it take part to the end), or has failed, or waits in a "
        "collective that this rank does not call"
    ),
    "Mismatched": (
        "the ranks do different things: build the same model and compressor, and load the same "
        "checkpoint, on all ranks"
    ),
}


class OutOfStepError(RuntimeError):
    """Error: the ranks are not at the same place of the same step."""


def explain(what: str, message: str, who: str = "Horovod") -> str:
    """Return a message with what failed, the likely cause and the library's own error text.

    >>> explain("the exchange", "Horovod has been shut down.")[:47]
    'the exchange failed: another rank has stopped, '
    """
    stopped = _STOPPED + _GOES_ON.get(who, _GOES_ON["Horovod"])
    cause = next((cause for mark, cause in _CAUSES.items() if mark in message), stopped)
    return f"{what} failed: {cause}. {who} says: {message}"


@contextmanager
def explain_errors(kind: type[Exception], what: str, who: str = "Horovod") -> Iterator[None]:
    """Explain an error; its type stays the same, because elastic training depends on it."""
    try:
        yield
    except kind as error:
        raise kind(explain(what, str(error), who)) from error
