"""Every logger takes a step and named numbers, and what it wrote can be read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from kronscope.errors import OptionError
from kronscope.integrations.loggers import CSV, TensorBoard, WandB
from tests.integrations.tiny import needed

RECORDS = {10: {"kronscope/milliseconds": 2.5, "kronscope/skipped": 0.0}, 20: {"kronscope/milliseconds": 1.0 / 3.0}}


def test_csv_keeps_every_digit_and_is_continued(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.csv"
    for step, values in RECORDS.items():
        CSV(path)(step, values)  # each time a new one, as after a restart
    table = pd.read_csv(path).pivot(index="step", columns="name", values="value")
    assert table.loc[20, "kronscope/milliseconds"] == 1.0 / 3.0
    assert table.loc[10, "kronscope/skipped"] == 0.0
    assert table["kronscope/skipped"].isna().tolist() == [False, True]


def test_csv_quotes_names_with_commas(tmp_path: Path) -> None:
    CSV(tmp_path / "a.csv")(1, {"a, b": 1.0})
    assert pd.read_csv(tmp_path / "a.csv")["name"].tolist() == ["a, b"]


@pytest.mark.filterwarnings("ignore")  # tensorboard's and protobuf's own
def test_tensorboard_shows_what_was_logged(tmp_path: Path) -> None:
    needed("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = TensorBoard(tmp_path)
    for step, values in RECORDS.items():
        log(step, values)
    read = EventAccumulator(str(tmp_path)).Reload()  # before the writer is closed: a killed run keeps its values
    assert [(event.step, event.value) for event in read.Scalars("kronscope/milliseconds")] == [
        (10, pytest.approx(2.5)),
        (20, pytest.approx(1 / 3)),
    ]
    again = TensorBoard(log.writer)
    assert again.writer is log.writer
    log.writer.close()


class Run:
    """What of a W&B run is used."""

    def __init__(self) -> None:
        self.axes: list[tuple[str, str]] = []
        self.logged: list[dict[str, Any]] = []

    def define_metric(self, name: str, step_metric: str) -> None:
        self.axes.append((name, step_metric))

    def log(self, values: dict[str, Any]) -> None:
        self.logged.append(values)


def test_wandb_has_an_axis_of_its_own() -> None:
    """A step before the run's own counter would be dropped by W&B, with nothing but a warning in a log."""
    run = Run()
    log = WandB(run)
    for step, values in RECORDS.items():
        log(step, values)
    assert sorted(run.axes) == [(name, "kronscope/logged_step") for name in sorted(RECORDS[10])]
    assert [values["kronscope/logged_step"] for values in run.logged] == [10, 20]


@pytest.mark.filterwarnings("ignore")  # wandb's and pydantic's own
def test_wandb_offline_writes_a_run(tmp_path: Path) -> None:
    wandb = needed("wandb")
    with pytest.raises(OptionError, match="no W&B run is active"):
        WandB()
    settings = wandb.Settings(console="off", x_disable_stats=True, x_disable_meta=True)
    with wandb.init(mode="offline", dir=str(tmp_path), project="kronscope", settings=settings) as run:
        run.log({"loss": 1.0}, step=100)  # the training loop's own counter is far ahead
        log = WandB()
        for step, values in RECORDS.items():
            log(step, values)
        seen = dict(run.summary)
    assert seen["kronscope/milliseconds"] == 1.0 / 3.0
    assert seen["kronscope/logged_step"] == 20
    assert list(tmp_path.rglob("*.wandb")), json.dumps([str(path) for path in tmp_path.rglob("*")])
