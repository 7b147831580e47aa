"""What forked processes have imported; nobody looks for garbage among it, neither now nor in each of them."""

from __future__ import annotations

import contextlib
import gc
import importlib

from tests.forked import PRELOADED

gc.disable()
for name in PRELOADED:
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
gc.freeze()
gc.enable()
