"""Recorded gradients are those the optimizer used, wherever they are kept, and Adagrad's matrix of them is exact."""

from __future__ import annotations

import io
import json
import math
import random
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kronscope as ks
from kronscope.errors import DataError, LayerError, NonFiniteError, OptionError
from kronscope.testing import oracle

SHAPE = (4, 5)


class Run:
    """A model whose gradients are given: step t puts the t-th of them in place."""

    def __init__(self, grads: Tensor, *, lr: float = 0.0) -> None:
        self.model = nn.Linear(SHAPE[1], SHAPE[0], bias=True).to(grads.dtype)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr)
        self.grads = grads

    def attach(self, **options: Any) -> ks.GradientHistory:
        options = {"layers": ["weight"], **options}
        return ks.GradientHistory.attach(self.optimizer, self.model, **options)

    def train(self, start: int = 0, stop: int | None = None) -> None:
        for grad in self.grads[start:stop]:
            self.model.weight.grad = grad.clone()
            self.optimizer.step()


def _grads(steps: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(steps, *SHAPE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def _stored(history: ks.GradientHistory, layer: str = "weight") -> Tensor:
    return history.read(layer, 0, len(history))


def _recorded(tmp_path: Path | None, grads: Tensor, **options: Any) -> ks.GradientHistory:
    run = Run(grads)
    history = run.attach(path=None if tmp_path is None else tmp_path / "history", **options)
    run.train()
    history.detach()
    return history


# ---------------------------------------------------------------------- what is recorded


@pytest.mark.parametrize("disk", [False, True])
def test_gradients_are_recorded_in_order_between_attach_and_detach(tmp_path: Path, disk: bool) -> None:
    run = Run(_grads(6))
    run.train(0, 1)
    history = run.attach(path=tmp_path / "h" if disk else None)
    assert len(history) == history.total_steps == 0
    run.train(1, 5)
    history.detach()
    run.train(5, 6)
    assert history.steps == (1, 2, 3, 4)
    assert not history.thinned
    assert torch.equal(_stored(history), run.grads[1:5])
    assert "1 layers, 4 of 4 steps" in repr(history)
    history.close()
    history.detach()


def test_recording_changes_neither_gradients_nor_training() -> None:
    runs = [Run(_grads(3), lr=0.1) for _ in range(2)]
    runs[1].model.load_state_dict(runs[0].model.state_dict())
    history = runs[0].attach(dtype=torch.float16)
    for run in runs:
        run.train()
    assert torch.equal(runs[0].model.weight, runs[1].model.weight)
    assert runs[0].model.weight.grad is not None
    assert torch.equal(runs[0].model.weight.grad, runs[0].grads[-1])
    assert len(history) == 3


def test_what_is_recorded_is_a_copy() -> None:
    run = Run(_grads(2))
    history = run.attach()
    run.train(0, 1)
    assert run.model.weight.grad is not None
    run.model.weight.grad.zero_()
    assert torch.equal(_stored(history)[0], run.grads[0])


def test_closures_are_recorded_at_their_first_call() -> None:
    torch.manual_seed(1)
    model = nn.Linear(3, 2, bias=False).double()
    inputs, targets = torch.randn(8, 3, dtype=torch.float64), torch.randn(8, 2, dtype=torch.float64)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
    history = ks.GradientHistory.attach(optimizer, model, ["weight"])
    expected, calls = [], [0]

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        calls[0] += 1
        return loss

    for as_keyword in (False, True):
        start = model.weight.detach().clone().requires_grad_()
        (grad,) = torch.autograd.grad(nn.functional.mse_loss(inputs @ start.T, targets), start)
        expected.append(grad)
        loss = optimizer.step(closure=closure) if as_keyword else optimizer.step(closure)
        assert isinstance(loss, Tensor | float)
    assert calls[0] > 2
    assert history.steps == (1, 2)
    assert torch.allclose(_stored(history), torch.stack(expected), atol=1e-14)


@pytest.mark.parametrize("fused", [False, True])
def test_scaled_gradients_are_recorded_unscaled_and_skipped_steps_are_not(fused: bool) -> None:
    model = nn.Linear(3, 2, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    history = ks.GradientHistory.attach(optimizer, model, ["weight"])
    expected = []
    for step in range(4):
        inputs = torch.randn(5, 3)
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        expected.append(torch.autograd.grad(loss, model.weight, retain_graph=True)[0])
        scaler.scale(loss).backward()
        if step == 2:
            assert model.weight.grad is not None
            model.weight.grad[0, 0] = math.inf
            expected.pop()
        scaler.step(optimizer)
        scaler.update()
    assert history.steps == (1, 2, 3)
    assert torch.allclose(_stored(history), torch.stack(expected), rtol=1e-5)


def test_slices_and_stacks_and_missing_gradients() -> None:
    model = nn.ModuleDict({"a": nn.Linear(3, 4, bias=False), "b": nn.Conv1d(3, 2, 1, bias=False)})
    a, b = (next(model[name].parameters()) for name in "ab")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names = ["a.weight[1:3]", "a.weight+b.weight", "b"]
    history = ks.GradientHistory.attach(optimizer, model, names)
    a.grad, b.grad = torch.randn_like(a), torch.randn_like(b)
    optimizer.step()
    b.grad = None
    optimizer.step()
    assert history.layers == ("a.weight[1:3]", "a.weight+b.weight", "b.weight")
    assert history.shape("a.weight+b.weight") == (6, 3)
    assert a.grad is not None
    assert torch.equal(_stored(history, "a.weight[1:3]")[0], a.grad[1:3])
    stacked = _stored(history, "a.weight+b.weight")
    assert torch.equal(stacked[0, :4], a.grad)
    assert float(stacked[0, 4:].abs().sum()) > 0
    assert float(stacked[1, 4:].abs().sum()) == 0
    assert float(_stored(history, "b.weight")[1].abs().sum()) == 0


def test_half_precision_models_and_sparse_gradients() -> None:
    table = nn.Embedding(6, 3, sparse=True)
    optimizer = torch.optim.SparseAdam(list(table.parameters()))
    history = ks.GradientHistory.attach(optimizer, table)
    table(torch.tensor([1, 4, 4])).sum().backward()
    optimizer.step()
    assert _stored(history)[0, :, 0].tolist() == [0, 1, 0, 0, 2, 0]
    run = Run(_grads(2, dtype=torch.bfloat16))
    history = run.attach()
    run.train()
    assert _stored(history).dtype == torch.float32
    assert torch.equal(_stored(history), run.grads.float())


# ---------------------------------------------------------------------- where it is kept


def test_disk_equals_memory_and_can_be_opened_by_another_process(tmp_path: Path) -> None:
    for dtype in (torch.float64, torch.float32, torch.float16):
        memory = _recorded(None, _grads(7), dtype=dtype)
        disk = _recorded(tmp_path / str(dtype), _grads(7), dtype=dtype)
        opened = ks.GradientHistory.open(tmp_path / str(dtype) / "history")
        assert memory.steps == disk.steps == opened.steps
        assert opened.total_steps == 7
        assert opened.layers == ("weight",)
        assert torch.equal(_stored(memory), _stored(disk))
        assert torch.equal(_stored(memory), _stored(opened))
        for one, other in zip(ks.measure_history(disk), ks.measure_history(opened), strict=True):
            assert one.cosine == other.cosine


@pytest.mark.parametrize("disk", [False, True])
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_half_precision_keeps_three_digits_of_gradients_of_any_size(tmp_path: Path, disk: bool, size: float) -> None:
    grads = _grads(5) * size
    history = _recorded(tmp_path if disk else None, grads, dtype=torch.float16)
    off = (_stored(history).double() - grads).abs().amax((1, 2)) / grads.abs().amax((1, 2))
    assert float(off.max()) < 1e-3
    assert float(off.max()) > 0


@pytest.mark.parametrize("disk", [False, True])
def test_every_kth_step(tmp_path: Path, disk: bool) -> None:
    history = _recorded(tmp_path if disk else None, _grads(8), every=3)
    assert history.steps == (1, 4, 7)
    assert history.total_steps == 8
    assert history.thinned
    assert torch.equal(_stored(history), _grads(8)[[0, 3, 6]])


@pytest.mark.parametrize("disk", [False, True])
def test_space_is_kept_by_half_precision_first_and_thinning_then(tmp_path: Path, disk: bool) -> None:
    run = Run(_grads(40, dtype=torch.float32))
    half = 2 * SHAPE[0] * SHAPE[1] + 8
    history = run.attach(path=tmp_path / "h" if disk else None, space=6 * half)
    run.train(0, 3)
    assert torch.equal(_stored(history), run.grads[:3])
    run.train(3, 6)
    assert list(history.steps) == [1, 2, 3, 4, 5, 6]
    assert 0 < float((_stored(history) - run.grads[:6]).abs().max()) < 1e-3 * float(run.grads.abs().max())
    with pytest.warns(UserWarning, match="one step in 2 is kept"):
        run.train(6, 7)
    assert list(history.steps) == [1, 3, 5, 7]
    with pytest.warns(UserWarning, match="error bars"):
        run.train(7, 40)
    assert history.every == 8
    assert list(history.steps) == [1, 9, 17, 25, 33]
    assert history.total_steps == 40
    assert torch.allclose(_stored(history), run.grads[::8], atol=2e-3)
    if disk:
        files = list((tmp_path / "h").glob("*.bin"))
        assert len(files) == 2
        assert sum(file.stat().st_size for file in files if "steps" not in file.name) <= 6 * half
        opened = ks.GradientHistory.open(tmp_path / "h")
        assert opened.steps == history.steps
        assert opened.every == 8
        assert torch.equal(_stored(opened), _stored(history))


# ---------------------------------------------------------------------- crashes


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_files_cut_anywhere_give_all_complete_steps(tmp_path: Path, dtype: torch.dtype) -> None:
    history = _recorded(tmp_path, _grads(9), dtype=dtype)
    whole = _stored(history)
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
            assert torch.equal(_stored(opened), whole[:complete])
        # and it can be gone on with
        run = Run(_grads(3, seed=1))
        resumed = run.attach(path=folder, resume=True, dtype=dtype)
        run.train()
        assert resumed.steps == tuple(range(1, complete + 4))
        assert torch.allclose(_stored(resumed)[complete:].double(), run.grads, atol=5e-3)
        assert torch.equal(_stored(resumed)[:complete], whole[:complete])
        resumed.close()


def test_reading_a_history_leaves_its_writer_alone(tmp_path: Path) -> None:
    run = Run(_grads(5))
    history = run.attach(path=tmp_path)
    run.train(0, 2)
    # the writer is in the middle of a record
    with (tmp_path / "0.0.bin").open("ab") as file:
        file.write(run.grads[2].numpy().tobytes()[:40])
    assert ks.GradientHistory.open(tmp_path).steps == (1, 2)
    with (tmp_path / "0.0.bin").open("ab") as file:
        file.write(run.grads[2].numpy().tobytes()[40:])
    with (tmp_path / "steps.0.bin").open("ab") as file:
        file.write((3).to_bytes(8, "little"))
    assert torch.equal(_stored(ks.GradientHistory.open(tmp_path)), run.grads[:3])
    history.close()


def test_a_crash_while_thinning_leaves_the_old_records(tmp_path: Path) -> None:
    history = _recorded(tmp_path, _grads(6))
    history.close()
    folder = tmp_path / "history"
    # half-written files of the next generation, as a kill in the middle leaves them
    (folder / "0.1.bin").write_bytes(b"\1" * 333)
    (folder / "steps.1.bin").write_bytes(b"\1" * 8)
    (folder / "history.json.part").write_text("{")
    assert torch.equal(_stored(ks.GradientHistory.open(folder)), _grads(6))
    run = Run(_grads(12))
    resumed = run.attach(path=folder, resume=True, space=5 * 48)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run.train(6)
    assert resumed.steps == (1, 5, 9)
    assert torch.allclose(_stored(resumed).double(), _grads(12)[::4], atol=3e-3)
    resumed.close()


_WRITER = """
import sys, torch
from torch import nn
import kronscope as ks
torch.set_num_threads(1)
model = nn.Linear(40, 30, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
history = ks.GradientHistory.attach(optimizer, model, ["weight"], sys.argv[1])
for step in range(1, 100000):
    model.weight.grad = torch.full((30, 40), float(step))
    optimizer.step()
    if step == 50:
        print("fifty", flush=True)
"""


def test_a_killed_writer_loses_nothing_but_the_step_it_was_at(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", _WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "fifty\n"
        writer.send_signal(signal.SIGKILL)
        writer.wait()
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
    grads = _grads(10)
    undisturbed = _recorded(None, grads, dtype=dtype)
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
    assert torch.equal(_stored(resumed), _stored(undisturbed))
    resumed.close()


@pytest.mark.parametrize("stop", [5, 6, 9, 13, 20])
def test_a_history_thinned_after_the_checkpoint_goes_on_the_same(tmp_path: Path, stop: int) -> None:
    grads, space = _grads(30), 6 * 48

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
    assert torch.equal(_stored(resumed), _stored(undisturbed))


def test_a_checkpoint_newer_than_the_files_is_refused(tmp_path: Path) -> None:
    run = Run(_grads(5))
    history = run.attach(path=tmp_path)
    run.train()
    state = history.state_dict()
    history.close()
    steps = tmp_path / "steps.0.bin"
    steps.write_bytes(steps.read_bytes()[:16])
    resumed = Run(_grads(5)).attach(path=tmp_path, resume=True)
    with pytest.raises(DataError, match="lacks step 3"):
        resumed.load_state_dict(state)
    resumed.close()


# ---------------------------------------------------------------------- measuring


@pytest.mark.parametrize("beta", [None, 0.9, 0.0])
@pytest.mark.parametrize("disk", [False, True])
def test_adagrads_matrix_at_several_steps_is_the_dense_one(
    tmp_path: Path, disk: bool, beta: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kronscope.gradients import history as module

    # several chunks, so that carrying on from step to step crosses their borders
    monkeypatch.setattr(module, "_CHUNK_BYTES", 4 * 20 * 4)
    grads = _grads(14) * torch.linspace(3, 1, 14, dtype=torch.float64).view(-1, 1, 1)
    history = _recorded(tmp_path if disk else None, grads)
    names = [name for name in oracle.matrix_approximations() if name != "kl"]
    results = ks.measure_history(history, (*names, "kfac-reduce"), at=[1, 2, 3, 6, 7, 14], beta=beta, progress=False)
    assert results.steps == (1, 2, 3, 6, 7, 14)
    for row in results:
        weights = torch.ones(row.step).double()
        if beta is not None:
            weights = weights.new_tensor([(1 - beta) * beta ** (row.step - t) for t in range(1, row.step + 1)])
        flat = grads[: row.step].flatten(1)
        H = torch.einsum("i,ia,ib->ab", weights, flat, flat)
        assert (row.truth, row.labels, row.batch_size, row.samples) == ("adagrad", "real", 1, row.step)
        assert math.isnan(row.stderr)
        if row.approximation == "kfac-reduce":
            assert math.isnan(row.cosine)
            assert row.note
            continue
        expected = oracle.cosine(H, oracle.approximation_of_matrix(row.approximation, H, SHAPE))
        assert row.cosine == pytest.approx(expected, abs=1e-9), row


def test_the_curves_of_a_history() -> None:
    history = _recorded(None, _grads(6))
    results = ks.measure_history(history, at=[3, 6], details=["spectrum", "exponents"], progress=False)
    cosines = {(row.step, row.approximation): row.cosine for row in results}
    for detail in results.details:
        if detail.kind == "spectrum":
            assert detail.number("ratio") == pytest.approx(cosines[detail.step, "optimal"], abs=1e-9)
        else:
            values = dict(zip(detail.series("exponent"), detail.series("cosine"), strict=True))
            assert values[1.0] == pytest.approx(cosines[detail.step, "shampoo2"], abs=1e-9)
            assert values[0.5] == pytest.approx(cosines[detail.step, "shampoo"], abs=1e-9)
    assert len(results.details) == 4


def test_the_last_step_is_the_default_and_layers_can_be_chosen() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    optimizer = torch.optim.Adam(model.parameters())
    history = ks.GradientHistory.attach(optimizer, model)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(5, 3)).square().sum().backward()
        optimizer.step()
    assert ks.measure_history(history, progress=False).layers == ("0.weight", "1.weight")
    results = ks.measure_history(history, "shampoo2", layers="1.weight", progress=False)
    assert [(row.layer, row.step, row.approximation) for row in results] == [("1.weight", 4, "shampoo2")]


def test_too_thin_a_history_says_so_and_later_steps_are_measured() -> None:
    history = _recorded(None, _grads(40), every=4)
    early, late = ks.measure_history(history, ["shampoo2"], at=[6, 40], progress=False)
    assert math.isnan(early.cosine)
    assert "2 of 6 steps were recorded" in early.note
    assert "at least three" in early.note
    assert 0 < late.cosine <= 1.1
    assert late.stderr > 0
    (first,) = ks.measure_history(history, ["shampoo2"], at=1, progress=False)
    assert 0 < first.cosine < 1
    assert math.isnan(first.stderr)
    assert not first.note


def test_ctrl_c_returns_the_rows_that_are_done() -> None:
    class Pressed:
        name, title = "pressed", "pressed"
        calls = 0

        def fit(self, stream: ks.GradientStream) -> ks.Operator:
            Pressed.calls += 1
            if Pressed.calls == 2:
                raise KeyboardInterrupt
            return ks.approx.get("identity").fit(stream)

    chosen: list[Any] = ["shampoo2", Pressed()]
    results = ks.measure_history(_recorded(None, _grads(5)), chosen, at=[2, 4, 5], progress=False)
    assert results.partial
    assert [(row.step, row.approximation) for row in results] == [(2, "shampoo2"), (2, "pressed"), (4, "shampoo2")]


# ---------------------------------------------------------------------- errors


def test_a_gradient_that_is_not_finite_is_named() -> None:
    grads = _grads(5)
    grads[3, 0, 0] = math.nan
    history = _recorded(None, grads)
    (row,) = ks.measure_history(history, ["shampoo2"], at=3, progress=False)
    assert row.cosine > 0
    with pytest.raises(NonFiniteError, match="'weight' at step 4"):
        ks.measure_history(history, ["shampoo2"], at=5, progress=False)


def _attach(**options: Any) -> Callable[[Path], object]:
    return lambda path: Run(_grads(1)).attach(**options)


def _damage(text: str) -> Callable[[Path], object]:
    def work(path: Path) -> object:
        (path / "history.json").write_text(text)
        return ks.GradientHistory.open(path)

    return work


def _twice(path: Path) -> object:
    Run(_grads(1)).attach(path=path).close()
    return Run(_grads(1)).attach(path=path)


def _other_layers(path: Path) -> object:
    Run(_grads(1)).attach(path=path).close()
    return Run(_grads(1)).attach(path=path, layers=["weight[0:2]"], resume=True)


def _other_optimizer(path: Path) -> object:
    run = Run(_grads(1))
    return ks.GradientHistory.attach(torch.optim.SGD([run.model.bias], lr=1.0), run.model, ["weight"])


def _measured(**options: Any) -> Callable[[Path], object]:
    return lambda path: ks.measure_history(_recorded(None, _grads(4), every=2), progress=False, **options)


@pytest.mark.parametrize(
    ("work", "error", "text"),
    [
        (_attach(layers=["wieght"]), LayerError, r"nearest names are: weight"),
        (_attach(layers=["bias"]), LayerError, r"not a matrix"),
        (_other_optimizer, LayerError, r"does not train 'weight'; leave it out"),
        (_attach(every=0), OptionError, r"every must be 1 or more"),
        (_attach(dtype=torch.bfloat16), OptionError, r"dtype must be float16"),
        (_attach(space=100), OptionError, r"fewer than four records of 48 bytes.*allow more"),
        (_twice, DataError, r"holds a gradient history already; open it"),
        (_other_layers, DataError, r"is of other layers: weight; use another path"),
        (ks.GradientHistory.open, DataError, r"there is no gradient history in"),
        (_damage("{"), DataError, r"damaged"),
        (_damage("[]"), DataError, r"damaged"),
        (_damage(json.dumps({"format": "other", "version": 1})), DataError, r"another version"),
        (_measured(at=9), OptionError, r"at must be steps from 1 to 4, got 9"),
        (_measured(at=0), OptionError, r"at must be steps from 1 to 4"),
        (_measured(at=[]), OptionError, r"at must be steps"),
        (_measured(beta=1.0), OptionError, r"beta must be at least 0 and below 1"),
        (_measured(details=["batch_sizes"]), OptionError, r"details of a history may be"),
        (_measured(layers=["x"]), LayerError, r"'x' is not recorded; there are: weight"),
        (_measured(approximations=["shampo"]), OptionError, r"did you mean"),
        (_measured(approximations=[]), OptionError, r"at least one approximation"),
        (lambda path: ks.measure_history(Run(_grads(1)).attach()), DataError, r"empty: take optimizer steps"),
    ],
)
def test_errors_say_what_to_do(
    tmp_path: Path, work: Callable[[Path], object], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        work(tmp_path)
