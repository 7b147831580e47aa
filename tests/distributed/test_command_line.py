"""Commands that torchrun starts on two processes leave what one process leaves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

import kronscope as ks
from tests.distributed.compare import assert_same_numbers

# Parameters are float32, and per-sample gradients depend in the last digits on which samples share a batch; what is
# made of them is float64.
TOLERANCE = 1e-6
_TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0", "--rdzv-backend", "c10d")
_PAPER = ("paper", "figure1", "--workload", "digits-linear", "--steps", "4", "--samples", "41", "--measure-at", "0,2,4")


def run(folder: Path, *arguments: str, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, *launcher, "-m", "kronscope", *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=100, check=False
    )


def test_a_figure_of_the_paper_on_two_processes(tmp_path: Path) -> None:
    ended = run(tmp_path, *_PAPER, "--out", "one")
    assert ended.returncode == 0, ended.stderr
    ended = run(tmp_path, *_PAPER, "--out", "two", launcher=_TORCHRUN)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("Written:") == 1
    for name in ("results.json", "figure1.png", "figure1.pdf", "report.html", "config.json", "table.csv"):
        assert (tmp_path / "two" / name).stat().st_size > 0, name
    one, two = (ks.Results.load(tmp_path / name / "results.json") for name in ("one", "two"))
    assert_same_numbers(two, one, tolerance=TOLERANCE)
    parts = {path.name for path in (tmp_path / "two" / "history").iterdir()}
    assert parts == {"process-0-of-2", "process-1-of-2"}
    # as a kill after the second step would leave it
    before = (tmp_path / "two" / "results.json").read_bytes()
    for name in ("results.json", "done.json", "stored/adagrad.json", "stored/gauss_newton-0-4.json"):
        (tmp_path / "two" / name).unlink()
    (last,) = (tmp_path / "two" / "checkpoints").glob("step-00000004-*")
    last.unlink()
    again = run(tmp_path, *_PAPER, "--out", "two", "--resume", launcher=_TORCHRUN)
    assert again.returncode == 0, again.stderr
    assert (tmp_path / "two" / "results.json").read_bytes() == before


def test_a_model_of_ones_own_on_two_processes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    torch.save({"inputs": torch.randn(21, 4), "targets": torch.randint(3, (21,))}, tmp_path / "data.pt")
    torch.save(nn.Linear(4, 3).state_dict(), tmp_path / "weights.pt")
    (tmp_path / "mine.py").write_text("from torch import nn\n\n\ndef build():\n    return nn.Linear(4, 3)\n")
    arguments = ("measure", "mine:build", "--data", "data.pt", "--checkpoint", "weights.pt", "--labels", "sampled")
    one = run(tmp_path, *arguments, "--out", "one")
    two = run(tmp_path, *arguments, "--out", "two", launcher=_TORCHRUN)
    assert (one.returncode, two.returncode) == (0, 0), two.stderr
    results = [ks.Results.load(tmp_path / name / "results.json") for name in ("two", "one")]
    assert_same_numbers(results[0], results[1], tolerance=TOLERANCE)
    refused = run(tmp_path, *arguments, "--out", "two", launcher=_TORCHRUN)
    assert refused.returncode != 0
    assert "already holds a" in refused.stderr


def test_a_launchers_environment_alone_does_no_harm() -> None:
    """A variable that some scheduler left behind says nothing about how processes would meet."""
    environment = {**os.environ, "WORLD_SIZE": "2"}
    ended = subprocess.run(
        [sys.executable, "-m", "kronscope", "--version"], env=environment, capture_output=True, text=True, check=True
    )
    assert ended.stdout.strip() == ks.__version__
