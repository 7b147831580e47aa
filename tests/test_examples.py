"""Every script in examples/ runs as a user would run it, and prints a table."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from tests.forked import Ended, run_program

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
# What each must print besides a table of cosines.
PRINTS = {
    "advise_cnn": "after 60 steps",
    "custom_approximation": "adafactor keeps the promises of an approximation",
    "history_adagrad": "Cosine with Adagrad's matrix",
    "measure_digits": "wrote",
    "measure_transformer": "random columns",
}


# Those that torchrun starts, and what they print.
TOGETHER = {"ddp": "replicated over 2 processes", "fsdp2": "sharded over 2 processes"}


# Those that train on one process, what they need, and what they print besides losses that fall.
TRAINING = {
    "lightning_watch": (("lightning",), "records of one run:"),
    "train_digits": (("sklearn", "matplotlib"), "KLShampoo"),
    "trainer": (("transformers", "accelerate"), "the weights are the same to the bit"),
    "watch_gpt": (("pandas",), "warnings:"),
}


def _run(name: str, folder: Path, size: int = 1) -> Ended:
    first, *others = run_program(folder, str(ROOT / "examples" / f"{name}.py"), size=size)
    assert first.code == 0, first.err
    assert all(other.code == 0 for other in others)
    return first


def test_every_example_is_tested() -> None:
    assert {path.stem for path in EXAMPLES} == set(PRINTS) | set(TOGETHER) | set(TRAINING)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_is_a_page_of_the_gallery(path: Path) -> None:
    assert re.match(r'"""\n[A-Z].*\n=+\n\n[A-Z]', path.read_text(encoding="utf-8")), "its docstring begins with a title"


@pytest.mark.parametrize("name", TOGETHER)
def test_example_runs_on_two_processes(name: str, tmp_path: Path) -> None:
    done = _run(name, tmp_path, size=2)
    assert TOGETHER[name] in done.out
    _assert_losses_fall(done.out)


def _assert_losses_fall(printed: str) -> None:
    losses = [float(text) for text in re.findall(r"loss (\d+\.\d+)", printed)]
    assert len(losses) >= 2
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", TRAINING)
def test_example_trains(name: str, tmp_path: Path) -> None:
    packages, prints = TRAINING[name]
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{name}.py needs {package}: `make test-integrations` has it")
    done = _run(name, tmp_path)
    assert prints in done.out
    _assert_losses_fall(done.out)


@pytest.mark.parametrize("path", [path for path in EXAMPLES if path.stem in PRINTS], ids=lambda path: path.stem)
def test_example_runs(path: Path, tmp_path: Path) -> None:
    for package in ("sklearn", "transformers"):
        if package in path.read_text(encoding="utf-8") and importlib.util.find_spec(package) is None:
            pytest.skip(f"{path.name} needs {package}: pip install '.[all]'")
    done = _run(path.stem, tmp_path)
    assert "Warning" not in done.err
    assert PRINTS[path.stem] in done.out
    cosines = [float(text) for text in re.findall(r"(?<![±\d.])[01]\.\d{4}(?!\d)", done.out)]
    assert len(cosines) >= 5, done.out
    assert all(0 < cosine < 1.1 for cosine in cosines), done.out
