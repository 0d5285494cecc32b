"""`hvd_gradcomp.engine.deadlock` by the name that it has for PyTorch; the very same module."""

import sys

from hvd_gradcomp.engine import deadlock

sys.modules[__name__] = deadlock
