"""What travels, by the names that Horovod pairs it by and shows on its timeline.

    gradcomp.0.bucket3.layer4.0.conv1.weight-and-12.allgather.0

is the first round of the first optimizer's fourth bucket, in which that layer and twelve more lie.
A name holds only what all ranks know alike, and is the same in every step: Horovod caches by it.
"""

from __future__ import annotations

import re

from hvd_gradcomp.core.collectives import Collective, Inside
from hvd_gradcomp.core.layout import Layout


def readable(layer: str) -> str:
    """A layer's name, of the characters that TensorFlow's graphs and the timeline's JSON take.

    >>> readable("dense/kernel:0")
    'dense.kernel_0'
    """
    return re.sub(r"[^A-Za-z0-9_.-]", "_", layer.replace("/", "."))


def bucket(engine: str, index: int, layout: Layout) -> str:
    """What a bucket is called.

    >>> bucket("gradcomp.0", 3, Layout(("dense/kernel", "dense/bias"), ((3, 2), (2,))))
    'gradcomp.0.bucket3.dense.kernel-and-1'
    """
    first, *others = layout.names
    rest = f"-and-{len(others)}" if others else ""
    return f"{engine}.bucket{index}.{readable(first)}{rest}"


def collective(bucket: str, request: Collective, path: object) -> str:
    """What one exchange of a bucket is called.

    Args:
        bucket: what the bucket is.
        request: what is exchanged.
        path: the round; inside branches of a graph also which, and the round there.

    >>> from hvd_gradcomp.core.collectives import Broadcast
    >>> collective("gradcomp.0.bucket3.fc.weight", Broadcast(None, 0), 1)
    'gradcomp.0.bucket3.fc.weight.broadcast.1'
    """
    if isinstance(request, Inside):  # asked for once a step, and by leaders in later rounds
        return f"{bucket}.inside.{request.what}"
    return f"{bucket}.{type(request).__name__.lower()}.{path}"
