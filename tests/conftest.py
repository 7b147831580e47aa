"""What all tests share: seeds, hypothesis settings, and fixtures for optional things."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.report.chromium import NAMES, Browser, browser, find_browser

# Imported by the process that forks, for what it does.
collect_ignore = ["preloaded.py"]
# Half a million objects come with the imports and stay: looking for garbage among them takes a third
# of the time that collecting tests takes.
gc.disable()
# Shells start what runs in the background with Ctrl-C ignored; tests interrupt themselves.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """Prepare torch and hypothesis, unless this process only deals out tests to others, who wait for it."""
    if not hasattr(config, "workerinput"):
        _avoid_broken_tiles()
    if getattr(config.option, "dist", "no") != "no" and not hasattr(config, "workerinput"):
        return
    # What is printed to a pipe must not depend on whose shell tests run in; processes that they start inherit this.
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        os.environ.pop(name, None)
    import hypothesis
    import torch

    # Tests are many small products, which two threads only slow down; and they run in several processes anyway.
    torch.set_num_threads(1)
    # The same examples in every run: a red build is then always reproducible, and no database is left behind.
    hypothesis.settings.register_profile(
        "kronscope", derandomize=True, deadline=None, max_examples=40, database=None, print_blob=False
    )
    # `HYPOTHESIS_PROFILE=search make pytest` looks for new counterexamples.
    hypothesis.settings.register_profile("search", deadline=None, max_examples=1000, print_blob=True)
    hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "kronscope"))


def _avoid_broken_tiles() -> None:
    """Keep torch from AMX where the processor announces it and a product of bfloat16 then kills the process.

    Some virtual machines announce AMX without saying what its tiles are. No program of torch's can use bfloat16 there,
    and a worker that dies says nothing about the other tests.
    """
    cpuinfo = Path("/proc/cpuinfo")
    if "ONEDNN_MAX_CPU_ISA" in os.environ or not cpuinfo.exists() or "amx_bf16" not in cpuinfo.read_text():
        return
    product = "import torch; x = torch.ones(64, 64, dtype=torch.bfloat16); x @ x"
    tried = subprocess.run([sys.executable, "-c", product], stderr=subprocess.DEVNULL, check=False)
    if tried.returncode == -signal.SIGILL:
        # all but AMX; oneDNN reads it when it is first used, here and in every process that is started from here
        os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_FP16"


def pytest_report_header() -> str | None:
    """Say with which instructions torch computes, if not with all that the processor announces."""
    isa = os.environ.get("ONEDNN_MAX_CPU_ISA")
    return f"torch's instructions: at most {isa} (ONEDNN_MAX_CPU_ISA)" if isa else None


# Tests that start processes of their own: one worker of a parallel run takes them all, so that their pools do not run
# beside each other, and the imports of the process that forks (`tests/forked.py`) are paid for once.
_WITH_PROCESSES = (
    "tests/optim/parallel/",
    "tests/distributed/",
    "tests/gradients/test_history_resume.py::test_a_killed",
    "tests/gradients/test_history_safety.py::test_a_killed",
    "tests/paper/test_experiment.py::test_a_run_killed",
    "tests/paper/test_training.py::test_a_run_killed",
    "tests/runs/test_measurement.py::",
    "tests/runs/test_run.py::",
    "tests/test_cli_endings.py::test_output_that_cannot_be_written",
    "tests/test_examples.py::",
    "tests/watching/test_killed.py::",
)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """Deal out single tests, but those with processes of their own to one worker.

    (The mark ``xdist_group`` would say the same, but does nothing with pytest 9.2 and pytest-xdist 3.8.)
    """
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return "processes" if nodeid.startswith(_WITH_PROCESSES) else nodeid

        def mark_test_complete(self, node: Any, item_index: int, duration: float = 0) -> None:
            super().mark_test_complete(node, item_index, duration)
            # what is done is counted through after every test: thousands of them, while a worker waits for its next
            scope = self._split_scope(self.registered_collections[node][item_index])
            if all(self.assigned_work[node][scope].values()):
                del self.assigned_work[node][scope]

    return Scheduling(config, log)


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Seed torch before a module is imported: models that it makes for its parameters are the same in every run.

    A new process has a random seed. Such a model was once so sure of its answers that rounding showed in a check.
    """
    if isinstance(collector, pytest.Module):
        import torch

        torch.default_generator.manual_seed(0)


@pytest.fixture(autouse=True)
def _seeded_and_clean() -> Iterator[None]:
    """Seed torch before every test, and fail a test that leaves torch's global settings changed."""
    import torch

    # of the CPU alone: torch.manual_seed writes down the stack for each kind of device, and takes 3 ms inside pytest
    torch.default_generator.manual_seed(0)
    before = _global_settings()
    yield
    after = _global_settings()
    # Put back what is often changed, so that only the test at fault fails.
    torch.set_default_dtype(before["default dtype"])
    torch.set_grad_enabled(before["grad enabled"])
    assert after == before, "the test changed torch's global settings"


@pytest.fixture
def default_device_put_back() -> Iterator[None]:
    """Forget the default device that a test sets."""
    import torch

    yield
    torch.set_default_device(None)
    # set to None, it makes `torch.get_default_device` of torch 2.8 fail, which transformers asks
    vars(torch._GLOBAL_DEVICE_CONTEXT).pop("device_context", None)


def _global_settings() -> dict[str, Any]:
    import torch

    return {
        "default dtype": torch.get_default_dtype(),
        "grad enabled": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "threads": torch.get_num_threads(),
    }


def _optional(module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        pytest.skip(f"{module} cannot be imported ({error}); `make crosscheck` installs it")


@pytest.fixture
def backpack() -> ModuleType:
    """The BackPACK package, or a skip that says why not."""
    return _optional("backpack")


@pytest.fixture
def curvlinops() -> ModuleType:
    """The curvlinops package, or a skip that says why not."""
    return _optional("curvlinops")


@pytest.fixture
def data_dir() -> Path:
    """The folder of real data, or a skip."""
    folder = os.environ.get("KRONSCOPE_DATA_DIR")
    if not folder:
        pytest.skip("wants real data: set KRONSCOPE_DATA_DIR")
    path = Path(folder)
    # A wrong path is a mistake, not a reason to skip.
    assert path.is_dir(), f"KRONSCOPE_DATA_DIR={folder} is not a folder"
    return path


@pytest.fixture(scope="session")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A browser for all tests, or a skip."""
    executable = find_browser()
    if executable is None:
        pytest.skip(f"wants a browser: none of {', '.join(NAMES)} is on PATH")
    with browser(tmp_path_factory.mktemp("profile"), executable) as found:
        yield found


def pytest_collection_finish() -> None:
    """From here on garbage is looked for, among what the tests make."""
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Allow a warning that BackPACK's own hooks raise on every first layer."""
    allow = pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")
    for item in items:
        if item.get_closest_marker("crosscheck"):
            item.add_marker(allow)
