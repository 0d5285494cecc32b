"""Several hosts on this machine, and horovodrun over ssh between them; see `benchmarks.rig`.

    python -m benchmarks.hosts --hosts 2 --rates 100mbit -- python -m examples.pytorch.digits
"""

from __future__ import annotations

import argparse
import itertools
import signal
import sys

from benchmarks.rig import HostsError, Hosts, JobError, bits_per_second

__all__ = ["Hosts", "JobError"]


def rate(text: str) -> str | None:
    if text == "none":
        return None
    try:
        bits_per_second(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rates", type=rate, nargs="+", default=["1gbit", "100mbit"])
    parser.add_argument("--backends", nargs="+", choices=("gloo", "mpi"), default=["gloo"])
    parser.add_argument("--ranks-per-host", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds a command may take")
    own, command = sys.argv[1:], []
    if "--" in own:
        place = own.index("--")
        own, command = own[:place], own[place + 1 :]
    options = parser.parse_args(own)
    # What ends this process ends the hosts; this way it also says goodbye.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        for count in options.hosts:
            with Hosts(count) as hosts:
                for speed, backend in itertools.product(options.rates, options.backends):
                    hosts.set_rate(speed)
                    hosts.horovodrun(
                        command,
                        ranks_per_host=options.ranks_per_host,
                        backend=backend,
                        timeout=options.timeout,
                        stream=True,
                    )
    except HostsError as error:
        print(error, file=sys.stderr)
        return 2
    except JobError as error:
        print(str(error).splitlines()[0], file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
