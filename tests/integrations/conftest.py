"""The packages are optional: without one its tests are skipped; and none of them may reach for the network."""

from __future__ import annotations

import enum
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types

import pytest

from tests.integrations.tiny import needed

# They import their packages, and have no doctests.
collect_ignore_glob = ["*_runs.py"]


def _module(name: str, *packages: str) -> types.ModuleType:
    for package in packages:
        needed(package)
    return importlib.import_module(f"tests.integrations.{name}")


@pytest.fixture(scope="module")
def trainer_runs() -> types.ModuleType:
    """Runs with Transformers' Trainer."""
    return _module("trainer_runs", "transformers", "accelerate")


@pytest.fixture(scope="module")
def lightning_runs() -> types.ModuleType:
    """Runs with Lightning."""
    return _module("lightning_runs", "lightning")


@pytest.fixture(scope="module")
def accelerate_runs() -> types.ModuleType:
    """Runs with Accelerate."""
    return _module("accelerate_runs", "accelerate")


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_OFFLINE", "HF_HUB_DISABLE_TELEMETRY", "ACCELERATE_USE_CPU", "DISABLE_MLFLOW_INTEGRATION"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("WANDB_MODE", "offline")


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


@pytest.fixture(scope="session")
def timm() -> types.ModuleType:
    """The package timm, with an empty torchvision where there is no real one."""
    if importlib.util.find_spec("timm") is None:
        return needed("timm")
    stand_in = _Torchvision()
    if importlib.util.find_spec("torchvision") is None:
        sys.meta_path.append(stand_in)
    for part in ("optim", "scheduler", "utils"):
        importlib.import_module(f"timm.{part}")
    if stand_in not in sys.meta_path:
        return needed("timm")
    # transformers looks whether torchvision can be found, and would believe this one
    sys.meta_path.remove(stand_in)
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
    return needed("timm")
