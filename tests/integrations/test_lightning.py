"""Lightning: whole runs equal resumed ones, on one process and across numbers of processes."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import kronscope as ks
from kronscope.errors import OptionError
from tests.integrations.launch import launch
from tests.integrations.tiny import FAMILIES, assert_same

# lightning and torch warn of each other's deprecations
pytestmark = pytest.mark.filterwarnings("ignore")
ROUNDING = 1e-9


@pytest.fixture(scope="module")
def processes(lightning_runs: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What two processes found, and the folder they saved to."""
    folder = tmp_path_factory.mktemp("lightning")
    return launch(lightning_runs.together, 2, folder / "found.pt", folder=str(folder)), folder


@pytest.mark.parametrize("family", FAMILIES)
def test_resuming_on_one_process_changes_no_bit(lightning_runs: ModuleType, tmp_path: Path, family: str) -> None:
    whole = lightning_runs.train(str(tmp_path / "whole"), family)
    saved = tmp_path / "whole" / f"step={lightning_runs.SAVED}.ckpt"
    assert_same(lightning_runs.train(str(tmp_path / "again"), family, resume=str(saved)), whole)


@pytest.mark.parametrize("family", FAMILIES)
def test_two_processes_train_as_one(lightning_runs: ModuleType, processes: Any, tmp_path: Path, family: str) -> None:
    assert_same(processes[0][family]["whole"], lightning_runs.train(str(tmp_path), family), ROUNDING)


@pytest.mark.parametrize("family", FAMILIES)
def test_two_processes_resume_what_rank_0_saved(processes: Any, family: str) -> None:
    found = processes[0][family]
    assert_same(found["resumed"], found["whole"], ROUNDING)


@pytest.mark.parametrize("family", FAMILIES)
def test_one_process_resumes_what_two_saved(
    lightning_runs: ModuleType, processes: Any, tmp_path: Path, family: str
) -> None:
    found, folder = processes
    saved = folder / family / f"step={lightning_runs.SAVED}.ckpt"
    assert_same(lightning_runs.train(str(tmp_path), family, resume=str(saved)), found[family]["whole"], ROUNDING)


class Remembers:
    """A Lightning logger that keeps what it is given."""

    def __init__(self) -> None:
        self.seen: dict[int, dict[str, float]] = {}

    def make(self, lightning: Any) -> Any:
        outer = self

        class Logger(lightning.pytorch.loggers.Logger):  # type: ignore[misc]
            name, version = "remembers", 0

            def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...

            def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
                ours = {key: value for key, value in metrics.items() if key.startswith("kronscope/")}
                if ours:
                    assert step is not None
                    outer.seen[step] = ours

        return Logger()


def test_metrics_go_to_the_trainers_loggers(lightning_runs: ModuleType, tmp_path: Path) -> None:
    import lightning

    remembers = Remembers()
    trainer = lightning_runs.trainer(
        str(tmp_path),
        callbacks=[ks.integrations.lightning.MetricsCallback()],
        logger=remembers.make(lightning),
        log_every_n_steps=2,
        max_steps=4,
        accumulate_grad_batches=1,
    )
    module = lightning_runs.Classifier("kl")
    trainer.fit(module, lightning_runs.loader(1))
    assert list(remembers.seen) == [2, 4]
    assert remembers.seen[4] == ks.integrations.last_metrics(trainer.optimizers[0])
    assert remembers.seen[4].keys() <= trainer.callback_metrics.keys()


def test_the_callback_refuses_other_optimizers(lightning_runs: ModuleType, tmp_path: Path) -> None:
    class Other(lightning_runs.Classifier):  # type: ignore[misc, name-defined]
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    trainer = lightning_runs.trainer(str(tmp_path), callbacks=[ks.integrations.lightning.MetricsCallback()])
    with pytest.raises(OptionError, match="AdamW"):
        trainer.fit(Other("kl"), lightning_runs.loader(1))
