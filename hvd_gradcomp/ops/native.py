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

LOGGER = logging.getLogger("hvd_gradcomp")

_P, _N, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
_U = ctypes.c_uint32
_SIGNATURES: dict[str, tuple[Any, Sequence[Any]]] = {
    "find_above": (_N, (_P, _N, _P, _N, _N, _P)),
    "find_greater": (_N, (_P, _P, _N, _N, _P)),
    "find_exceeding": (_N, (_P, _P, _F, _N, _N, _P)),
    "accumulate_square": (None, (_P, _P, _N)),
    "find_beyond": (_N, (_P, _F, _N, _N, _P)),
    "gather": (_I, (_P, _N, _P, _N, _P)),
    "fill_at": (_I, (_P, _N, _P, _N, _F)),
    "add_at": (_I, (_P, _N, _P, _N, _P)),
    "add_momentum": (None, (_P, _P, _P, _P, _P, _N, _F, _I)),
    "sort": (_I, (_P, _N)),
    "reverse": (None, (_P, _N, _N, _N, _N, _P, _N, _I, _I)),
    "bit_planes": (None, (_P, _N, _I, _P)),
    "from_bit_planes": (None, (_P, _N, _I, _P)),
    "weighted_sum": (_U, (_P, _N, _I)),
    "frame_sum": (_U, (_P, _N, _P, _N, _I)),
    "examine": (None, (_P, _N, _N, _N, _N, _P, _N, _P, _P, _P, _I)),
    "all_finite": (_I, (_P, _N, _I)),
    "sum_finite": (_I, (_P, _N, _I, _I)),
    "layer_histograms": (None, (_P, _P, _N, _P, _N, _P, _I)),
    "group_maxima": (None, (_P, _N, _P, _P, _I)),
    "group_squares": (_I, (_P, _N, _P, _P, _I)),
    "encode_levels": (None, (_P, _N, _P, _N, _P, _I, _U, _U, _P, _I)),
    "add_levels": (None, (_P, _N, _P, _P, _N, _N, _P, _N, _P, _N, _I, _P, _I)),
    "encode_signs": (_I, (_P, _N, _P, _N, _P, _P, _P, _I)),
    "threshold_find": (_N, (_P, _P, _P, _P, _P, _P, _P, _P, _P, _P, _P, _I)),
    "threshold_code": (_N, (_P, _P, _P, _N, _P, _I)),
    "threshold_write": (_N, (_P, _P, _P, _N, _P, _N, _N, _P, _P, _P)),
    "threshold_places": (_N, (_P, _P, _P, _P, _P, _P, _P, _I)),
    "threshold_settle": (None, (_P, _P, _P, _N, _P, _P, _I)),
    "threshold_add": (_I, (_P, _P, _P, _N, _N, _N, _P, _P, _I)),
    "threshold_add_places": (None, (_P, _P, _P, _N, _N, _P, _P, _I)),
    "topk_find": (_I, (_P, _P, _P, _P, _P, _P, _P, _P, _P, _P, _P, _I)),
    "topk_again": (None, (_P, _P, _P, _P, _P, _P, _I)),
    "topk_choose": (_N, (_P, _N, _P, _P, _P, _I)),
    "topk_write": (None, (_P, _P, _P, _N, _N, _P, _P, _N, _P, _I)),
    "topk_settle": (None, (_P, _P, _P, _P, _P, _P, _P, _I)),
    "topk_add": (_I, (_P, _P, _P, _N, _N, _P, _P, _P, _I)),
    "topk_values": (_I, (_P, _P, _P, _P, _P, _P, _P, _I)),
    "topk_replace": (_I, (_P, _P, _P, _P, _F, _F, _P, _P, _P, _P, _P, _P, _I)),
    "add_signs": (None, (_P, _N, _P, _P, _N, _N, _P, _N, _P, _P, _N, _P, _I)),
}


@lru_cache(maxsize=1)
def library() -> Any:
    """Return the loaded library, or None."""
    if os.environ.get("HVD_GRADCOMP_NATIVE") == "0":
        return None
    path = Path(__file__).with_name(LIBRARY)
    if not path.exists():
        LOGGER.info("hvd_gradcomp was installed without a C compiler: compression is slower")
        return None
    loaded = load(path)
    if loaded is None:
        LOGGER.warning(
            "%s is older than its source and is left out: compression is slower. "
            "`hvd-gradcomp build` builds it",
            path.name,
        )
    return loaded


def load(path: Path) -> Any:
    """Load a library and declare its functions; return None if one is missing."""
    loaded = ctypes.CDLL(str(path))
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(loaded, name, None)
        if function is None:
            return None
        function.restype, function.argtypes = result, list(arguments)
    return loaded
