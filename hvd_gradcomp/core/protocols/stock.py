"""Interface that stock Horovod calls: `compress` and `decompress` of one nameless tensor.

Stock Horovod sums payloads as they are, so a method that is not linear cannot work there.
"""

from __future__ import annotations

from typing import Any

from hvd_gradcomp.ops import Tensor


class Refuses:
    """Base of all compressors: its `compress` raises an error that says what to import."""

    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """Refuse stock Horovod, whose entry point this is. Linear compressors override it."""
        framework = type(tensor).__module__.partition(".")[0]
        package = "tensorflow" if framework == "tensorflow" else "torch"
        raise TypeError(
            f"a compressor cannot work inside horovod.{package}, which adds payloads up as they "
            f"are. Change the import to `import hvd_gradcomp.{package} as hvd` and keep the rest. "
            f"Got {self}"
        )
