"""A resumed history is an even sample of all steps: as if it had been recorded like that from the start."""

from __future__ import annotations

import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kronscope as ks
from kronscope.errors import DataError, OptionError
from kronscope.gradients.disk_store import DiskStore
from tests.forked import forked
from tests.gradients.given import Run, given_grads, stored


def _part(folder: Path, start: int, stop: int, **options: Any) -> ks.GradientHistory:
    """Record the steps after ``start`` up to ``stop`` of one and the same training run, and close."""
    run = Run(given_grads(60))
    history = run.attach(path=folder, resume=True, **options)
    assert history.total_steps == start
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of little space
        run.train(start, stop)
    history.close()
    return history


# ---------------------------------------------------------------------- every


@pytest.mark.parametrize(("first", "second"), [(1, 10), (2, 6), (3, 3), (None, 7)])
def test_a_larger_every_thins_what_is_there(tmp_path: Path, first: int | None, second: int) -> None:
    _part(tmp_path, 0, 25, every=first)
    resumed = _part(tmp_path, 25, 60, every=second)
    opened = ks.GradientHistory.open(tmp_path)
    for history in (resumed, opened):
        assert (history.steps, history.every, history.total_steps) == (tuple(range(1, 61, second)), second, 60)
        assert torch.equal(stored(history), given_grads(60)[::second])
    whole = Run(given_grads(60))
    undisturbed = whole.attach(every=second)
    whole.train()
    for one, other in zip(ks.measure_history(opened), ks.measure_history(undisturbed), strict=True):
        assert (one.cosine, one.stderr) == (other.cosine, other.stderr)


@pytest.mark.parametrize("every", [None, 4])
def test_without_every_or_with_the_same_a_history_goes_on(tmp_path: Path, every: int | None) -> None:
    _part(tmp_path, 0, 11, every=4)
    assert _part(tmp_path, 11, 20, every=every).steps == (1, 5, 9, 13, 17)


@pytest.mark.parametrize("every", [1, 2, 6])
def test_an_every_that_would_make_it_uneven_is_refused_and_changes_nothing(tmp_path: Path, every: int) -> None:
    before = _part(tmp_path, 0, 11, every=4).steps
    with pytest.raises(OptionError, match=rf"one step in 4.*every={every}.*leave every out.*a multiple of 4"):
        Run(given_grads(1)).attach(path=tmp_path, resume=True, every=every)
    assert _part(tmp_path, 11, 11).steps == before


@pytest.mark.parametrize(("every", "fine"), [(2, True), (4, True), (8, True), (16, True), (1, False), (3, False)])
def test_thinned_for_space_it_goes_on_with_what_was_asked_for(tmp_path: Path, every: int, fine: bool) -> None:
    assert _part(tmp_path, 0, 30, every=2, space=4 * 48).every == 8
    if fine:
        assert _part(tmp_path, 30, 40, every=every, space=4096).every == max(8, every)
    else:
        with pytest.raises(OptionError, match="leave every out to go on with 8"):
            _part(tmp_path, 30, 40, every=every)


def test_a_crash_while_a_resumed_history_is_thinned_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _part(tmp_path / "h", 0, 25)
    append = DiskStore.append
    copies: list[Path] = []

    def copying(store: DiskStore, *args: Any) -> None:
        append(store, *args)
        copies.append(shutil.copytree(tmp_path / "h", tmp_path / f"copy-{len(copies)}"))

    with monkeypatch.context() as patch:
        patch.setattr(DiskStore, "append", copying)
        _part(tmp_path / "h", 25, 25, every=10)
    assert len(copies) == 3
    for copy in copies:
        history = ks.GradientHistory.open(copy)
        assert (history.steps, history.every) == (tuple(range(1, 26)), 1)
        assert torch.equal(stored(history), given_grads(60)[:25])
        assert _part(copy, 25, 31, every=10).steps == (1, 11, 21, 31)


def test_a_folder_of_unevenly_spaced_steps_is_refused(tmp_path: Path) -> None:
    _part(tmp_path, 0, 4)
    np.array([1, 2, 3, 13], dtype=np.int64).tofile(tmp_path / "steps.0.bin")
    for work in (ks.GradientHistory.open, lambda path: Run(given_grads(1)).attach(path=path, resume=True)):
        with pytest.raises(DataError, match=r"no even sample.*record 4 is of step 13"):
            work(tmp_path)


# ---------------------------------------------------------------------- the number of steps


@pytest.mark.parametrize("stop", [1, 10, 11, 19, 20])
def test_after_close_the_count_of_steps_goes_on_exactly(tmp_path: Path, stop: int) -> None:
    _part(tmp_path, 0, stop, every=10)
    assert ks.GradientHistory.open(tmp_path).total_steps == stop
    resumed = _part(tmp_path, stop, 40, every=10)
    assert resumed.steps == (1, 11, 21, 31)
    assert torch.equal(stored(resumed), given_grads(60)[:40:10])


def test_records_dropped_for_space_still_count(tmp_path: Path) -> None:
    history = _part(tmp_path, 0, 12, space=4 * 48)
    assert (history.steps, history.total_steps) == ((1, 5, 9), 12)
    assert _part(tmp_path, 12, 14).total_steps == 14


def test_records_dropped_at_resuming_still_count(tmp_path: Path) -> None:
    _part(tmp_path, 0, 25)
    assert _part(tmp_path, 25, 25, every=10).steps == (1, 11, 21)
    assert _part(tmp_path, 25, 31).steps == (1, 11, 21, 31)


def test_a_count_ahead_of_a_lost_record_leaves_no_gap(tmp_path: Path) -> None:
    _part(tmp_path, 0, 25, every=10)
    with (tmp_path / "steps.0.bin").open("r+b") as file:
        file.truncate(16)
    run = Run(given_grads(12))
    history = run.attach(path=tmp_path, resume=True)
    assert history.total_steps == 20
    run.train()
    assert history.steps == (1, 11, 21, 31)
    history.close()


def test_a_checkpoint_sets_the_count_in_the_folder(tmp_path: Path) -> None:
    run = Run(given_grads(60))
    history = run.attach(path=tmp_path, every=10)
    run.train(0, 13)
    state = history.state_dict()
    run.train(13, 18)
    history.load_state_dict(state)
    history.close()
    assert _part(tmp_path, 13, 21).steps == (1, 11, 21)


def _write(pipe: Any, folder: Path) -> None:
    model = torch.nn.Linear(3, 2, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    history = ks.GradientHistory.attach(optimizer, model, ["weight"], folder, every=10)
    for _ in range(17):
        model.weight.grad = torch.ones(2, 3)
        optimizer.step()
    pipe.send("seventeen")
    pipe.recv()
    history.close()


def test_a_killed_writer_has_counted_its_steps_and_holds_no_lock(tmp_path: Path) -> None:
    with forked(_write, tmp_path) as (writer, pipe):
        assert pipe.recv() == "seventeen"
        model = torch.nn.Linear(3, 2, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with pytest.raises(DataError, match=rf"recorded to .* by process {writer.pid}; close\(\) that one"):
            ks.GradientHistory.attach(optimizer, model, ["weight"], tmp_path, resume=True)
        assert ks.GradientHistory.open(tmp_path).steps == (1, 11)
        writer.kill()
    resumed = ks.GradientHistory.attach(optimizer, model, ["weight"], tmp_path, resume=True)
    assert resumed.total_steps == 17
    resumed.close()


# ---------------------------------------------------------------------- types


def test_a_narrower_type_is_for_the_whole_of_a_resumed_history(tmp_path: Path) -> None:
    _part(tmp_path, 0, 4, dtype=torch.float32)
    half = _part(tmp_path, 4, 8, dtype=torch.float16)
    whole = Run(given_grads(60).float().double())
    undisturbed = whole.attach(dtype=torch.float16)
    whole.train(0, 8)
    assert half._store.dtypes == [torch.float16]
    assert torch.allclose(stored(half), stored(undisturbed), rtol=1e-6)
    assert (tmp_path / "0.1.bin").stat().st_size == 8 * 48


def test_a_wider_type_is_refused_unless_space_made_it_narrow(tmp_path: Path) -> None:
    _part(tmp_path / "a", 0, 4, dtype=torch.float16)
    with pytest.raises(OptionError, match=r"kept in float16, and torch\.float32 .*leave dtype out"):
        _part(tmp_path / "a", 4, 5, dtype=torch.float32)
    _part(tmp_path / "b", 0, 4, dtype=torch.float32, space=4 * 48)
    assert _part(tmp_path / "b", 4, 5, dtype=torch.float32)._store.dtypes == [torch.float16]


# ---------------------------------------------------------------------- places


def test_a_path_that_cannot_be_a_folder(tmp_path: Path) -> None:
    file = tmp_path / "plain"
    file.write_text("x")
    for resume in (False, True):
        with pytest.raises(DataError, match=rf"{re.escape(str(file))} is a file.*pick another path"):
            Run(given_grads(1)).attach(path=file, resume=resume)
        with pytest.raises(DataError, match=r"could not make the folder.*pick another path"):
            Run(given_grads(1)).attach(path=file / "below", resume=resume)
    with pytest.raises(DataError, match="there is no gradient history in"):
        ks.GradientHistory.open(file)
    assert file.read_text() == "x"
