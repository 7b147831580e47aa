"""A run whose files were damaged goes back as far as it must, and ends with the same results; or says what is wrong."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kronscope as ks
from kronscope.errors import KronscopeError, RunError
from kronscope.paper import Experiment, plans, results_so_far, scaled
from kronscope.paper.training import Event

Damage = Callable[[Path], Any]


def _experiment() -> Experiment:
    settings = scaled("digits-linear", steps=3, samples=20, measure_at=[0, 1, 2, 3])
    return Experiment(plans.get("figure1"), settings, settings.load_data())


def _stop(event: Event) -> None:
    if (event.kind, event.step) == ("measure", 2):
        raise KeyboardInterrupt


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    _experiment().run(folder, show_bars=False)
    return folder


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run stopped after two of three steps, with checkpoints of steps 1 and 2."""
    folder = tmp_path_factory.mktemp("stopped")
    with pytest.raises(KeyboardInterrupt):
        _experiment().run(folder, show=_stop, show_bars=False)
    return folder


@contextlib.contextmanager
def _hearing(said: str) -> Iterator[None]:
    """As pytest.warns, but every checkpoint that is passed over has a warning, and the last one matters."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        yield
    assert re.search(said, str(heard[-1].message))


def _cut(name: str, off: int) -> Damage:
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size - off)


def _flip(name: str, at: int) -> Damage:
    def flip(folder: Path) -> None:
        content = bytearray((folder / name).read_bytes())
        content[at] ^= 4
        (folder / name).write_bytes(content)

    return flip


def _write(name: str, content: bytes) -> Damage:
    return lambda folder: (folder / name).write_bytes(content)


def _digit(name: str) -> Damage:
    """Another last digit of a cosine."""

    def change(folder: Path) -> None:
        text = (folder / name).read_text()
        found = re.search(r'"cosine": (0\.\d+)', text)
        assert found
        other = found[1][:-1] + ("1" if found[1][-1] != "1" else "2")
        (folder / name).write_text(text.replace(found[1], other))

    return change


def _remove(name: str) -> Damage:
    return lambda folder: (folder / name).unlink()


BEFORE, ANEW = "going back to the checkpoint before it", "the run begins anew"


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        pytest.param(_cut("history/0.0.bin", 1), f"lacks step 2; {BEFORE}", id="history-cut"),
        pytest.param(_flip("history/0.0.bin", -9), f"step 2 is not what was recorded.*{BEFORE}", id="history-flipped"),
        pytest.param(
            _flip("history/0.0.bin", 9), f"step 1 is not what was recorded.*{ANEW}", id="history-flipped-early"
        ),
        pytest.param(_flip("history/steps.0.bin", 0), ANEW, id="history-steps"),
        pytest.param(_write("history/history.json", b"{"), f"damaged.*{ANEW}", id="history-description"),
        pytest.param(_remove("history/history.json"), f"no gradient history.*{ANEW}", id="history-gone"),
        pytest.param(_remove("stored/gauss_newton-0-1.json"), f"missing or damaged; {BEFORE}", id="stored-gone"),
        pytest.param(_write("stored/gauss_newton-0-0.json", b"null"), f"missing or damaged; {ANEW}", id="stored-null"),
        pytest.param(_write("stored/gauss_newton-0-0.json", b"\xff\xfe"), ANEW, id="stored-no-text"),
        pytest.param(_cut("stored/gauss_newton-0-1.json", 40), f"missing or damaged; {BEFORE}", id="stored-cut"),
        pytest.param(_write("stored/gauss_newton-0-1.json", b"[" * 90000), BEFORE, id="stored-deep"),
        pytest.param(
            _flip("metrics.jsonl", 30), f"metrics.jsonl is not what it was.*{BEFORE}|{ANEW}", id="metrics-flip"
        ),
        pytest.param(_digit("stored/gauss_newton-0-1.json"), f"missing or damaged; {BEFORE}", id="stored-digit"),
        pytest.param(_cut("metrics.jsonl", 3), f"metrics.jsonl has .*{BEFORE}", id="metrics-cut"),
        pytest.param(_remove("metrics.jsonl"), f"metrics.jsonl has 0 of.*{ANEW}", id="metrics-gone"),
        pytest.param(_write("environment.json", b"{"), "environment.json is damaged", id="environment"),
        pytest.param(_write("environment.json", b"[]"), "environment.json is damaged", id="environment-list"),
    ],
)
def test_it_goes_back_and_ends_with_the_same_results(
    whole: Path, stopped: Path, tmp_path: Path, damage: Damage, said: str
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(stopped, folder)
    damage(folder)
    with _hearing(said):
        _experiment().run(folder, resume=True, show_bars=False)
    for name in ("results.json", "metrics.jsonl", "config.json", "environment.json", "done.json"):
        assert (folder / name).read_bytes() == (whole / name).read_bytes()
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {
        path.name for path in (whole / "checkpoints").iterdir()
    }


@pytest.mark.parametrize("content", [b"", b"{", b"null", b"3", b"\xff", b"[" * 90000])
def test_a_damaged_configuration_is_named(stopped: Path, tmp_path: Path, content: bytes) -> None:
    folder = tmp_path / "run"
    shutil.copytree(stopped, folder)
    (folder / "config.json").write_bytes(content)
    with pytest.raises(RunError, match=r"config\.json is damaged .*put back a copy"):
        _experiment().run(folder, resume=True, show_bars=False)
    with pytest.raises(RunError, match=r"config\.json is damaged"):
        results_so_far(folder)


@pytest.mark.parametrize("content", [None, b"{", b"\xff", b"{}"])
def test_results_of_a_finished_run_are_put_together_again(whole: Path, tmp_path: Path, content: bytes | None) -> None:
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    (folder / "results.json").unlink() if content is None else (folder / "results.json").write_bytes(content)
    with pytest.warns(UserWarning, match="put together again"):
        _experiment().run(folder, resume=True, show_bars=False)
    assert (folder / "results.json").read_bytes() == (whole / "results.json").read_bytes()
    (folder / "results.json").write_bytes(b"{")
    (folder / "stored" / "adagrad.json").unlink()
    with pytest.raises(KronscopeError, match="cut short"):
        _experiment().run(folder, resume=True, show_bars=False)


@pytest.mark.parametrize("content", [b"", b"null", b"\xff", b"{}", b'{"format": 3}', b"[" * 90000])
def test_the_report_of_damaged_measurements_is_refused_in_words(stopped: Path, tmp_path: Path, content: bytes) -> None:
    folder = tmp_path / "run"
    shutil.copytree(stopped, folder)
    (folder / "stored" / "gauss_newton-0-0.json").write_bytes(content)
    with pytest.raises(KronscopeError, match="gauss_newton-0-0"):
        results_so_far(folder)


@pytest.mark.parametrize("content", [None, b"null", b"{"])
def test_it_does_not_finish_without_all_measurements(
    tmp_path: Path, content: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(event: Event) -> None:
        path = tmp_path / "stored" / "gauss_newton-0-1.json"
        if event.kind == "trained":
            path.unlink() if content is None else path.write_bytes(content)

    with pytest.raises(RunError, match=r"cannot be finished without stored/gauss_newton-0-1\.json"):
        _experiment().run(tmp_path, show=lose, show_bars=False)
    assert not (tmp_path / "done.json").exists()
    with _hearing("begins anew"):
        _experiment().run(tmp_path, resume=True, show_bars=False)
    assert (tmp_path / "done.json").exists()


def test_the_space_for_gradients_is_chosen_once(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = 10 * 64 * 4
    free = [2 * 4 * record]  # half of it is for four records of full size
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": free[0]}))
    with pytest.raises(KeyboardInterrupt):
        _experiment().run(tmp_path, show=_stop, show_bars=False)
    free[0] -= 4 * record
    _experiment().run(tmp_path, resume=True, show_bars=False)
    assert (tmp_path / "results.json").read_bytes() == (whole / "results.json").read_bytes()


def test_a_disk_with_no_room_for_gradients_is_said_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 100}))
    with pytest.raises(RunError, match=r"has 100 bytes left.*[Mm]ake room on the disk, or choose another folder"):
        _experiment().run(tmp_path, show_bars=False)


def test_a_moved_run_goes_on(whole: Path, stopped: Path, tmp_path: Path) -> None:
    shutil.copytree(stopped, tmp_path / "elsewhere [1]" / "größe")
    results = _experiment().run(tmp_path / "elsewhere [1]" / "größe", resume=True, show_bars=False)
    assert results == ks.Results.load(whole / "results.json")
