"""The contract of ``ks.measure`` beside its numbers: names, columns, error bars, invariances, curves."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kronscope as ks
from kronscope.errors import LabelError, MemoryBudgetError, ModelError
from kronscope.testing import oracle
from tests.gradients import zoo
from tests.measures.small import SHAMPOOS, assert_same, cosines_of, measure, mlp

COLUMNS = [
    *("layer", "rows", "cols", "step", "truth", "labels", "batch_size", "approximation"),
    *("cosine", "stderr", "relative_error", "samples", "seconds"),
    *("trace", "norm", "effective_rank"),
]


# ---------------------------------------------------------------------- rows and columns


def test_columns_and_their_types() -> None:
    model, data = mlp()
    frame = measure(model, data, step=7).to_pandas()
    assert list(frame.columns) == COLUMNS
    assert {
        name: frame[name].dtype.kind for name in ("rows", "cols", "step", "batch_size", "samples")
    } == dict.fromkeys(("rows", "cols", "step", "batch_size", "samples"), "i")
    assert all(frame[name].dtype == "float64" for name in ("cosine", "stderr", "relative_error", "seconds"))
    assert frame["layer"].tolist() == ["0.weight"] * 4 + ["2.weight"] * 4
    assert frame["approximation"].tolist() == ["optimal", "shampoo2", "shampoo", "kfac-reduce"] * 2
    assert set(frame["truth"]) == {"gauss_newton"}
    assert set(frame["labels"]) == {"exact"}
    assert set(frame["batch_size"]) == {1}
    assert set(frame["samples"]) == {12}
    assert set(frame["step"]) == {7}
    assert frame["stderr"].isna().all()
    assert ((frame["relative_error"] ** 2 + frame["cosine"] ** 2 - 1).abs() < 1e-12).all()
    assert (frame["seconds"] >= 0).all()


def test_none_takes_every_matrix_as_stored_flattened_from_dimension_one() -> None:
    model = nn.Sequential(nn.Embedding(7, 3), nn.Conv1d(4, 2, 2), nn.Flatten(), nn.LayerNorm(4), nn.Linear(4, 3))
    rows = measure(model.double(), [(torch.randint(0, 7, (6, 4)), torch.randint(0, 3, (6,)))])
    shapes = {row.layer: row.shape for row in rows}
    assert shapes == {"0.weight": (7, 3), "1.weight": (2, 8), "4.weight": (3, 4)}


def test_names_globs_slices_and_stacks() -> None:
    model, data = zoo.SeparateProjections().double(), [(zoo.images(5, 3, 5), torch.randint(0, 3, (5,)))]
    results = measure(model, data, layers=["?.weight", "q.weight[1:3]", "q.weight+k.weight", "head"])
    assert {row.layer: row.shape for row in results} == {
        "q.weight": (4, 5),
        "k.weight": (4, 5),
        "v.weight": (4, 5),
        "q.weight[1:3]": (2, 5),
        "q.weight+k.weight": (8, 5),
        "head.weight": (3, 4),
    }
    assert measure(model, data, layers="q.weight").layers == ("q.weight",)


def test_labels_default_to_the_truths_own() -> None:
    model, data = mlp()
    for truth, labels in (("gauss_newton", "exact"), ("empirical_fisher", "real")):
        own = measure(model, data, truth=truth)
        assert {row.labels for row in own} == {labels}
        assert_same(own, measure(model, data, truth=truth, labels=labels), 0.0)


def test_the_optimal_product_is_fitted_on_the_truth_whatever_the_labels() -> None:
    model, data = mlp()
    best = [measure(model, data, labels=labels, batch_size=size) for labels, size in ((None, 1), ("real", 6))]
    values = [[row.cosine for row in found.select(approximation="optimal")] for found in best]
    assert values[0] == pytest.approx(values[1], abs=1e-12)
    others = [[row.cosine for row in found.select(approximation="shampoo2")] for found in best]
    assert max(abs(a - b) for a, b in zip(*others, strict=True)) > 1e-3


@pytest.mark.parametrize("kind", ["lstm", "transposed"])
def test_where_kfac_does_not_exist_its_cosine_is_nan_and_the_row_says_why(kind: str) -> None:
    model: nn.Module
    if kind == "lstm":
        model, inputs, layer = zoo.Recurrent(nn.LSTM), zoo.images(5, 3, 3), "cell.weight_hh_l0"
    else:
        model = nn.Sequential(nn.ConvTranspose1d(2, 3, 2), nn.Flatten(), nn.Linear(12, 3))
        inputs, layer = zoo.images(5, 2, 3), "0.weight"
    results = measure(model.double(), [(inputs, torch.randint(0, 3, (5,)))], layers=[layer])
    for row in results:
        if row.approximation == "kfac-reduce":
            assert math.isnan(row.cosine)
            assert "whole gradients" in row.note
        else:
            assert 0 < row.cosine <= 1
            assert not row.note
    assert "K-FAC" in str(results)


def test_a_layer_whose_gradients_vanish_says_so() -> None:
    model, data = mlp()
    with torch.no_grad():
        next(model[2].parameters()).zero_()  # type: ignore[index]
    rows = {(row.layer, row.approximation): row for row in measure(model, data, approximations=SHAMPOOS)}
    assert math.isnan(rows["0.weight", "shampoo2"].cosine)
    assert "zero" in rows["0.weight", "shampoo2"].note
    assert rows["2.weight", "shampoo2"].cosine > 0


def test_approximations_may_be_objects() -> None:
    class Half:
        name = "half"
        title = "half of the identity"

        def fit(self, stream: ks.GradientStream) -> ks.Operator:
            return ks.approx.get("identity").fit(stream)

    model, data = mlp()
    found = measure(model, data, layers="0.weight", approximations=[Half(), "identity"])
    assert [row.approximation for row in found] == ["half", "identity"]
    assert found.rows[0].cosine == found.rows[1].cosine


# ---------------------------------------------------------------------- error bars


def test_stderr_is_nan_for_exact_answers_and_a_number_for_estimates() -> None:
    model, data = mlp(24)
    for options, exact in (
        ({}, SHAMPOOS),
        ({"truth": "empirical_fisher"}, SHAMPOOS),
        ({"labels": "real", "batch_size": 4}, SHAMPOOS),
        ({"labels": "sampled"}, ("optimal",)),
        ({"labels": "sampled", "draws": 6}, ("optimal",)),
        ({"population": True}, ()),
        ({"population": True, "labels": "sampled"}, ()),
        ({"estimator": "probes"}, ()),
        ({"max_columns": 1}, SHAMPOOS),  # all columns are no more than an estimate would take
    ):
        results = measure(model, data, approximations=SHAMPOOS, **options)
        for row in results:
            assert math.isnan(row.stderr) == (row.approximation in exact), (options, row)
            if row.approximation not in exact:
                assert 0 < row.stderr < 1
    model, data = mlp(24, classes=20)
    estimated = measure(model, data, approximations=SHAMPOOS, max_columns=1, accuracy=0.5)
    assert all(0 < row.stderr < 1 for row in estimated)


class _Experts(nn.Module):
    """One expert per sample, chosen by its first input; an expert may get no sample at all."""

    def __init__(self, experts: int, *, masked: bool) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(5, 3) for _ in range(experts))
        self.masked = masked

    def forward(self, x: Tensor) -> Tensor:
        chosen = (x[:, 0].abs() * 3).long() % len(self.experts)
        out = x.new_zeros(len(x), 3)
        for place, expert in enumerate(self.experts):
            if self.masked:
                out[chosen == place] = expert(x[chosen == place])
            else:
                out = torch.where((chosen == place)[:, None], expert(x), out)
        return out


def test_experts_that_get_no_sample_of_a_batch_are_measured_like_the_others() -> None:
    model, twin = (_Experts(6, masked=masked).double() for masked in (True, False))
    twin.load_state_dict(model.state_dict())
    _, data = mlp(samples=23)
    kinds = ("optimal", "shampoo2", "soap")
    assert_same(measure(model, data, approximations=kinds), measure(twin, data, approximations=kinds))


def test_the_error_bar_of_few_draws_is_their_spread() -> None:
    """It was up to 15 times too wide when whole samples were left out instead of drawing other labels."""
    torch.manual_seed(0)
    model, cut = mlp(samples=100)
    data = [tuple(torch.cat(part) for part in zip(*cut, strict=True))]  # each batch is a sweep of its own
    kinds = ("shampoo2", "kfac-reduce")
    found = [
        measure(model, data, layers="0.weight", labels="sampled", draws=4, seed=100 * seed, approximations=kinds)
        for seed in range(24)
    ]
    for place in range(len(kinds)):
        cosines = torch.tensor([results.rows[place].cosine for results in found])
        bars = torch.tensor([results.rows[place].stderr for results in found])
        assert 0.7 < float(bars.median() / cosines.std()) < 2


def test_sampled_labels_with_too_few_samples_for_an_error_bar_still_give_the_cosine() -> None:
    model, data = mlp(2)
    row = measure(model, data, layers="0.weight", labels="sampled", approximations=["shampoo2"]).rows[0]
    assert 0 < row.cosine <= 1
    assert math.isnan(row.stderr)
    assert "three" in row.note


def test_the_population_needs_samples() -> None:
    model, data = mlp(2)
    with pytest.raises(ks.errors.DataError, match=r"at least three samples, got 2"):
        measure(model, data, population=True)


def test_sampled_labels_come_near_exact_ones_with_many_draws_and_depend_on_the_seed_only() -> None:
    model, data = mlp(16)
    exact = measure(model, data, approximations=["shampoo2", "shampoo"])
    few, again, other = (
        measure(model, data, labels="sampled", draws=2, seed=seed, approximations=["shampoo2", "shampoo"])
        for seed in (1, 1, 2)
    )
    many = measure(model, data, labels="sampled", draws=400, approximations=["shampoo2", "shampoo"])
    assert cosines_of(few) == cosines_of(again)
    assert cosines_of(few) != cosines_of(other)
    assert_same(exact, many, 0.01)


def test_too_many_columns_fall_back_to_an_estimate_and_say_so() -> None:
    torch.manual_seed(1)
    model, data = mlp(30, classes=40)
    exact = measure(model, data)
    drawn = measure(model, data, max_columns=5, accuracy=0.02)
    # the columns stand for exact labels; labels that are drawn are another fit
    assert {row.labels for row in drawn} == {drawn.settings["labels"]} == {"exact"}
    asked = measure(model, data, max_columns=5, labels="sampled", accuracy=0.02)
    assert {row.labels for row in asked} == {"sampled"}
    assert any("39 exact columns" in note and "is estimated" in note for note in drawn.settings["notes"])
    for one, other in zip(exact, drawn, strict=True):
        assert other.note
        assert 0 < other.stderr < 0.1
        assert abs(one.cosine - other.cosine) < 4 * other.stderr, (one, other)
    assert {row.labels for row in measure(model, data, max_columns=39)} == {"exact"}


def test_more_accuracy_means_more_columns_up_to_all_of_them() -> None:
    model, data = mlp(20, classes=100)
    counts = []
    for accuracy in (0.5, 0.03):
        results = measure(model, data, max_columns=5, accuracy=accuracy, approximations=["shampoo2"])
        words = results.rows[0].note.split("from ")[1].split(" ")
        counts.append(int(words[0]) + int(words[3]))  # "2 exact and 6 random columns"
        assert results.rows[0].stderr <= accuracy
    assert counts[0] == 8 < counts[1] < 99
    row = measure(model, data, max_columns=5, accuracy=1e-5, approximations=["shampoo2"]).rows[0]
    assert math.isnan(row.stderr)
    assert row.cosine == pytest.approx(measure(model, data, approximations=["shampoo2"]).rows[0].cosine, abs=1e-12)


def test_probes_come_near_the_exact_value() -> None:
    model, data = mlp(20)
    exact = cosines_of(measure(model, data))
    for count in (5, 400):
        for row in measure(model, data, estimator=ks.Probes(count)):
            assert abs(row.cosine - exact[row.layer, row.approximation]) < 6 * row.stderr + 1e-9
            if count == 400:
                assert row.cosine == pytest.approx(exact[row.layer, row.approximation], abs=0.06)


# ---------------------------------------------------------------------- invariances


def test_a_tiny_budget_streams_and_gives_the_same() -> None:
    model = nn.Sequential(nn.Conv1d(3, 6, 3), nn.Tanh(), nn.Flatten(), nn.Linear(240, 4)).double()
    inputs, targets = zoo.images(12, 3, 42), torch.randint(0, 4, (12,))
    data = [(inputs[:7], targets[:7]), (inputs[7:], targets[7:])]
    names = ["optimal", "shampoo2", "shampoo", "kfac-reduce", "kfac-expand", "soap", "diagonal"]
    options: dict[str, Any] = {"layers": "0.weight", "approximations": names}
    cached, passes = _passes(lambda: measure(model, data, **options), model)
    streamed, more = _passes(lambda: measure(model, data, memory_budget="60KiB", **options), model)
    # a cached sweep sees the data once; without a cache it is captured again for every contraction
    assert more > 3 * passes
    assert_same(cached, streamed)
    mixed = {**options, "labels": "real", "batch_size": 5}
    assert_same(measure(model, data, **mixed), measure(model, data, memory_budget="60KiB", **mixed))
    bars = {**options, "population": True, "approximations": ["shampoo2", "kfac-reduce"]}
    one, other = (measure(model, data, memory_budget=budget, **bars) for budget in (None, "60KiB"))
    assert_same(one, other)
    assert [row.stderr for row in one] == pytest.approx([row.stderr for row in other], rel=1e-6)


def _passes(work: Callable[[], ks.Results], model: nn.Module) -> tuple[ks.Results, int]:
    calls = [0]

    def count(*_: Any) -> None:
        calls[0] += 1

    handle = model.register_forward_pre_hook(count)
    found = work()
    handle.remove()
    return found, calls[0]


def test_a_budget_below_a_layers_factors_raises_by_name_and_skips_with_a_warning_otherwise() -> None:
    model = nn.Sequential(nn.Linear(40, 3), nn.Linear(3, 3)).double()
    data = [(zoo.images(4, 40), torch.randint(0, 3, (4,)))]
    with pytest.raises(MemoryBudgetError, match=r"0\.weight.*needs .*KiB for its factors.*raise memory_budget"):
        measure(model, data, layers=["0.weight"], memory_budget=20_000)
    with pytest.warns(UserWarning, match=r"skipped: layer '0\.weight'"):
        results = measure(model, data, memory_budget=20_000)
    assert results.layers == ("1.weight",)
    assert any("0.weight" in note for note in results.settings["notes"])
    with pytest.warns(UserWarning, match="skipped"), pytest.raises(MemoryBudgetError, match="no layer fits"):
        measure(model, data, memory_budget=100)


def test_how_the_data_is_cut_into_batches_changes_nothing() -> None:
    model, inputs, targets = zoo.Transformer().double(), zoo.images(11, 3, 5), torch.randint(0, 3, (11,))
    for options in ({}, {"labels": "sampled", "draws": 2}, {"labels": "real", "batch_size": 3}, {"population": True}):
        found = [
            measure(
                model,
                list(zip(inputs.split(size), targets.split(size), strict=True)),
                layers=["blocks.0.qkv.weight[0:4]", "head"],
                approximations=("optimal", "shampoo2", "kfac-expand"),
                **options,
            )
            for size in (1, 4, 11)
        ]
        assert_same(found[0], found[1])
        assert_same(found[0], found[2])


def test_both_back_ends_agree() -> None:
    model, data = mlp()
    assert_same(
        measure(model, data, backend="hooks", approximations=SHAMPOOS),
        measure(model, data, backend="func", approximations=SHAMPOOS),
    )


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05), (torch.float16, 0.01)])
def test_models_of_lower_precision(dtype: torch.dtype, tolerance: float) -> None:
    model, data = mlp(20)
    exact = measure(model, data)
    narrow = [(x.to(dtype), y) for x, y in data]
    found = measure(model.to(dtype), narrow)
    assert_same(exact, found, tolerance)
    # no better than it can be: the numbers differ, so the model was not widened unseen
    assert cosines_of(exact) != cosines_of(found)


def test_max_samples_takes_the_first() -> None:
    model, data = mlp(12)
    assert_same(measure(model, data, max_samples=7), measure(model, [data[0], (data[1][0][:2], data[1][1][:2])]))
    assert {row.samples for row in measure(model, data, max_samples=7)} == {7}


# ---------------------------------------------------------------------- curves


def test_the_exponent_curve_passes_through_shampoo_and_its_square() -> None:
    model, data = mlp()
    for options in ({}, {"labels": "real"}, {"labels": "real", "batch_size": 5}, {"labels": "exact", "batch_size": 5}):
        results = measure(model, data, layers="0.weight", details=["exponents"], **options)
        (curve,) = results.details
        values = dict(zip(curve.series("exponent"), curve.series("cosine"), strict=True))
        cosines = cosines_of(results)
        assert values[1.0] == pytest.approx(cosines["0.weight", "shampoo2"], abs=1e-12), options
        assert values[0.5] == pytest.approx(cosines["0.weight", "shampoo"], abs=1e-12), options
        assert curve.batch_size == options.get("batch_size", 1)


def test_the_batch_size_curve_passes_through_the_rows() -> None:
    model, data = mlp()
    for replacement in (True, False):
        options: dict[str, Any] = {"layers": "0.weight", "labels": "real", "replacement": replacement}
        (curve,) = measure(model, data, details=["batch_sizes"], **options).details
        sizes = [int(size) for size in curve.series("batch_size")]
        assert sizes == [1, 2, 4, 8, 12]
        for size, *values in zip(sizes, curve.series("shampoo2"), curve.series("shampoo"), strict=True):
            cosines = cosines_of(measure(model, data, batch_size=size, **options))
            expected = [cosines["0.weight", name] for name in ("shampoo2", "shampoo")]
            assert values == pytest.approx(expected, abs=1e-12)
        assert not curve.series("optimal")
        assert not curve.series("kfac-reduce")


def test_the_spectrum_is_that_of_the_rearranged_matrix() -> None:
    model, data = mlp()
    (curve,) = measure(model, data, layers="0.weight", details=["spectrum"]).details
    inputs, targets = torch.cat([x for x, _ in data]), torch.cat([y for _, y in data])
    H = oracle.gauss_newton(model, nn.CrossEntropyLoss(), inputs, targets, "0.weight")
    u, sigma, vh = torch.linalg.svd(oracle.rearrange(H, (4, 5)))
    assert curve.series("sigma") == pytest.approx(sigma[:8].tolist(), rel=1e-5)
    assert curve.number("ratio") == pytest.approx(float(sigma[0] / sigma.norm()), abs=1e-9)
    left, right = oracle.left(H, (4, 5)).flatten(), oracle.right(H, (4, 5)).flatten()
    assert curve.number("left") == pytest.approx(abs(float(left @ u[:, 0] / left.norm())), abs=1e-9)
    assert curve.number("right") == pytest.approx(abs(float(right @ vh[0] / right.norm())), abs=1e-9)
    alphas = [abs(float(torch.trace(u[:, i].reshape(4, 4)))) for i in range(3)]
    assert curve.series("alpha_left")[:3] == pytest.approx(alphas, abs=1e-4)


# ---------------------------------------------------------------------- models of other habits


def test_models_of_dictionaries_and_output_objects() -> None:
    class Wordy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(5, 3)

        def forward(self, features: Tensor, scale: float = 1.0) -> Any:
            return SimpleNamespace(logits=self.inner(features) * scale, hidden=features)

    model, (x, y) = Wordy().double(), (zoo.images(6, 5), torch.randint(0, 3, (6,)))
    plain = measure(model.inner, [(x, y)], layers="weight")
    named = [row.cosine for row in measure(model, [({"features": x}, y)])]
    assert named == pytest.approx([row.cosine for row in plain], abs=1e-12)
    found = measure(model, [({"z": x, "note": "kept"}, y)], forward=lambda m, inputs: m(inputs["z"], scale=2.0).logits)
    doubled = measure(nn.Sequential(model.inner, _Double()), [(x, y)])
    assert [row.cosine for row in found] == pytest.approx([row.cosine for row in doubled], abs=1e-12)
    assert [row.cosine for row in found] != pytest.approx(named, abs=1e-6)
    with pytest.raises(ModelError, match=r"no logits.*forward="):
        measure(nn.LSTM(5, 3).double(), [(x[:, None], y)])


class _Double(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def test_the_result_says_that_a_model_in_training_mode_was_measured_in_eval_mode() -> None:
    model, data = mlp()
    assert "training mode" in measure(model.train(), data).settings["measured in"]
    assert "training mode" not in measure(model.eval(), data).settings["measured in"]


@pytest.mark.parametrize("sureness", [100.0, 300.0, 600.0])
def test_a_float32_model_that_is_sure_of_most_samples_is_measured(sureness: float) -> None:
    """Their gradients underflow: that was taken for a model that computes something else than before."""
    torch.manual_seed(0)
    inputs, targets = torch.randn(60, 6), torch.randint(3, (60,))
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), last := nn.Linear(8, 3))
    with torch.no_grad():
        last.weight.mul_(sureness)
    single = ks.measure(model, nn.CrossEntropyLoss(), [(inputs, targets)], progress=False)
    double = ks.measure(model.double(), nn.CrossEntropyLoss(), [(inputs.double(), targets)], progress=False)
    for one, two in zip(single, double, strict=True):
        assert one.cosine == pytest.approx(two.cosine, abs=1e-4), one


def test_several_labels_a_sample_are_noted_once() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3))
    batches = [(torch.randn(4, 4), torch.tensor([1.0, 0.0, 1.0]).expand(4, 3)) for _ in range(3)]
    with pytest.warns(UserWarning, match="several labels.*--loss bce") as caught:
        results = ks.measure(model, nn.CrossEntropyLoss(), batches, progress=False)
    assert len(caught) == 1
    assert any("BCEWithLogitsLoss" in note for note in results.settings["notes"])


def test_targets_that_do_not_fit_are_refused_in_words_whatever_their_shape() -> None:
    with pytest.raises(LabelError, match="integers"):
        ks.measure(nn.Linear(4, 3), nn.CrossEntropyLoss(), [(torch.randn(4, 4), torch.ones(4))], progress=False)
