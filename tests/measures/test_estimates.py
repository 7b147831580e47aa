"""Cosines with a matrix that is estimated from random columns, against the exact ones."""

from __future__ import annotations

import copy
import functools
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kronscope as ks
from kronscope import approx
from kronscope.gradients import GradientStream, Recorder, resolve_layers
from kronscope.gradients.atoms import FactoredAtoms
from kronscope.gradients.losses import Draws, read_loss
from kronscope.measures import estimates, influence
from kronscope.measures.estimates import RandomColumns, _optima, checked

FAMILY = ("optimal", "shampoo2", "shampoo", "kfac-reduce", "kfac-expand", "one-sided", "identity", "diagonal", "soap")


class Tokens(nn.Module):
    """A classifier of each of several tokens."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(4, 6), nn.Linear(6, classes)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.inner(inputs))
        outputs: Tensor = self.head(hidden + hidden.mean(1, keepdim=True)).transpose(1, 2)
        return outputs


def recorder(tokens: int, classes: int, scale: float, samples: int = 10) -> Recorder:
    torch.manual_seed(1)
    model = Tokens(classes).double()
    with torch.no_grad():
        model.head.weight.mul_(scale)
    data = [(torch.randn(samples, tokens, 4, dtype=torch.float64), torch.randint(classes, (samples, tokens)))]
    return Recorder(model, nn.CrossEntropyLoss(), data, resolve_layers(model, ["inner.weight"]))


def exact_cosines(source: Recorder) -> dict[str, float]:
    stream = source.streams("exact")["inner.weight"]
    return {name: ks.cosine(ks.SecondMoment(stream), approx.get(name).fit(stream)) for name in FAMILY}


# --- columns ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fixed", [0, 2, 5])
@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), nn.CrossEntropyLoss(reduction="sum", ignore_index=1)])
def test_fixed_and_random_columns_add_up_to_the_hessian_in_expectation(loss: nn.Module, fixed: int) -> None:
    torch.manual_seed(0)
    outputs, targets = 3 * torch.randn(2, 3, 2, dtype=torch.float64), torch.tensor([[0, 1], [2, 2]])
    read = read_loss(loss)
    exact = torch.stack(list(read.exact(outputs, targets))).flatten(2)
    hessian = torch.einsum("csx,csy->sxy", exact, exact)

    class Every(Draws):
        """All sign patterns of three classes and two tokens, each once."""

        def signs(self, number: int, size: int, dtype: torch.dtype = torch.float64) -> Tensor:
            patterns = list(itertools.product((-1.0, 1.0), repeat=size))
            return torch.tensor(patterns[number], dtype=torch.float64).expand(2, -1).clone()

    mixed = torch.stack(list(read.mixed(outputs, targets, Every(0, torch.arange(2), 64, fixed)))).flatten(2)
    torch.testing.assert_close(torch.einsum("csx,csy->sxy", mixed, mixed), hessian, rtol=1e-12, atol=1e-14)
    sizes = read.column_sizes(outputs, targets)
    torch.testing.assert_close(sizes.sum(1), hessian.diagonal(dim1=1, dim2=2).sum(1), rtol=1e-12, atol=1e-14)
    # the fixed ones are the largest
    lengths = mixed[:fixed].square().sum(2).T
    torch.testing.assert_close(lengths, sizes.topk(fixed, dim=1).values, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("loss", [nn.MSELoss(), nn.BCEWithLogitsLoss(reduction="sum")])
def test_losses_of_single_outputs_have_mixed_columns_too(loss: nn.Module) -> None:
    outputs, targets = torch.randn(3, 5, dtype=torch.float64), torch.rand(3, 5, dtype=torch.float64)
    read = read_loss(loss)
    exact = torch.stack(list(read.exact(outputs, targets)))
    every = torch.stack(list(read.mixed(outputs, targets, Draws(0, torch.arange(3), 4000, 2))))
    hessian = torch.einsum("csx,csy->sxy", exact, exact)
    found = torch.einsum("csx,csy->sxy", every, every)
    # off the diagonal 4000 signs leave 1/√4000 of the entries' size
    torch.testing.assert_close(found, hessian, rtol=0, atol=0.1 * float(hessian.max()))
    torch.testing.assert_close(found.diagonal(dim1=1, dim2=2), hessian.diagonal(dim1=1, dim2=2))


def test_random_columns_depend_on_seed_and_sample_only() -> None:
    both = Draws(7, torch.tensor([3, 9])).signs(2, 13)
    assert torch.equal(both[1:], Draws(7, torch.tensor([9])).signs(2, 13))
    assert set(both.flatten().tolist()) == {-1.0, 1.0}
    assert not torch.equal(both, Draws(8, torch.tensor([3, 9])).signs(2, 13))
    assert not torch.equal(both, Draws(7, torch.tensor([3, 9])).signs(1, 13))


# --- estimates ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "classes", "scale", "fixed"), [(1, 30, 1.0, 0), (1, 30, 12.0, 4), (4, 8, 1.0, 0), (4, 8, 9.0, 3)]
)
def test_two_standard_errors_cover_the_exact_cosines(tokens: int, classes: int, scale: float, fixed: int) -> None:
    source = recorder(tokens, classes, scale)
    expected, repetitions = exact_cosines(source), 40
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in FAMILY}
    for seed in range(repetitions):
        stream = source.streams("mixed", draws=12, fixed=fixed, seed=seed)["inner.weight"]
        columns = RandomColumns(stream)
        for name in FAMILY:
            estimate = columns.cosine(approx.get(name))
            assert 0 <= estimate.value <= 1
            found[name].append((estimate.value, estimate.stderr))
    for name, pairs in found.items():
        errors = torch.tensor([value - expected[name] for value, _ in pairs])
        bars = torch.tensor([stderr for _, stderr in pairs])
        assert (errors.abs() <= 2 * bars).sum() >= 0.85 * repetitions, name
        bias, noise = abs(float(errors.mean())), float(errors.std()) / math.sqrt(repetitions)
        assert bias <= 0.5 * float(bars.median()) + noise, name
        # and are not much wider than the values vary, apart from the share kept for the correction itself (estimates
        # that would be above one are cut there, which makes them vary less)
        assert float(bars.median()) <= 3 * float(errors.std()), name


@pytest.mark.parametrize("swapped", [False, True])
def test_the_optimum_is_found_from_far_fewer_columns_than_the_matrix_has_directions(swapped: bool) -> None:
    """Inputs of one direction leave an output factor that is mostly noise: an iteration on it runs after the noise."""
    generator = torch.Generator().manual_seed(3)
    samples, draws, tokens, wide = 16, 4, 12, 60

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    # gradients of outputs are white, so that the matrix is a Kronecker product and every good fit is itself
    inputs = 0.2 * normal(samples, 1, tokens, 10) + normal(10)
    found = []
    for _ in range(8):
        outputs = normal(samples, draws, tokens, wide) * draws**-0.5
        sides = (inputs, outputs) if swapped else (outputs, inputs)
        weights = torch.full((samples,), 1 / samples, dtype=torch.float64)
        chunk = FactoredAtoms(sides[0], sides[1], weights, torch.arange(samples))
        columns = RandomColumns(GradientStream.of_chunks(chunk, random_columns=draws))
        product = columns._by_influence(approx.get("optimal"), _optima(columns._halves)[0])
        squared = columns.cosine(approx.get("shampoo2"))
        assert product.stderr < 0.1
        assert abs(product.value - 1) <= 3.5 * product.stderr
        assert abs(squared.value - 1) <= 3.5 * squared.stderr
        found.append(product.value)
    assert sum(found) / len(found) == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize("name", ["optimal", "shampoo2", "shampoo", "kfac-reduce", "kfac-expand", "one-sided"])
def test_influences_say_what_leaving_columns_out_would_do(name: str) -> None:
    """The oracle of the formula: fits with one group of random columns left out, many columns in all."""
    stream = recorder(3, 6, 2.0).streams("mixed", draws=96, fixed=2, seed=5)["inner.weight"]
    columns, approximation = RandomColumns(stream), approx.get(name)
    fits = [approximation.fit(half.stream) for half in columns._halves]
    direct, groups = columns._by_influence(approximation, fits), columns._by_leaving_out(approximation.fit, fits)
    assert direct.value == pytest.approx(groups.value, rel=1e-9)
    # eight groups know their own spread to about a quarter
    assert direct.stderr == pytest.approx(groups.stderr, rel=0.6)


@pytest.mark.parametrize("one_carries_it", [False, True])
def test_the_columns_of_one_half_give_the_error_bar_of_a_large_layer(
    one_carries_it: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(1)
    sides = [torch.randn(60, 4, 5, 6, generator=generator).double() for _ in range(2)]
    if one_carries_it:
        sides[0][0] *= 30
    weights = torch.full((60,), 1 / 60, dtype=torch.float64)
    stream = GradientStream.of_chunks(FactoredAtoms(sides[0], sides[1], weights, torch.arange(60)), random_columns=4)
    both, asked = RandomColumns(stream).cosine(approx.get("shampoo2")), 0
    terms = influence.factor_terms

    def counted(*arguments: Any) -> Tensor:
        nonlocal asked
        asked += 1
        return terms(*arguments)

    monkeypatch.setattr(estimates, "factor_terms", counted)
    monkeypatch.setattr(estimates, "_COSTLY", 0.0)
    found = RandomColumns(stream).cosine(approx.get("shampoo2"))
    assert asked == (2 if one_carries_it else 1)
    assert found.value == both.value
    assert found.stderr == pytest.approx(both.stderr, rel=1e-12 if one_carries_it else 0.4)


def test_with_every_column_fixed_nothing_is_left_to_chance() -> None:
    source = recorder(2, 4, 1.0)
    expected = exact_cosines(source)
    stream = source.streams("mixed", draws=4, fixed=8, seed=0)["inner.weight"]
    for name, value in expected.items():
        estimate = RandomColumns(stream).cosine(approx.get(name))
        assert estimate.value == pytest.approx(value, abs=1e-6)
        assert estimate.stderr < 1e-5


def confident() -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    """A small network trained until it is sure of itself."""
    return copy.deepcopy(_trained())


@functools.cache
def _trained() -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 40))
    inputs, targets = torch.randn(64, 6), torch.randint(40, (64,))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(1200):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    return model, [(inputs, targets)]


def test_a_confident_network_is_measured_within_a_hundredth_with_a_quarter_of_its_columns() -> None:
    model, data = confident()
    loss = nn.CrossEntropyLoss()
    exact = ks.measure(model, loss, data, progress=False)
    assert float(torch.softmax(model(data[0][0]).detach(), 1).amax(1).mean()) > 0.98
    estimated = ks.measure(model, loss, data, max_columns=10, progress=False)
    for row, other in zip(exact, estimated, strict=True):
        assert other.cosine == pytest.approx(row.cosine, abs=0.01)
        assert abs(other.cosine - row.cosine) <= 3 * other.stderr
        assert other.stderr <= 0.01
        assert "random columns" in other.note


def test_layers_get_as_many_columns_as_they_need() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 60)).double()
    data = [(torch.randn(20, 6, dtype=torch.float64), torch.randint(60, (20,)))]
    results = ks.measure(model, nn.CrossEntropyLoss(), data, max_columns=10, accuracy=0.02, progress=False)
    assert results.layers == ("0.weight", "2.weight")
    assert all(row.stderr <= 0.02 or math.isnan(row.stderr) for row in results)


def test_curves_of_an_estimated_truth_answer_as_the_rows_do() -> None:
    model, data = confident()
    results = ks.measure(
        model, nn.CrossEntropyLoss(), data, ["0.weight"], max_columns=10, details=["exponents"], progress=False
    )
    curve = results.details[0]
    by_power = dict(zip(curve.series("exponent"), curve.series("cosine"), strict=True))
    rows = {row.approximation: row.cosine for row in results}
    assert by_power[1.0] == pytest.approx(rows["shampoo2"], abs=1e-6)  # float32 products
    assert by_power[0.5] == pytest.approx(rows["shampoo"], abs=1e-6)


def test_real_labels_are_compared_with_an_estimated_truth_without_its_bias() -> None:
    model, data = confident()
    loss = nn.CrossEntropyLoss()
    exact = ks.measure(model, loss, data, ["0.weight"], labels="real", progress=False)
    estimated = ks.measure(model, loss, data, ["0.weight"], labels="real", max_columns=10, progress=False)
    for row, other in zip(exact, estimated, strict=True):
        assert abs(other.cosine - row.cosine) <= 3 * other.stderr + 1e-9


def test_probes_of_an_estimated_truth_see_neither_its_noise_nor_themselves() -> None:
    """Plain probes would give a cosine with a noisy matrix: 0.74 where 0.83 is right."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 30), nn.GELU(), nn.Linear(30, 400))
    data = [(torch.randn(32, 20), torch.randint(400, (32,)))]
    loss, probes = nn.CrossEntropyLoss(), ks.Probes(count=200)
    exact = ks.measure(model, loss, data, ["0.weight"], progress=False)
    probed = ks.measure(model, loss, data, ["0.weight"], estimator=probes, max_columns=16, progress=False)
    for row, other in zip(exact, probed, strict=True):
        assert abs(other.cosine - row.cosine) <= 3 * other.stderr
        assert 0.003 < other.stderr < 0.03


def test_every_approximation_is_estimated_from_float32_columns() -> None:
    """Iterations that ask for ten digits do not find them in float32, and need not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 300))
    data = [(torch.randn(32, 6), torch.randint(300, (32,)))]
    loss, names = nn.CrossEntropyLoss(), approx.names()
    exact = ks.measure(model, loss, data, ["0.weight"], approximations=names, progress=False)
    estimated = ks.measure(
        model, loss, data, ["0.weight"], approximations=names, max_columns=16, accuracy=0.02, progress=False
    )
    for row, other in zip(exact, estimated, strict=True):
        assert abs(other.cosine - row.cosine) <= 3.5 * other.stderr, row.approximation


def test_a_layer_without_gradients_has_no_number_and_stops_no_other() -> None:
    torch.manual_seed(0)
    down, up = nn.Linear(6, 3, bias=False), nn.Linear(3, 8, bias=False)
    nn.init.zeros_(up.weight)  # an adapter at its start
    model = nn.Sequential(down, up, nn.Linear(8, 200))
    data = [(torch.randn(16, 6), torch.randint(200, (16,)))]
    results = ks.measure(model, nn.CrossEntropyLoss(), data, max_columns=8, accuracy=0.05, progress=False)
    for row in results:
        empty = row.layer in ("0.weight", "2.weight")  # without inputs, or without a way to the loss
        assert math.isnan(row.cosine) == empty
        assert math.isnan(row.relative_error) == empty


@pytest.mark.parametrize(("value", "stderr"), [(-128.0, 95.0), (0.1, 0.2), (-0.1, 0.01), (1.5, 0.1)])
def test_what_cannot_be_a_cosine_is_not_reported_as_one(value: float, stderr: float) -> None:
    estimate = checked(value, stderr)
    assert math.isnan(estimate.value)
    assert "use more samples" in estimate.note


def test_an_estimate_just_above_one_is_one() -> None:
    assert checked(1.001, 0.01).value == 1.0


def test_a_remainder_next_to_nothing_is_an_error_bar_next_to_nothing() -> None:
    """Of a very confident model the variances may be so small that their squares are zero."""
    columns = RandomColumns(recorder(1, 20, 1.0).streams("mixed", draws=6, seed=0)["inner.weight"])
    columns._random_sums.zero_()
    variances = columns._variances(1.0, 1e-95 * torch.randn(10, 6, dtype=torch.float64), range(6))
    assert 0 < estimates._stderr([variances]) < 1e-90


def test_an_estimate_without_an_error_bar_is_not_shown_as_if_it_were_exact() -> None:
    found = checked(0.9, math.nan)
    assert math.isnan(found.value)
    assert "no error bar" in found.note
