"""The optimizers inside other people's training loops; thin, and each part is imported only when it is asked for.

``transformers``, ``lightning`` and ``timm`` are named after the packages they need; ``loggers`` has callables
``(step, {name: float})``. What is here works with every one of them, and with Accelerate, peft and plain loops.

>>> import torch, kronscope as ks
>>> model = torch.nn.Linear(3, 2)
>>> ks.integrations.unwrap(ks.Shampoo(model.named_parameters(), lr=1e-3)).skipped_steps
0
"""

from __future__ import annotations

import importlib
from types import ModuleType

from kronscope.errors import MissingExtraError
from kronscope.integrations.wrapped import last_metrics, named_groups, unwrap

__all__ = ["last_metrics", "lightning", "loggers", "named_groups", "timm", "transformers", "unwrap"]

_PARTS = ("lightning", "loggers", "timm", "transformers")


def __getattr__(name: str) -> ModuleType:
    if name in _PARTS:
        try:
            return importlib.import_module(f"{__name__}.{name}")
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != name:
                raise
            raise MissingExtraError(f"ks.integrations.{name} needs the package {name}: pip install {name}") from error
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
