"""Names of collectives, by which Horovod matches them and shows them on its timeline.

    gradcomp.0.bucket3.layer4.0.conv1.weight-and-12.allgather.0

is the first round of the first optimizer's fourth bucket, which holds that layer and twelve more.
A name has only parts that are equal on all ranks, and is the same in every step: Horovod caches by
name.
"""

from __future__ import annotations

import re

from hvd_gradcomp.core.collectives import Collective, Inside
from hvd_gradcomp.core.layout import Layout


def readable(layer: str) -> str:
    """Return a layer's name in characters that TensorFlow graphs and the timeline's JSON allow.

    >>> readable("dense/kernel:0")
    'dense.kernel_0'
    """
    return re.sub(r"[^A-Za-z0-9_.-]", "_", layer.replace("/", "."))


def bucket(reducer: str, index: int, layout: Layout) -> str:
    """Return the name of a bucket.

    >>> bucket("gradcomp.0", 3, Layout(("dense/kernel", "dense/bias"), ((3, 2), (2,))))
    'gradcomp.0.bucket3.dense.kernel-and-1'
    """
    first, *others = layout.names
    rest = f"-and-{len(others)}" if others else ""
    return f"{reducer}.bucket{index}.{readable(first)}{rest}"


def collective(bucket: str, request: Collective, path: object) -> str:
    """Return the name of one collective of a bucket.

    Args:
        bucket: the bucket's name.
        request: the collective.
        path: the round; inside branches of a graph also the branch and the round in it.

    >>> from hvd_gradcomp.core.collectives import Broadcast
    >>> collective("gradcomp.0.bucket3.fc.weight", Broadcast(None, 0), 1)
    'gradcomp.0.bucket3.fc.weight.broadcast.1'
    """
    if isinstance(request, Inside):  # once a step, but in a later round on leaders
        return f"{bucket}.inside.{request.what}"
    return f"{bucket}.{type(request).__name__.lower()}.{path}"
