"""Advice for a whole model: which preconditioner fits each layer, what it costs, and what to set."""

from __future__ import annotations

from kronscope.advising.advise import Advice, advise

__all__ = ["Advice", "advise"]
