"""Program that runs another as a child of a fork server: same arguments, streams, exit code.

It is started where the child would be started, `python -I -S forkclient.py SOCKET -m MODULE ...`,
and imports almost nothing. Signals are passed on. If it is killed, the server kills the child.
"""

import _signal
import _socket
import marshal
import os
import sys

FORWARDED = (_signal.SIGTERM, _signal.SIGINT, _signal.SIGHUP, _signal.SIGUSR1, _signal.SIGUSR2)


def main(path: str, *arguments: str) -> int:
    server = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    server.connect(path)
    request = marshal.dumps((arguments, os.getcwd(), dict(os.environ)))
    streams = b"".join(fd.to_bytes(4, sys.byteorder) for fd in (0, 1, 2))
    rights = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, streams)]
    child, early = 0, []  # signals before it is known which process they are for

    def receive(number: int, frame: object) -> None:
        if child:
            forward(child, number)
        else:
            early.append(number)

    for number in FORWARDED:
        if _signal.getsignal(number) == _signal.SIG_DFL or number == _signal.SIGINT:
            _signal.signal(number, receive)
    server.sendmsg([len(request).to_bytes(4, "big")], rights)
    server.sendall(request)
    child = int.from_bytes(server.recv(4), "big")
    while child and early:
        forward(child, early.pop(0))
    reply = server.recv(4) if child else b""
    if not reply:
        print(f"the fork server at {path} has ended", file=sys.stderr)
        return 1
    code = int.from_bytes(reply, "big", signed=True)
    if code < 0:  # the child was killed by a signal: end in the same way
        if -code in FORWARDED:
            _signal.signal(-code, _signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


def forward(child: int, number: int) -> None:
    try:  # noqa: SIM105  importing contextlib takes as long as all else
        os.kill(child, number)
    except ProcessLookupError:  # ended meanwhile, the reply is on its way
        pass


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
