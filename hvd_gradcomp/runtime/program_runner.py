"""Steps a program: from one collective to the next, through the branches that it switches to."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

from hvd_gradcomp.core.collectives import Collective, Switch

Steps = Generator[Any, Any, Any]


def always(index: Any) -> bool:
    """Whether a branch is entered here: where nothing is traced, a tensor says which as well."""
    del index
    return True


def known(index: Any) -> bool:
    """Whether a branch is entered here: not in a graph, unless a number says which it is."""
    return isinstance(index, int)


def never(index: Any) -> bool:
    """Whether a branch is entered here: all ranks enter theirs together."""
    del index
    return False


class ProgramRunner:
    """A program, and the branches that it has switched to, innermost last.

    Args:
        program: to be stepped.
        enters: of the index of a `Switch`, whether its branch is entered here. Else the switch is
            handed out, and its reply is what its branch has ended with.

    Attributes:
        result: what the program has ended with.
    """

    def __init__(self, program: Steps, enters: Callable[[Any], bool] = always) -> None:
        self._programs, self._enters = [program], enters
        self.result: Any = None

    def send(self, reply: Any) -> Collective | None:
        """Goes on with a reply, None at first, to what is asked for next; None at the end."""
        while self._programs:
            try:
                request = self._programs[-1].send(reply)
            except StopIteration as stop:
                self._programs.pop()
                reply = stop.value
                continue
            if not isinstance(request, Switch) or not self._enters(request.index):
                return request
            self._programs.append(request.branches[int(request.index)]())
            reply = None
        self.result = reply
        return None


def run(program: Steps, perform: Callable[[Any], Any], enters: Any = always) -> Any:
    """What a program ends with, where each collective is performed at once."""
    stack = ProgramRunner(program, enters)
    request = stack.send(None)
    while request is not None:
        request = stack.send(perform(request))
    return stack.result


def unswitched(program: Steps) -> Steps:
    """The same, with the branches of each `Switch` whose index is known in the place of it.

    So an error in a branch is raised here, as in a function that was called.
    """
    stack = ProgramRunner(program, known)
    request = stack.send(None)
    while request is not None:
        request = stack.send((yield request))
    return stack.result
