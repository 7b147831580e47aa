"""A run that has not ended: what it had measured can be looked at."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import kronscope as ks
from kronscope.errors import RunError
from kronscope.paper import Experiment, plans, results_so_far, scaled
from kronscope.paper.training import Event


def test_a_run_stopped_before_its_end_shows_what_it_had_measured(tmp_path: Path) -> None:
    settings = scaled("digits-linear", steps=3, samples=20, measure_at=[0, 2, 3])
    dataset = settings.load_data()

    def stop(event: Event) -> None:
        if event.kind == "measure" and event.step == 3:
            raise KeyboardInterrupt

    experiment = Experiment(plans.get("figure1"), settings, dataset)
    with pytest.raises(KeyboardInterrupt):
        experiment.run(tmp_path / "run", show=stop, show_bars=False)
    early = results_so_far(tmp_path / "run")
    assert early.partial
    assert [*early.steps] == [0, 2]
    assert early.settings["workload"] == "digits-linear"
    # as an earlier version left it
    (tmp_path / "run" / "stored" / "layers.json").unlink()
    assert results_so_far(tmp_path / "run").rows == early.rows
    whole = experiment.run(tmp_path / "run", resume=True, show_bars=False)
    assert results_so_far(tmp_path / "run") == whole
    assert [row.cosine for row in early] == [row.cosine for row in whole if row.truth != "adagrad" and row.step < 3]


def test_a_folder_with_nothing_measured_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no results yet"):
        results_so_far(tmp_path)


def test_what_the_data_cuts_is_said_once() -> None:
    digits = scaled("digits-linear").load_data()
    once = scaled("cifar-resnet18").on(digits)
    assert any(cut.startswith("data ") for cut in once.cuts)
    assert once.on(digits).cuts == once.cuts


def test_a_watched_run_without_cosines_is_sent_to_its_own_page(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ks.watch(optimizer, model, every=1, path=tmp_path / "run"):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    with pytest.raises(RunError, match=r"watched run without cosines.*kronscope watch.*loss= and data="):
        results_so_far(tmp_path / "run")
