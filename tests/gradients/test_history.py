"""Recorded gradients are those the optimizer used, wherever they are kept, and Adagrad's matrix of them is exact."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kronscope as ks
from kronscope.errors import DataError, LayerError, NonFiniteError, OptionError
from kronscope.testing import oracle
from tests.gradients.given import SHAPE, Run, given_grads, recorded, stored

# ---------------------------------------------------------------------- what is recorded


@pytest.mark.parametrize("disk", [False, True])
def test_gradients_are_recorded_in_order_between_attach_and_detach(tmp_path: Path, disk: bool) -> None:
    run = Run(given_grads(6))
    run.train(0, 1)
    history = run.attach(path=tmp_path / "h" if disk else None)
    assert len(history) == history.total_steps == 0
    run.train(1, 5)
    history.detach()
    run.train(5, 6)
    assert history.steps == (1, 2, 3, 4)
    assert not history.thinned
    assert torch.equal(stored(history), run.grads[1:5])
    assert "1 layers, 4 of 4 steps" in repr(history)
    history.close()
    history.detach()


def test_recording_changes_neither_gradients_nor_training() -> None:
    runs = [Run(given_grads(3), lr=0.1) for _ in range(2)]
    runs[1].model.load_state_dict(runs[0].model.state_dict())
    history = runs[0].attach(dtype=torch.float16)
    for run in runs:
        run.train()
    assert torch.equal(runs[0].model.weight, runs[1].model.weight)
    assert runs[0].model.weight.grad is not None
    assert torch.equal(runs[0].model.weight.grad, runs[0].grads[-1])
    assert len(history) == 3


def test_what_is_recorded_is_a_copy() -> None:
    run = Run(given_grads(2))
    history = run.attach()
    run.train(0, 1)
    assert run.model.weight.grad is not None
    run.model.weight.grad.zero_()
    assert torch.equal(stored(history)[0], run.grads[0])


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True:UserWarning")  # LBFGS of torch 2.8
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
    assert torch.allclose(stored(history), torch.stack(expected), atol=1e-14)


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
    assert torch.allclose(stored(history), torch.stack(expected), rtol=1e-5)


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
    assert torch.equal(stored(history, "a.weight[1:3]")[0], a.grad[1:3])
    stacked = stored(history, "a.weight+b.weight")
    assert torch.equal(stacked[0, :4], a.grad)
    assert float(stacked[0, 4:].abs().sum()) > 0
    assert float(stacked[1, 4:].abs().sum()) == 0
    assert float(stored(history, "b.weight")[1].abs().sum()) == 0


def test_half_precision_models_and_sparse_gradients() -> None:
    table = nn.Embedding(6, 3, sparse=True)
    optimizer = torch.optim.SparseAdam(list(table.parameters()))
    history = ks.GradientHistory.attach(optimizer, table)
    table(torch.tensor([1, 4, 4])).sum().backward()
    optimizer.step()
    assert stored(history)[0, :, 0].tolist() == [0, 1, 0, 0, 2, 0]
    run = Run(given_grads(2, dtype=torch.bfloat16))
    history = run.attach()
    run.train()
    assert stored(history).dtype == torch.float32
    assert torch.equal(stored(history), run.grads.float())


# ---------------------------------------------------------------------- where it is kept


def test_disk_equals_memory_and_can_be_opened_by_another_process(tmp_path: Path) -> None:
    for dtype in (torch.float64, torch.float32, torch.float16):
        memory = recorded(None, given_grads(7), dtype=dtype)
        disk = recorded(tmp_path / str(dtype), given_grads(7), dtype=dtype)
        opened = ks.GradientHistory.open(tmp_path / str(dtype) / "history")
        assert memory.steps == disk.steps == opened.steps
        assert opened.total_steps == 7
        assert opened.layers == ("weight",)
        assert torch.equal(stored(memory), stored(disk))
        assert torch.equal(stored(memory), stored(opened))
        for one, other in zip(ks.measure_history(disk), ks.measure_history(opened), strict=True):
            assert one.cosine == other.cosine


@pytest.mark.parametrize("disk", [False, True])
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_half_precision_keeps_three_digits_of_gradients_of_any_size(tmp_path: Path, disk: bool, size: float) -> None:
    grads = given_grads(5) * size
    history = recorded(tmp_path if disk else None, grads, dtype=torch.float16)
    off = (stored(history).double() - grads).abs().amax((1, 2)) / grads.abs().amax((1, 2))
    assert float(off.max()) < 1e-3
    assert float(off.max()) > 0


@pytest.mark.parametrize("disk", [False, True])
def test_every_kth_step(tmp_path: Path, disk: bool) -> None:
    history = recorded(tmp_path if disk else None, given_grads(8), every=3)
    assert history.steps == (1, 4, 7)
    assert history.total_steps == 8
    assert history.thinned
    assert torch.equal(stored(history), given_grads(8)[[0, 3, 6]])


@pytest.mark.parametrize("disk", [False, True])
def test_space_is_kept_by_half_precision_first_and_thinning_then(tmp_path: Path, disk: bool) -> None:
    run = Run(given_grads(40, dtype=torch.float32))
    half = 2 * SHAPE[0] * SHAPE[1] + 8
    history = run.attach(path=tmp_path / "h" if disk else None, space=6 * half)
    run.train(0, 3)
    assert torch.equal(stored(history), run.grads[:3])
    with pytest.warns(UserWarning, match=rf"its space of {6 * half} bytes: gradients are kept in float16"):
        run.train(3, 6)
    assert list(history.steps) == [1, 2, 3, 4, 5, 6]
    assert 0 < float((stored(history) - run.grads[:6]).abs().max()) < 1e-3 * float(run.grads.abs().max())
    with pytest.warns(UserWarning, match="one step in 2 is kept"):
        run.train(6, 7)
    assert list(history.steps) == [1, 3, 5, 7]
    with pytest.warns(UserWarning, match="error bars"):
        run.train(7, 40)
    assert history.every == 8
    assert list(history.steps) == [1, 9, 17, 25, 33]
    assert history.total_steps == 40
    assert torch.allclose(stored(history), run.grads[::8], atol=2e-3)
    if disk:
        files = list((tmp_path / "h").glob("*.bin"))
        assert sorted(file.name.partition(".")[0] for file in files) == ["0", "checksums", "steps"]
        assert sum(file.stat().st_size for file in files if file.name.startswith("0")) <= 6 * half
        opened = ks.GradientHistory.open(tmp_path / "h")
        assert opened.steps == history.steps
        assert opened.every == 8
        assert torch.equal(stored(opened), stored(history))


# ---------------------------------------------------------------------- measuring


@pytest.mark.parametrize("beta", [None, 0.9, 0.0])
@pytest.mark.parametrize("disk", [False, True])
def test_adagrads_matrix_at_several_steps_is_the_dense_one(
    tmp_path: Path, disk: bool, beta: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kronscope.gradients import history as module

    # several chunks, so that carrying on from step to step crosses their borders
    monkeypatch.setattr(module, "_CHUNK_BYTES", 4 * 20 * 4)
    grads = given_grads(14) * torch.linspace(3, 1, 14, dtype=torch.float64).view(-1, 1, 1)
    history = recorded(tmp_path if disk else None, grads)
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
    history = recorded(None, given_grads(6))
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
    history = recorded(None, given_grads(40), every=4)
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
    results = ks.measure_history(recorded(None, given_grads(5)), chosen, at=[2, 4, 5], progress=False)
    assert results.partial
    assert [(row.step, row.approximation) for row in results] == [(2, "shampoo2"), (2, "pressed"), (4, "shampoo2")]


# ---------------------------------------------------------------------- errors


def test_a_gradient_that_is_not_finite_is_named() -> None:
    grads = given_grads(5)
    grads[3, 0, 0] = math.nan
    history = recorded(None, grads)
    (row,) = ks.measure_history(history, ["shampoo2"], at=3, progress=False)
    assert row.cosine > 0
    with pytest.raises(NonFiniteError, match="'weight' at step 4"):
        ks.measure_history(history, ["shampoo2"], at=5, progress=False)


def _attach(**options: Any) -> Callable[[Path], object]:
    return lambda path: Run(given_grads(1)).attach(**options)


def _damage(text: str) -> Callable[[Path], object]:
    def work(path: Path) -> object:
        (path / "history.json").write_text(text)
        return ks.GradientHistory.open(path)

    return work


def _twice(path: Path) -> object:
    Run(given_grads(1)).attach(path=path).close()
    return Run(given_grads(1)).attach(path=path)


def _other_layers(path: Path) -> object:
    Run(given_grads(1)).attach(path=path).close()
    return Run(given_grads(1)).attach(path=path, layers=["weight[0:2]"], resume=True)


def _other_optimizer(path: Path) -> object:
    run = Run(given_grads(1))
    return ks.GradientHistory.attach(torch.optim.SGD([run.model.bias], lr=1.0), run.model, ["weight"])


def _measured(**options: Any) -> Callable[[Path], object]:
    return lambda path: ks.measure_history(recorded(None, given_grads(4), every=2), progress=False, **options)


@pytest.mark.parametrize(
    ("work", "error", "text"),
    [
        (_attach(layers=["wieght"]), LayerError, r"nearest names are: weight"),
        (_attach(layers=["bias"]), LayerError, r"not a matrix"),
        (_other_optimizer, LayerError, r"does not train 'weight'; leave it out"),
        (_attach(every=0), OptionError, r"every must be a whole number of 1 or more, got 0"),
        (_attach(every=1.5), OptionError, r"every must be a whole number, got 1.5"),
        (_attach(every=True), OptionError, r"every must be a whole number, got True"),
        (_attach(space="1MB"), OptionError, r"space in bytes must be a whole number, got '1MB'"),
        (_attach(space=1e9 + 0.5), OptionError, r"space in bytes must be a whole number, got 1000000000.5"),
        (_attach(dtype=torch.bfloat16), OptionError, r"dtype must be float16"),
        (_attach(space=100), OptionError, r"fewer than four records of 48 bytes.*allow more"),
        (_twice, DataError, r"holds a gradient history already; open it"),
        (_other_layers, DataError, r"is of other layers: weight; use another path"),
        (ks.GradientHistory.open, DataError, r"there is no gradient history in"),
        (_damage("{"), DataError, r"damaged"),
        (_damage("[]"), DataError, r"damaged"),
        (_damage(json.dumps({"format": "other", "version": 1})), DataError, r"another version"),
        (_measured(at=9), OptionError, r"at must be whole steps from 1 to 4, got 9"),
        (_measured(at=0), OptionError, r"at must be whole steps from 1 to 4"),
        (_measured(at=[]), OptionError, r"at must be whole steps"),
        (_measured(at="5"), OptionError, r"at must be whole steps from 1 to 4, got '5'"),
        (_measured(at=[1.5]), OptionError, r"at must be whole steps from 1 to 4, got \[1.5\]"),
        (_measured(at=True), OptionError, r"at must be whole steps"),
        (_measured(beta=1.0), OptionError, r"beta must be at least 0 and below 1"),
        (_measured(details=["batch_sizes"]), OptionError, r"details of a history may be"),
        (_measured(layers=["x"]), LayerError, r"'x' is not recorded; there are: weight"),
        (_measured(approximations=["shampo"]), OptionError, r"did you mean"),
        (_measured(approximations=[]), OptionError, r"at least one approximation"),
        (lambda path: ks.measure_history(Run(given_grads(1)).attach()), DataError, r"empty: take optimizer steps"),
    ],
)
def test_errors_say_what_to_do(
    tmp_path: Path, work: Callable[[Path], object], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        work(tmp_path)


def test_a_model_in_the_optimizer_s_place_is_said() -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(OptionError, match=r"an optimizer and a model, in this order; got Linear and SGD"):
        ks.GradientHistory.attach(model, torch.optim.SGD(model.parameters(), 0.1))  # type: ignore[arg-type]
