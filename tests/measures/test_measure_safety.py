"""``ks.measure`` leaves no trace, ends well when interrupted, and refuses in words what it cannot do."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import kronscope as ks
from kronscope.errors import DataError, LayerError, ModelError, OptionError, ResultsError
from kronscope.measures import batch_stream
from kronscope.measures.progress import Bar
from tests.gradients import zoo
from tests.gradients.test_guard import Snapshot
from tests.measures.small import Data, cosines_of, measure, mlp

# ---------------------------------------------------------------------- leaving no trace


def _lively() -> tuple[nn.Module, DataLoader[Any]]:
    model = nn.Sequential(nn.Conv1d(3, 4, 2), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Flatten(), nn.Linear(12, 3))
    model = model.double().train()
    model[1].eval()
    model[4].weight.requires_grad_(False)
    model[0].weight.grad = torch.ones_like(model[0].weight)  # type: ignore[arg-type]
    next(model[0].parameters()).register_hook(lambda grad: 2 * grad)
    model[1].register_forward_hook(lambda *_: None)
    data = TensorDataset(zoo.images(10, 3, 4), torch.randint(0, 3, (10,)))
    return model, DataLoader(data, batch_size=4, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("options", [{}, {"labels": "sampled"}, {"population": True}, {"memory_budget": "64KiB"}])
def test_nothing_changes(options: dict[str, Any]) -> None:
    model, loader = _lively()
    before = Snapshot(model, loader)
    measure(model, loader, approximations=ks.approx.names(), details=["spectrum", "exponents"], **options)
    before.check(model, loader)


@pytest.mark.parametrize("calls", [1, 3, 6, 9, 14])
@pytest.mark.parametrize("budget", [None, "64KiB"])
def test_nothing_changes_when_it_raises_in_the_middle(calls: int, budget: str | None) -> None:
    model, loader = _lively()
    before, total = Snapshot(model, loader), [0]

    def forward(model: nn.Module, x: Tensor) -> Tensor:
        total[0] += 1
        torch.rand(1)
        out: Tensor = model(x)
        if total[0] == calls:
            raise ZeroDivisionError
        return out

    with pytest.raises(ZeroDivisionError):
        measure(model, loader, forward=forward, memory_budget=budget)
    before.check(model, loader)


# ---------------------------------------------------------------------- Ctrl-C


class _Interrupting:
    """Data on which Ctrl-C is pressed at the n-th sweep."""

    def __init__(self, data: Data, sweep: int) -> None:
        self.data, self.sweep, self.sweeps = data, sweep, 0

    def __iter__(self) -> Iterator[Any]:
        self.sweeps += 1
        yield self.data[0]
        if self.sweeps == self.sweep:
            raise KeyboardInterrupt
        yield from self.data[1:]


@pytest.mark.parametrize("sweep", [1, 2])
def test_ctrl_c_while_reading_the_data_returns_what_is_there(sweep: int) -> None:
    model, data = mlp()
    before = Snapshot(model)
    results = measure(model, _Interrupting(data, sweep))
    assert results.partial
    assert len(results) == 0
    before.check(model)


def test_ctrl_c_while_measuring_keeps_the_rows_that_are_done() -> None:
    class Pressed:
        name, title, calls = "pressed", "pressed", 0

        def fit(self, stream: ks.GradientStream) -> ks.Operator:
            self.calls += 1
            if self.calls == 2:
                raise KeyboardInterrupt
            return ks.approx.get("identity").fit(stream)

    model, data = mlp()
    results = measure(model, data, approximations=["shampoo2", Pressed(), "shampoo"])
    assert results.partial
    assert [(row.layer, row.approximation) for row in results] == [
        ("0.weight", "shampoo2"),
        ("0.weight", "pressed"),
        ("0.weight", "shampoo"),
        ("2.weight", "shampoo2"),
    ]
    whole = cosines_of(measure(model, data))
    assert results.rows[3].cosine == whole["2.weight", "shampoo2"]
    assert "partial" in str(results).lower() or "interrupted" in str(results).lower()


# ---------------------------------------------------------------------- errors


def _refused(kind: str) -> tuple[nn.Module, Any, dict[str, Any]]:
    model, data = mlp()
    x, y = data[0]
    if kind == "unreached":
        return (
            nn.ModuleDict({"used": model, "spare": nn.Linear(2, 2).double()}),
            data,
            {
                "layers": ["spare.weight"],
                "forward": lambda m, inputs: m["used"][2](m["used"][1](m["used"][0](inputs))),
            },
        )
    if kind == "non-finite activations":
        return model, [data[0], (torch.full_like(x, math.nan), y)], {}
    loader = DataLoader(TensorDataset(x, y), batch_size=2, shuffle=True)
    return {
        "unknown": (model, data, {"layers": ["0.wieght"]}),
        "one-dimensional": (model, data, {"layers": ["0.bias"]}),
        "one-shot": (model, iter(data), {}),
        "shuffling": (model, loader, {}),
        "label range": (model, [data[0], (x, y + 3)], {}),
        "empty": (model, [], {}),
        "no samples": (model, [(x[:0], y[:0])], {}),
        "not pairs": (model, [x], {}),
        "mixing": (nn.Sequential(_Mixing(), model), data, {}),
    }[kind]


class _Mixing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


@pytest.mark.parametrize(
    ("kind", "error", "text"),
    [
        ("unknown", ks.errors.LayerError, r"0\.wieght.*nearest names are: .*0\.weight"),
        ("one-dimensional", ks.errors.LayerError, r"0\.bias.*is not a matrix"),
        ("unreached", ks.errors.LayerError, r"does not depend on 'spare\.weight'.*Leave it out.*forward="),
        ("non-finite activations", ks.errors.NonFiniteError, r"NaN or infinity.*check these samples"),
        ("one-shot", ks.errors.DataError, r"only once.*list\(iterator\)"),
        ("shuffling", ks.errors.DataError, r"shuffles.*shuffle=False"),
        ("label range", ks.errors.LabelError, r"0\.\.2.*got [345]"),
        ("empty", ks.errors.DataError, r"empty.*at least one batch"),
        ("no samples", ks.errors.DataError, r"empty.*at least one batch"),
        ("not pairs", ks.errors.DataError, r"must be a pair.*wrap"),
        ("mixing", ModelError, r"mix"),
    ],
)
def test_errors_say_what_to_do(kind: str, error: type[Exception], text: str) -> None:
    model, data, options = _refused(kind)
    before = torch.get_rng_state()
    with pytest.raises(error, match=text):
        measure(model, data, **options)
    assert torch.equal(before, torch.get_rng_state())
    assert issubclass(error, ks.errors.KronscopeError)


def test_data_that_changes_between_sweeps_is_refused() -> None:
    class Fresh:
        def __iter__(self) -> Iterator[Any]:
            generator = torch.Generator().manual_seed(id(self) + len(seen))
            seen.append(1)
            yield torch.randn(4, 5, dtype=torch.float64, generator=generator), torch.zeros(4, dtype=torch.long)

    seen: list[int] = []
    model, _ = mlp()
    with pytest.raises(ks.errors.DataError, match=r"differs from what it was.*list\(loader\)"):
        measure(model, Fresh())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"truth": "hessian"}, r"truth must be one of .*gauss_newton.*'hessian'"),
        ({"labels": "true"}, r"labels must be one of .*exact.*'true'"),
        ({"batch_size": 0}, r"batch_size must be a whole number of 1 or more, got 0"),
        ({"batch_size": 2.0}, r"batch_size must be a whole number"),
        ({"draws": 0}, r"draws must be a whole number"),
        ({"max_samples": 0}, r"max_samples must be a whole number of 1 or more"),
        ({"estimator": "guess"}, r"estimator must be 'exact', 'probes'"),
        ({"estimator": "probes", "population": True}, r"population=True needs the exact estimator"),
        ({"details": ["everything"]}, r"details may be"),
        ({"accuracy": 0.0}, r"accuracy must be a positive number"),
        ({"approximations": ["shampo"]}, r"no approximation 'shampo'; did you mean.*'shampoo"),
        ({"approximations": []}, r"at least one approximation"),
        ({"memory_budget": "lots"}, r"memory_budget must be bytes or a text like '2GiB'"),
        ({"memory_budget": -1}, r"memory_budget must be positive"),
        ({"backend": "magic"}, r"backend must be one of"),
        ({"labels": "real", "batch_size": 100, "replacement": False}, r"100 cannot be drawn from 12 samples"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], text: str) -> None:
    model, data = mlp()
    with pytest.raises(OptionError, match=text):
        measure(model, data, **options)


@pytest.mark.parametrize(
    "loss",
    [
        nn.L1Loss(),
        nn.CrossEntropyLoss(weight=-torch.ones(3)),
        nn.CrossEntropyLoss(weight=torch.ones(17)),
        nn.CrossEntropyLoss(label_smoothing=1.1),
        lambda outputs, targets: outputs.cos().sum(),
        nn.CrossEntropyLoss(reduction="none"),
    ],
)
def test_losses_that_cannot_be_honoured_are_refused(loss: Any) -> None:
    model, data = mlp()
    with pytest.raises(OptionError):
        measure(model, data, loss)


@pytest.mark.parametrize(
    "option", ["seed", "step", "draws", "max_samples", "spectrum_rank", "max_columns", "batch_size"]
)
@pytest.mark.parametrize("value", [1.5, "a", True])
def test_numbers_that_are_not_whole_are_refused_before_any_work(option: str, value: Any) -> None:
    model, data = mlp()
    calls = [0]
    model.register_forward_hook(lambda *_: calls.append(1))
    with pytest.raises(OptionError, match=f"{option} must be a whole number"):
        measure(model, data, **{option: value})
    assert calls == [0]


@pytest.mark.parametrize("option", ["draws", "max_samples", "spectrum_rank", "max_columns", "batch_size"])
def test_counts_below_one_are_refused(option: str) -> None:
    model, data = mlp()
    with pytest.raises(OptionError, match=f"{option} must be a whole number of 1 or more, got 0"):
        measure(model, data, None, **{option: 0})


def test_numbers_of_numpy_are_whole_numbers_too() -> None:
    model, data = mlp()
    found = measure(model, data, step=np.int64(7), seed=np.int32(3), batch_size=np.int64(2), labels="real")
    assert {(type(row.step), row.step, row.batch_size) for row in found} == {(int, 7, 2)}


def test_what_is_no_approximation_layer_model_or_batch_is_refused_with_advice() -> None:
    model, data = mlp()
    with pytest.raises(OptionError, match=r"write Shampoo\(\)"):
        measure(model, data, approximations=[ks.approx.Shampoo])
    with pytest.raises(LayerError, match="None for every matrix, got 0"):
        measure(model, data, layers=0)
    with pytest.raises(OptionError, match=r"must be a torch\.nn\.Module, got OrderedDict"):
        measure(model.state_dict(), data)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="meta device"):
        measure(nn.Linear(5, 3, device="meta"), data)
    with torch.inference_mode():
        frozen = nn.Linear(5, 3).double()
    with pytest.raises(ModelError, match="inference mode"):
        measure(frozen, data)
    with pytest.raises(DataError, match=r"single sample.*DataLoader\(dataset, batch_size"):
        measure(model, TensorDataset(torch.randn(6, 5), torch.randint(3, (6,))))
    with pytest.raises(ResultsError, match=r"a\.merge\(b, c\)"):
        measure(model, data).merge([measure(model, data)])  # type: ignore[arg-type]


def test_a_parameter_whose_name_looks_like_a_stack_is_found_by_name() -> None:
    model, data = mlp()
    model.register_parameter("a+b", nn.Parameter(torch.randn(3, 4, dtype=torch.float64)))

    def forward(model: nn.Module, x: Tensor) -> Tensor:
        return torch.tanh(model[0](x)) @ dict(model.named_parameters())["a+b"].T  # type: ignore[index]

    found = measure(model, data, layers=["a+b"], forward=forward)
    assert found.layers == ("a+b",)


def test_warnings_point_at_the_line_that_called() -> None:
    model, data = mlp()
    model.register_parameter("unused", nn.Parameter(torch.randn(3, 4, dtype=torch.float64)))
    with pytest.warns(UserWarning, match="left out") as caught:
        ks.measure(model, nn.CrossEntropyLoss(), data, progress=False)
    assert caught[0].filename == __file__


def test_verbose_prints_how_each_layer_is_captured(capfd: pytest.CaptureFixture[str]) -> None:
    model, data = mlp()
    results = measure(model, data, verbose=True)
    printed = capfd.readouterr().err
    for name in ("0.weight (4x5): hooks", "2.weight (3x4): hooks"):
        assert name in printed
    assert results.settings["capture"]["0.weight"] in printed


def test_the_batch_lemmas_closed_form_is_the_expectation_over_all_batches() -> None:
    G = torch.randn(4, 2, 3, dtype=torch.float64)
    stream = ks.GradientStream.from_tensors(G)
    for replacement, size in ((True, 3), (False, 3), (False, 4)):
        pool = (
            torch.cartesian_prod(*[torch.arange(4)] * size)
            if replacement
            else torch.combinations(torch.arange(4), size)
        )
        means = G[pool].mean(1).flatten(1)
        expected = size * means.T @ means / len(means)
        found = ks.SecondMoment(batch_stream(stream, size, replacement=replacement)).to_dense()
        assert torch.allclose(found, expected, atol=1e-13)


def test_the_progress_bar_ends_where_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []
    ended = Bar.__exit__

    def at_the_end(bar: Bar, *error: Any) -> None:
        seen.extend(task.completed - (task.total or 0) for task in bar._progress.tasks)
        ended(bar, *error)

    monkeypatch.setattr(Bar, "__exit__", at_the_end)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    data = [(torch.randn(8, 4), torch.randint(2, (8,)))]
    ks.measure(model, nn.CrossEntropyLoss(), data, details=("exponents",))
    assert seen == [0]
