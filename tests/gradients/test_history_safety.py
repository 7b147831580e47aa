"""A history survives crashes at any moment, and goes on from a checkpoint with the same gradients."""

from __future__ import annotations

import io
import random
import shutil
import signal
import warnings
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import kronscope as ks
from kronscope.errors import DataError
from tests.forked import forked
from tests.gradients.given import Run, given_grads, recorded, stored

# ---------------------------------------------------------------------- crashes


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_files_cut_anywhere_give_all_complete_steps(tmp_path: Path, dtype: torch.dtype) -> None:
    history = recorded(tmp_path, given_grads(9), dtype=dtype)
    whole = stored(history)
    history.close()
    source, generator = tmp_path / "history", random.Random(0)
    record = 4 * 20 if dtype == torch.float32 else 8 + 2 * 20
    for trial in range(25):
        folder = tmp_path / f"cut-{trial}"
        shutil.copytree(source, folder)
        # appending order is: values, then the step; a crash may lose any number of bytes at the end of each
        lost = generator.randrange(0, 9 * record + 1)
        values = folder / "0.0.bin"
        values.write_bytes(values.read_bytes()[: 9 * record - lost])
        steps = folder / "steps.0.bin"
        lost_steps = generator.randrange(0, 9 * 8 + 1)
        steps.write_bytes(steps.read_bytes()[: 9 * 8 - lost_steps])
        complete = min((9 * record - lost) // record, (9 * 8 - lost_steps) // 8)
        opened = ks.GradientHistory.open(folder)
        assert opened.steps == tuple(range(1, complete + 1))
        if complete:
            assert torch.equal(stored(opened), whole[:complete])
        # and it can be gone on with
        run = Run(given_grads(3, seed=1))
        resumed = run.attach(path=folder, resume=True, dtype=dtype)
        run.train()
        assert resumed.steps == tuple(range(1, complete + 4))
        assert torch.allclose(stored(resumed)[complete:].double(), run.grads, atol=5e-3)
        assert torch.equal(stored(resumed)[:complete], whole[:complete])
        resumed.close()


def test_reading_a_history_leaves_its_writer_alone(tmp_path: Path) -> None:
    run = Run(given_grads(5))
    history = run.attach(path=tmp_path)
    run.train(0, 2)
    # the writer is in the middle of a record
    with (tmp_path / "0.0.bin").open("ab") as file:
        file.write(run.grads[2].numpy().tobytes()[:40])
    assert ks.GradientHistory.open(tmp_path).steps == (1, 2)
    with (tmp_path / "0.0.bin").open("ab") as file:
        file.write(run.grads[2].numpy().tobytes()[40:])
    with (tmp_path / "checksums.0.bin").open("ab") as file:
        file.write(zlib.crc32(run.grads[2].numpy().tobytes()).to_bytes(4, "little"))
    with (tmp_path / "steps.0.bin").open("ab") as file:
        file.write((3).to_bytes(8, "little"))
    assert torch.equal(stored(ks.GradientHistory.open(tmp_path)), run.grads[:3])
    history.close()


def test_a_crash_while_thinning_leaves_the_old_records(tmp_path: Path) -> None:
    history = recorded(tmp_path, given_grads(6))
    history.close()
    folder = tmp_path / "history"
    # half-written files of the next generation, as a kill in the middle leaves them
    (folder / "0.1.bin").write_bytes(b"\1" * 333)
    (folder / "steps.1.bin").write_bytes(b"\1" * 8)
    (folder / "history.json.part").write_text("{")
    assert torch.equal(stored(ks.GradientHistory.open(folder)), given_grads(6))
    run = Run(given_grads(12))
    resumed = run.attach(path=folder, resume=True, space=5 * 48)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run.train(6)
    assert resumed.steps == (1, 5, 9)
    assert torch.allclose(stored(resumed).double(), given_grads(12)[::4], atol=3e-3)
    resumed.close()


def _write(pipe: Any, folder: Path) -> None:
    model = nn.Linear(40, 30, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    history = ks.GradientHistory.attach(optimizer, model, ["weight"], folder)
    for step in range(1, 100000):
        model.weight.grad = torch.full((30, 40), float(step))
        optimizer.step()
        if step == 50:
            pipe.send("fifty")
    history.close()


def test_a_killed_writer_loses_nothing_but_the_step_it_was_at(tmp_path: Path) -> None:
    with forked(_write, tmp_path) as (writer, pipe):
        assert pipe.recv() == "fifty"
        writer.kill()
        writer.join()
        assert writer.exitcode == -signal.SIGKILL
    history = ks.GradientHistory.open(tmp_path)
    assert len(history) >= 50
    assert history.steps == tuple(range(1, len(history) + 1))
    for index in (0, 25, len(history) - 1):
        assert float(history.read("weight", index, index + 1).unique()) == index + 1
    (row,) = ks.measure_history(history, ["shampoo2"], at=20, progress=False)
    assert row.cosine == pytest.approx(1.0)


# ---------------------------------------------------------------------- checkpoints


def _through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    loaded: dict[str, Any] = torch.load(buffer, weights_only=True)
    return loaded


@pytest.mark.parametrize("disk", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_going_back_to_a_checkpoint_and_on_is_as_if_nothing_had_happened(
    tmp_path: Path, disk: bool, dtype: torch.dtype
) -> None:
    grads = given_grads(10)
    undisturbed = recorded(None, grads, dtype=dtype)
    run = Run(grads)
    history = run.attach(path=tmp_path / "h" if disk else None, dtype=dtype)
    run.train(0, 4)
    state = _through_a_file(history.state_dict())
    run.train(4, 7)
    history.close()
    again = Run(grads)
    resumed = again.attach(path=tmp_path / "h" if disk else None, dtype=dtype, resume=True)
    resumed.load_state_dict(state)
    assert resumed.steps == (1, 2, 3, 4)
    again.train(4, 10)
    assert resumed.steps == undisturbed.steps
    assert resumed.total_steps == 10
    assert torch.equal(stored(resumed), stored(undisturbed))
    resumed.close()


@pytest.mark.parametrize("stop", [5, 6, 9, 13, 20])
def test_a_history_thinned_after_the_checkpoint_goes_on_the_same(tmp_path: Path, stop: int) -> None:
    grads, space = given_grads(30), 6 * 48

    def record(folder: Path, start: int, stop: int, state: dict[str, Any] | None = None) -> ks.GradientHistory:
        run = Run(grads)
        history = run.attach(path=folder, space=space, resume=True)
        if state is not None:
            history.load_state_dict(state)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run.train(start, stop)
        return history

    undisturbed = record(tmp_path / "a", 0, 30)
    first = record(tmp_path / "b", 0, 5)
    state = first.state_dict()
    first.close()
    later = record(tmp_path / "b", 5, stop, state)
    later.close()
    resumed = record(tmp_path / "b", 5, 30, _through_a_file(state))
    assert (resumed.steps, resumed.every, resumed.total_steps) == (undisturbed.steps, undisturbed.every, 30)
    assert torch.equal(stored(resumed), stored(undisturbed))


def test_a_checkpoint_newer_than_the_files_is_refused(tmp_path: Path) -> None:
    run = Run(given_grads(5))
    history = run.attach(path=tmp_path)
    run.train()
    state = history.state_dict()
    history.close()
    steps = tmp_path / "steps.0.bin"
    steps.write_bytes(steps.read_bytes()[:16])
    resumed = Run(given_grads(5)).attach(path=tmp_path, resume=True)
    with pytest.raises(DataError, match="lacks step 3"):
        resumed.load_state_dict(state)
    resumed.close()
