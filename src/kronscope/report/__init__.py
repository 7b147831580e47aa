"""Results as one interactive HTML file that needs no network."""

from __future__ import annotations

from kronscope.report.page import write_report

__all__ = ["write_report"]
