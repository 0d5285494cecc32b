"""Drop-in for `horovod.torch`: all of it, with gradient compression in `DistributedOptimizer`.

-import horovod.torch as hvd
+import hvd_gradcomp.torch as hvd
...
-optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
+optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(),
+                                     compression=hvd.VarianceCompressor(alpha=2))

Horovod is imported on first access to a name. Three modules work without it: `ddp`, which
compresses for PyTorch's own `DistributedDataParallel`, `fsdp` for `fully_shard`, and `trainers`.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hvd_gradcomp.torch._api import *  # noqa: F403


def __getattr__(name: str) -> Any:
    """A module of this package, or a name of `_api`.

    Raises:
        ImportError: it is of Horovod, which cannot be imported; with what helps.
    """
    if name != "__all__" and (name.startswith("_") or find_spec(f"{__name__}.{name}")):
        if name.startswith("_"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return import_module(f"{__name__}.{name}")
    api = import_module(f"{__name__}._api")
    globals().update({each: getattr(api, each) for each in ("__all__", *api.__all__)})
    if name not in globals():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals()[name]


def __dir__() -> list[str]:
    try:
        return sorted({*globals(), *__getattr__("__all__")})
    except ImportError:  # these work without Horovod, and who looks around gets no error
        return sorted({*globals(), "ddp", "fsdp", "trainers"})
