"""Names of collectives, by which Horovod matches them and shows them on its timeline.

    gradcomp.0.bucket3.layer4.0.conv1.weight-and-12.allgather.0

is the first round of the first optimizer's fourth bucket, which holds that layer and twelve more.
A name has only parts that are equal on all ranks, and is the same in every step: Horovod caches by
name.
"""

from __future__ import annotations

import re

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
