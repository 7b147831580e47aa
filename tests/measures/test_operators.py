"""One layer's matrix by itself, and operators that are there already, beside fits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kronscope as ks
from kronscope.errors import LayerError, OptionError
from kronscope.kron import Diagonal, KroneckerProduct
from kronscope.measures.estimates import RandomColumns
from kronscope.testing import oracle

LOSS = nn.CrossEntropyLoss()


def problem(classes: int = 4) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, classes)).double()
    return model, [(torch.randn(16, 6, dtype=torch.float64), torch.randint(classes, (16,)))]


def trained(make: Any, steps: int = 3) -> tuple[nn.Module, list[tuple[Tensor, Tensor]], Any]:
    model, data = problem()
    optimizer = make(model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        LOSS(model(data[0][0]), data[0][1]).backward()
        optimizer.step()
    return model, data, optimizer


@pytest.mark.parametrize("truth", ["gauss_newton", "empirical_fisher"])
def test_one_layers_matrix_is_the_dense_one(truth: str) -> None:
    model, data = problem()
    H = ks.second_moment(model, LOSS, data, layer="0.weight", truth=truth, progress=False)
    if truth == "gauss_newton":
        expected = oracle.gauss_newton(model, LOSS, *data[0], ("0.weight",))
    else:
        expected = oracle.empirical_fisher_atoms(model, LOSS, *data[0], ("0.weight",)).matrix()
    torch.testing.assert_close(H.to_dense(), expected, rtol=1e-10, atol=1e-14)
    assert H.norm() == pytest.approx(float(expected.norm()))
    assert H.trace() == pytest.approx(float(expected.trace()))


def test_a_pattern_for_several_layers_is_no_layer() -> None:
    model, data = problem()
    with pytest.raises(LayerError, match=r"one layer is wanted, but '\*\.weight' stands for 0\.weight, 2\.weight"):
        ks.second_moment(model, LOSS, data, layer="*.weight", progress=False)


def test_too_many_columns_are_estimated_with_a_warning_and_an_unbiased_norm() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 600).double()
    data = [(torch.randn(8, 3, dtype=torch.float64), torch.randint(600, (8,)))]
    exact = ks.second_moment(model, LOSS, data, layer="weight", max_columns=599, progress=False)
    with pytest.warns(UserWarning, match="599 exact columns per sample are too many: estimated from"):
        some = ks.second_moment(model, LOSS, data, layer="weight", max_columns=10, progress=False)
    assert some.norm() == pytest.approx(exact.norm(), rel=0.05)
    assert some.norm_squared() == pytest.approx(RandomColumns(some.stream).square, rel=1e-10)


def test_columns_that_fit_into_an_estimate_are_all_taken_without_a_warning() -> None:
    model, data = nn.Linear(3, 40), [(torch.randn(4, 3), torch.randint(40, (4,)))]
    # warnings are errors here
    some, exact = (ks.second_moment(model, LOSS, data, "weight", max_columns=n, progress=False) for n in (1, None))
    assert some.norm() == exact.norm()


@pytest.mark.parametrize("make", [ks.Shampoo, ks.SOAP, ks.KLShampoo])
def test_live_operators_of_ours_are_rows_beside_the_fits(make: Any) -> None:
    model, data, optimizer = trained(lambda parameters: make(parameters, lr=1e-3))
    results = ks.measure(model, LOSS, data, operators={"live": optimizer}, progress=False)
    for name in ("0.weight", "2.weight"):
        H = ks.second_moment(model, LOSS, data, layer=name, progress=False)
        (row,) = results.select(layer=name, approximation="live")
        assert row.cosine == pytest.approx(ks.cosine(H, optimizer.operator(model.get_parameter(name))), abs=1e-10)
        assert math.isnan(row.stderr)
    assert {row.approximation for row in results} == {"optimal", "shampoo2", "shampoo", "kfac-reduce", "live"}


@pytest.mark.parametrize(
    ("make", "moment"),
    [
        (torch.optim.Adam, "exp_avg_sq"),
        (torch.optim.RMSprop, "square_avg"),
        (torch.optim.Adagrad, "sum"),
    ],
)
def test_second_moments_of_torchs_optimizers_are_diagonals(make: Any, moment: str) -> None:
    model, data, optimizer = trained(make)
    options: dict[str, Any] = {"approximations": ["identity"], "operators": {"live": optimizer}, "progress": False}
    _, row = ks.measure(model, LOSS, data, "0.weight", **options)
    H = ks.second_moment(model, LOSS, data, layer="0.weight", progress=False)
    state = optimizer.state[model.get_parameter("0.weight")][moment]
    assert row.cosine == pytest.approx(ks.cosine(H, Diagonal(state)), abs=1e-12)


def test_operators_by_layer_with_every_kind_of_error_bar() -> None:
    model, data = problem(40)
    mine = KroneckerProduct(torch.eye(5, dtype=torch.float64), torch.diag(torch.arange(1.0, 7.0, dtype=torch.float64)))
    options: dict[str, Any] = {
        "approximations": ["identity"],
        "operators": {"mine": {"0.weight": mine}},
        "progress": False,
    }
    _, exact = ks.measure(model, LOSS, data, "0.weight", **options)
    H = ks.second_moment(model, LOSS, data, layer="0.weight", progress=False)
    assert exact.cosine == pytest.approx(ks.cosine(H, mine), abs=1e-12)
    others: list[dict[str, Any]] = [{"max_columns": 10, "accuracy": 0.2}, {"population": True}]
    for other in others:
        _, row = ks.measure(model, LOSS, data, "0.weight", **options, **other)
        assert 0 < row.stderr < 0.2
        if "max_columns" in other:
            assert abs(row.cosine - exact.cosine) <= 3 * row.stderr


def test_what_an_optimizer_does_not_have_is_nan_with_the_reason() -> None:
    model, data = problem()
    new = torch.optim.Adam(model.parameters())
    plain = torch.optim.SGD([model.get_parameter("2.weight")], lr=0.1, momentum=0.9)
    ours = ks.Shampoo(model.parameters(), lr=1e-3)
    operators = {"new": new, "plain": plain, "ours": ours}
    results = ks.measure(model, LOSS, data, approximations=["shampoo2"], operators=operators, progress=False)
    notes = {(row.layer, row.approximation): row.note for row in results if math.isnan(row.cosine)}
    assert "needs a step first" in notes["0.weight", "new"]
    assert "not among the parameters of plain" in notes["0.weight", "plain"]
    assert notes["0.weight", "ours"]
    assert not math.isnan(results.select(approximation="shampoo2").rows[0].cosine)
    part = ks.measure(model, LOSS, data, "0.weight[0:2]", operators={"new": new}, progress=False)
    assert "needs a step first" in part.rows[-1].note


@pytest.mark.parametrize(
    ("operators", "message"),
    [
        ([1], "operators must map names"),
        ({"x": 3}, r"operators\['x'\] must be an optimizer or map layers to operators, got int"),
        ({"shampoo2": {}}, "'shampoo2', and so is an approximation"),
        ({"x": {"nowhere": Diagonal(torch.ones(5, 6))}}, "names 'nowhere', but these layers are measured"),
    ],
)
def test_wrong_operators_are_refused_before_any_work(operators: Any, message: str) -> None:
    model, data = problem()
    with pytest.raises(OptionError, match=message):
        ks.measure(model, LOSS, data, operators=operators, progress=False)


@pytest.mark.parametrize("make", [ks.Shampoo, ks.SOAP, torch.optim.Adam])
@pytest.mark.parametrize("layer", ["0.weight[1:4]", "0.weight[:, 2:5]", "0.weight[0:2, :3]+0.weight[3:5, 3:6]"])
def test_live_operators_of_parts_are_parts_of_the_whole_ones(make: Any, layer: str) -> None:
    model, data, optimizer = trained(lambda parameters: make(parameters, lr=1e-3))
    results = ks.measure(
        model, LOSS, data, layers=layer, operators={"live": optimizer}, approximations=["shampoo2"], progress=False
    )
    row = results.select(approximation="live").rows[0]
    weight = model.get_parameter("0.weight")
    if isinstance(optimizer, torch.optim.Adam):
        whole = torch.diag(optimizer.state[weight]["exp_avg_sq"].flatten())
    else:
        whole = optimizer.operator(weight).to_dense()
    places = torch.arange(30).view(5, 6)
    parts = {
        "0.weight[1:4]": [places[1:4]],
        "0.weight[:, 2:5]": [places[:, 2:5]],
        "0.weight[0:2, :3]+0.weight[3:5, 3:6]": [places[:2, :3], places[3:, 3:]],
    }[layer]
    blocks = [whole[part.flatten()[:, None], part.flatten()] for part in parts]
    K = torch.block_diag(*blocks)
    index = torch.cat(parts).flatten()
    H = oracle.gauss_newton(model, LOSS, *data[0], "0.weight")[index[:, None], index]
    assert row.cosine == pytest.approx(oracle.cosine(H, K), abs=1e-6)
