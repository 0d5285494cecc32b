"""What older versions cannot do, as marks: each says what it leaves out."""

from __future__ import annotations

import re

import pytest
import torch

TORCH = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])

compiles_whole = pytest.mark.skipif(
    TORCH < (2, 4), reason="torch.compile of this version does not take dataclasses"
)

without_data = pytest.mark.skipif(
    TORCH < (2, 1), reason="tensors without data do not shift bits in this version"
)

normalizes_weights = pytest.mark.skipif(
    TORCH < (2, 1), reason="this version has no parametrizations.weight_norm"
)

tracks_moments = pytest.mark.skipif(
    TORCH < (2, 4), reason="this version does not show what a model indexes: track_moments refuses"
)

leaves_tracked_eager = pytest.mark.skipif(
    TORCH < (2, 8), reason="torch.compile of this version cannot be told why code stays as it is"
)

scales_on_cpus = pytest.mark.skipif(
    TORCH < (2, 3), reason="this version's GradScaler works on a GPU alone"
)


def skip_without_keras_3() -> None:
    """For the head of a module, before it imports the Keras frontend."""
    frontend = "hvd_gradcomp.tensorflow.keras"
    pytest.importorskip(frontend, reason="needs Keras 3", exc_type=ImportError)
