"""A live training run: any torch optimizer, records that a kill leaves whole, a page that grows, and loggers."""

from __future__ import annotations

from kronscope.watching.records import WatchRecords
from kronscope.watching.watcher import Watch, watch

__all__ = ["Watch", "WatchRecords", "watch"]
