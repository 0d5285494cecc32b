"""Runner of a program: from one collective to the next, through the branches it switches to."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

from hvd_gradcomp.core.collectives import Collective, Switch

Steps = Generator[Any, Any, Any]


def always(index: Any) -> bool:
    """Return True, to enter every branch; outside of a trace the index may be a tensor."""
    return True


def known(index: Any) -> bool:
    """Return True if the branch is known: its index is a number, not a tensor of a graph."""
    return isinstance(index, int)


def never(index: Any) -> bool:
    """Return False, to enter no branch here: all ranks enter theirs together."""
    return False


class ProgramRunner:
    """A program and the branches that it has switched to, innermost last.

    Args:
        program: the generator to step.
        enters: takes the index of a `Switch` and says whether to enter its branch here. Otherwise
            `send` returns the switch, and its reply is the result of its branch.

    Attributes:
        result: return value of the program.
    """

    def __init__(self, program: Steps, enters: Callable[[Any], bool] = always) -> None:
        self._programs, self._enters = [program], enters
        self.result: Any = None

    def send(self, reply: Any) -> Collective | None:
        """Resume with a reply, None at first; return the next request, None at the end."""
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
    """Run a program, performing each collective at once, and return its result."""
    stack = ProgramRunner(program, enters)
    request = stack.send(None)
    while request is not None:
        request = stack.send(perform(request))
    return stack.result


def unswitched(program: Steps) -> Steps:
    """Return the program with branches of known index inlined in place of their `Switch`.

    So an error in a branch is raised here, as from a function call.
    """
    stack = ProgramRunner(program, known)
    request = stack.send(None)
    while request is not None:
        request = stack.send((yield request))
    return stack.result
