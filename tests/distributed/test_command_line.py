"""Commands that torchrun starts on two processes leave what one process leaves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.run
from torch import nn

import kronscope as ks
from kronscope.paper import Experiment, plans, scaled
from kronscope.support.launch import is_rank_0, process_group
from kronscope.support.processes import Processes
from kronscope.targets import own_part
from tests.distributed.compare import assert_same_numbers
from tests.forked import Ended, run_program

# Parameters are float32, and per-sample gradients depend in the last digits on which samples share a batch; what is
# made of them is float64.
TOLERANCE = 1e-6
_PAPER = ("paper", "figure1", "--workload", "digits-linear", "--steps", "4", "--samples", "21", "--measure-at", "0,2,4")


def launched(folder: Path, *arguments: str) -> Ended:
    """Run a command with ``torchrun``: two new interpreters, started by a process that need not import torch first."""
    # standalone: a meeting place of its own, also beside other tests that launch processes
    options = ("--standalone", "--nproc-per-node", "2", "-m", "kronscope")
    variables = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    (ended,) = run_program(folder, str(torch.distributed.run.__file__), *options, *arguments, variables=variables)
    return ended


@pytest.mark.timeout(600)
def test_a_figure_of_the_paper_on_two_processes(tmp_path: Path) -> None:
    first, second = run_program(tmp_path, "kronscope", *_PAPER, "--out", "two", size=2)
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert (first.out + second.out).count("Written:") == 1
    for name in ("results.json", "figure1.png", "figure1.pdf", "report.html", "config.json", "table.csv"):
        assert (tmp_path / "two" / name).stat().st_size > 0, name
    settings = scaled("digits-linear", steps=4, samples=21, measure_at=[0, 2, 4])
    experiment = Experiment(plans.get("figure1"), settings, settings.load_data())
    one = experiment.run(tmp_path / "one", show_bars=False)
    assert_same_numbers(ks.Results.load(tmp_path / "two" / "results.json"), one, tolerance=TOLERANCE)
    parts = {path.name for path in (tmp_path / "two" / "history").iterdir()}
    assert parts == {"process-0-of-2", "process-1-of-2"}
    # as a kill after the second step would leave it
    before = (tmp_path / "two" / "results.json").read_bytes()
    for name in ("results.json", "done.json", "stored/adagrad.json", "stored/gauss_newton-0-4.json"):
        (tmp_path / "two" / name).unlink()
    (last,) = (tmp_path / "two" / "checkpoints").glob("step-00000004-*")
    last.unlink()
    for again in run_program(tmp_path, "kronscope", *_PAPER, "--out", "two", "--resume", size=2):
        assert again.code == 0, again.err
    assert (tmp_path / "two" / "results.json").read_bytes() == before


def test_a_model_of_ones_own_on_two_processes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    inputs, targets, model = torch.randn(21, 4), torch.randint(3, (21,)), nn.Linear(4, 3)
    torch.save({"inputs": inputs, "targets": targets}, tmp_path / "data.pt")
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    (tmp_path / "mine.py").write_text("from torch import nn\n\n\ndef build():\n    return nn.Linear(4, 3)\n")
    arguments = ("measure", "mine:build", "--data", "data.pt", "--checkpoint", "weights.pt", "--labels", "sampled")
    ended = launched(tmp_path, *arguments, "--out", "two")
    assert ended.code == 0, ended.err
    one = ks.measure(model, nn.CrossEntropyLoss(), [(inputs, targets)], labels="sampled", progress=False)
    assert_same_numbers(ks.Results.load(tmp_path / "two" / "results.json"), one, tolerance=TOLERANCE)


def test_a_variable_that_a_scheduler_left_behind_does_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says nothing about how processes would meet."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with process_group():
        assert not dist.is_initialized()
    assert is_rank_0()


def test_parts_of_data_are_all_of_it() -> None:
    data = [({"x": torch.arange(3.0)}, torch.arange(3)), ({"x": torch.arange(3.0, 8.0)}, torch.arange(3, 8))]

    class Third:
        world_size = 3

        def __init__(self, rank: int) -> None:
            self.rank = rank

        share_of = Processes.share_of

    parts = [own_part(data, Third(rank)) for rank in range(3)]  # type: ignore[arg-type]
    pairs = [pair for part in parts for pair in part]
    assert torch.cat([inputs["x"] for inputs, _ in pairs]).tolist() == list(range(8))
    assert torch.cat([targets for _, targets in pairs]).tolist() == list(range(8))


@pytest.mark.parametrize("code", [None, 0])
def test_processes_leave_together_when_all_went_well(monkeypatch: pytest.MonkeyPatch, code: int | None) -> None:
    done: list[str] = []
    monkeypatch.setattr("kronscope.support.launch._launched", lambda: True)
    for name in ("init_process_group", "barrier", "destroy_process_group"):
        monkeypatch.setattr(dist, name, lambda *_, name=name: done.append(name))
    with pytest.raises(SystemExit), process_group():
        raise SystemExit(code)
    assert done == ["init_process_group", "barrier", "destroy_process_group"]
    done.clear()
    # the others may be anywhere after a failure: nobody waits for them
    with pytest.raises(SystemExit), process_group():
        raise SystemExit(2)
    assert done == ["init_process_group", "destroy_process_group"]
