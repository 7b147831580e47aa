"""timm without torchvision, which it imports whatever one wants from it."""

from __future__ import annotations

import enum
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types

_InterpolationMode = enum.Enum("_InterpolationMode", "NEAREST BILINEAR BICUBIC BOX HAMMING LANCZOS")


class _StandIn(types.ModuleType):
    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return _InterpolationMode if name == "InterpolationMode" else type(name, (), {})


class _Torchvision(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """An empty torchvision.

    timm imports it for its image loaders, whatever one wants from timm. Beside a CPU build of torch there may be no
    torchvision that leaves that build alone; models, optimizers and schedulers do without.
    """

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] == "torchvision":
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def imported_timm() -> types.ModuleType:
    """The package timm, with an empty torchvision where there is no real one."""
    stand_in = _Torchvision()
    if importlib.util.find_spec("torchvision") is None:
        sys.meta_path.append(stand_in)
    for part in ("models", "optim", "scheduler", "utils"):
        importlib.import_module(f"timm.{part}")
    if stand_in in sys.meta_path:
        # transformers looks whether torchvision can be found, and would believe this one
        sys.meta_path.remove(stand_in)
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
    return importlib.import_module("timm")
