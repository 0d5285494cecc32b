"""Loader of the C library, if it was built: composite ops and fused kernels, for a CPU.

Without it everything works, bit-identical but slower. `HVD_GRADCOMP_NATIVE=0` disables it.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from hvd_gradcomp.ops.building import LIBRARY

VARIABLE = "HVD_GRADCOMP_NATIVE"
LOGGER = logging.getLogger("hvd_gradcomp")

_P, _N, _I = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
_SIGNATURES: dict[str, tuple[Any, Sequence[Any]]] = {  # of c/calls.h; and of c/kernels.h, `reverse`
    "kernel_number": (_I, (ctypes.c_char_p,)),
    "kernel_call": (_N, (_I, _P, _P, _P, _P, _P)),
    "kernel_error": (ctypes.c_char_p, ()),
    "reverse": (None, (_P, _N, _N, _N, _N, _P, _N, _I, _I)),
}


def enabled() -> bool:
    """Return False if the environment disables what is written in C.

    Raises:
        ValueError: the variable has a value without a meaning.
    """
    value = os.environ.get(VARIABLE) or "1"
    if value not in ("0", "1"):
        raise ValueError(f"{VARIABLE} must be 0, to do without the C library, or 1, got {value!r}")
    return value == "1"


@lru_cache(maxsize=1)
def library() -> Any:
    """Return the loaded library, or None."""
    if not enabled():
        return None
    path = Path(__file__).with_name(LIBRARY)
    if not path.exists():
        LOGGER.info("hvd_gradcomp was installed without a C compiler: compression is slower")
        return None
    try:
        loaded = load(path)
    except OSError as error:  # of a wheel: libgomp may be missing, which PyTorch brings along
        LOGGER.warning("the C library cannot be loaded: compression is slower. %s", error)
        return None
    if loaded is None:
        LOGGER.warning(
            "%s is older than its source and is left out: compression is slower. "
            "`hvd-gradcomp build` builds it",
            path.name,
        )
    return loaded


def load(path: Path) -> Any:
    """Load a library and declare its functions; return None if one is missing.

    Raises:
        OSError: it is no library, or for another machine, or a library that it needs is missing.
    """
    loaded = ctypes.CDLL(str(path))
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(loaded, name, None)
        if function is None:
            return None
        function.restype, function.argtypes = result, list(arguments)
    return loaded
