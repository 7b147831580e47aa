"""The packages are optional: without one its tests are skipped; and none of them may reach for the network."""

from __future__ import annotations

import importlib
import importlib.util
import types

import pytest

from tests.integrations.stand_in import imported_timm
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


@pytest.fixture(scope="module")
def peft_runs() -> types.ModuleType:
    """Runs with peft's adapters in Transformers' Trainer."""
    return _module("peft_runs", "peft", "transformers", "accelerate")


@pytest.fixture(scope="session")
def timm() -> types.ModuleType:
    """The package timm, with an empty torchvision where there is no real one."""
    return needed("timm") if importlib.util.find_spec("timm") is None else imported_timm()
