"""The population's cosine from halves of the samples: against fits with samples left out, and known populations."""

from __future__ import annotations

import importlib
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kronscope as ks
from kronscope.curvature.sample_pairs import sample_pairs
from kronscope.gradients.atoms import DenseAtoms
from kronscope.measures import Estimate, Resampler
from kronscope.measures.partition import random_groups
from kronscope.measures.population import PopulationHalves, checked_population
from tests.gradients.zoo import Attention, images
from tests.measures.test_resampling import Population

LOSS = nn.CrossEntropyLoss()


def _stream(kind: str, samples: int = 9) -> ks.GradientStream:
    torch.manual_seed(3)
    if kind == "dense":
        return ks.GradientStream.from_tensors(torch.randn(samples, 3, 4).double(), torch.rand(samples).double())
    if kind == "columns":
        grads = torch.randn(samples, 2, 3, 4, dtype=torch.float64)
        weights = torch.full((samples,), 1 / samples, dtype=torch.float64)
        return ks.GradientStream.of_chunks(DenseAtoms(grads, weights, torch.arange(samples)))
    positions = 1 if kind == "factored" else 3
    rows, cols = torch.randn(samples, positions, 3).double(), torch.randn(samples, positions, 4).double()
    return ks.GradientStream.from_factors(rows, cols)


def _atoms(stream: ks.GradientStream) -> tuple[Tensor, Tensor]:
    """Gradients (N, c, mn) and weights (N,)."""
    chunks = [chunk.dense() for chunk in stream]
    return torch.cat([chunk.grads.flatten(2) for chunk in chunks]).double(), stream.weights()


@pytest.mark.parametrize("kind", ["dense", "columns", "factored", "shared"])
def test_pairs_of_samples_are_those_of_the_whole_table(kind: str) -> None:
    stream = _stream(kind)
    grads, weights = _atoms(stream)
    table = torch.einsum("ica,jda->ijcd", grads, grads).square().sum((2, 3)).fill_diagonal_(0)
    groups = torch.arange(9) % 3
    expected = torch.stack([(table * weights)[:, groups == group].sum(1) for group in range(3)], 1)
    torch.testing.assert_close(sample_pairs(ks.SecondMoment(stream), groups), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", ["dense", "columns", "factored", "shared"])
def test_the_value_is_that_of_dense_halves(kind: str) -> None:
    stream = _stream(kind, 10)
    grads, weights = _atoms(stream)
    halves = [random_groups(10, 4) % 2 == half for half in (0, 1)]
    parts = [ks.GradientStream.from_tensors(grads.view(10, -1, 3, 4)[half].flatten(0, 1)) for half in halves]
    matrices, fits = [], []
    for half, part in zip(halves, parts, strict=True):
        share = (weights[half] / weights[half].sum()).repeat_interleave(grads.shape[1])
        matrices.append(torch.einsum("i,ia,ib->ab", share, *[grads[half].flatten(0, 1)] * 2))
        fits.append(ks.approx.get("shampoo2").fit(part.reweighted(share)).to_dense())
    (a, b), (k, l) = matrices, fits  # noqa: E741
    expected = math.sqrt(float((b * k).sum() * (a * l).sum() / ((k * l).sum() * (a * b).sum())))
    found = PopulationHalves(stream, stream).cosine(ks.approx.get("shampoo2"))
    assert found.value == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("name", ["shampoo2", "shampoo", "optimal", "one-sided", "identity"])
def test_it_agrees_with_fits_that_leave_samples_out(name: str) -> None:
    stream = ks.GradientStream.from_tensors(Population().sample(120, 0))
    approximation = ks.approx.get(name)
    found = PopulationHalves(stream, stream).cosine(approximation)
    oracle = Resampler(stream, stream, "samples").cosine(approximation.fit)
    assert abs(found.value - oracle.value) < 1.5 * oracle.stderr
    assert 0.5 * oracle.stderr < found.stderr < 2.5 * oracle.stderr


@pytest.mark.parametrize("name", ["kfac-reduce", "kfac-expand", "shampoo2"])
@pytest.mark.parametrize("labels", ["exact", "real"])
def test_few_samples_of_a_model_say_what_many_do(name: str, labels: str) -> None:
    torch.manual_seed(0)
    model = Attention(True).double()
    data = [(images(60, 3, 5), torch.randint(4, (60,)))]
    layer = "attention.out_proj.weight"
    options: dict[str, Any] = {"labels": labels, "approximations": [name], "progress": False}
    row = ks.measure(model, LOSS, data, layer, population=True, **options).rows[0]
    many = [(images(1000, 3, 5), torch.randint(4, (1000,)))]
    plain = ks.measure(model, LOSS, many, layer, **options).rows[0]
    assert abs(row.cosine - plain.cosine) < 3 * row.stderr + 3e-4
    assert row.stderr < 0.06


@pytest.mark.parametrize("name", ["shampoo2", "shampoo", "optimal"])
def test_error_bars_cover_a_known_population(name: str) -> None:
    population, approximation = Population(), ks.approx.get(name)
    truth, inside = population.cosine(name), 0
    for seed in range(50):
        stream = ks.GradientStream.from_tensors(population.sample(40, seed))
        found = PopulationHalves(stream, stream).cosine(approximation)
        inside += abs(found.value - truth) <= 2 * found.stderr
    assert inside >= 44


@pytest.mark.parametrize("name", ["shampoo2", "shampoo", "optimal", "soap"])
@pytest.mark.parametrize("period", [2, 5])
def test_kinds_of_samples_that_take_turns_are_in_both_halves(name: str, period: int) -> None:
    generator = torch.Generator().manual_seed(0)
    kinds = torch.randn(period, 3, 4, generator=generator, dtype=torch.float64)
    grads = kinds.repeat(300 // period, 1, 1) + torch.randn(300, 3, 4, generator=generator, dtype=torch.float64) / 2
    approximation, found = ks.approx.get(name), []
    for order in (torch.arange(300), torch.randperm(300, generator=generator)):
        stream = ks.GradientStream.from_tensors(grads[order])
        halves = PopulationHalves(stream, stream)
        found.append(
            halves.cosine(approximation)
            if halves.knows(approximation, stream)
            else halves.refits.cosine(approximation.fit)
        )
    assert abs(found[0].value - found[1].value) <= 2 * found[1].stderr
    assert 0.5 < found[0].stderr / found[1].stderr < 2


@pytest.mark.parametrize("along_time", [False, True])
@pytest.mark.parametrize(("count", "groups"), [(7, 2), (64, 4), (100, 20), (12, 20), (1, 4)])
def test_groups_are_of_one_size_and_follow_no_pattern(count: int, groups: int, along_time: bool) -> None:
    found = random_groups(count, groups, along_time=along_time)
    assert torch.equal(found, random_groups(count, groups, along_time=along_time))
    sizes = found.bincount(minlength=groups)
    assert int(sizes.max() - sizes.min()) <= 1
    if along_time:
        for part in found.split(20 if groups == 20 else 16):
            assert part.bincount(minlength=groups).max() <= -(-len(part) // groups)
    if count >= 64:
        for period in (2, 3, 4, 5, 10, 20):
            assert not torch.equal(found[:-period], found[period:])


@pytest.mark.parametrize("name", ["shampoo2", "shampoo"])
def test_a_population_has_no_sample_twice_in_a_batch_however_it_is_drawn(name: str) -> None:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    data = [(torch.randn(64, 6) + 0.5, torch.randint(4, (64,)))]
    rows = [
        ks.measure(
            model, LOSS, data, "0.weight", truth="empirical_fisher", batch_size=48, replacement=replacement,
            approximations=[name], population=True, progress=False,
        ).rows[0]
        for replacement in (True, False)
    ]  # fmt: skip
    assert replace(rows[0], seconds=0.0) == replace(rows[1], seconds=0.0)


def test_many_directions_and_few_samples_do_not_lead_past_one() -> None:
    # what fitting with samples left out reads as 1.04 and more
    generator = torch.Generator().manual_seed(0)
    stream = ks.GradientStream.from_factors(
        torch.randn(64, 1, 40, generator=generator).double(), torch.randn(64, 1, 50, generator=generator).double()
    )
    found = PopulationHalves(stream, stream).cosine(ks.approx.get("shampoo2"))
    assert abs(found.value - 1.0) <= 3 * found.stderr


def test_a_population_answer_is_a_cosine_or_nan_with_the_reason() -> None:
    assert checked_population(Estimate(1.02, 0.03), 20).value == 1.0
    assert checked_population(Estimate(1.0 + 1e-12, 0.0), 20).value == 1.0
    silent = checked_population(Estimate(0.2, 0.5), 20)
    assert math.isnan(silent.value)
    assert "20 samples say too little" in silent.note
    assert math.isnan(checked_population(Estimate(1.5, 0.01), 20).value)
    # gradients that share no direction say nothing of what they are drawn from
    apart = ks.GradientStream.from_tensors(torch.eye(12, dtype=torch.float64).view(12, 3, 4))
    found = PopulationHalves(apart, apart).cosine(ks.approx.get("shampoo2"))
    assert math.isnan(found.value)
    assert "use more" in found.note


def test_what_has_no_formula_is_fitted_again() -> None:
    stream = ks.GradientStream.from_tensors(Population().sample(20, 0))
    halves = PopulationHalves(stream, stream)
    assert not halves.knows(ks.approx.get("soap"), stream)
    assert not halves.knows(ks.approx.get("shampoo2"), stream.map(lambda chunk: chunk))
    assert halves.refits is halves.refits


@pytest.mark.parametrize("kind", ["dense", "columns", "factored", "shared"])
def test_the_norm_of_a_finite_whole_is_that_of_fits_again(kind: str) -> None:
    stream = _stream(kind, 12)
    halves, refits = PopulationHalves(stream, stream, 1 / 40), Resampler(stream, stream, "samples", whole_square=1 / 40)
    assert halves.norm == pytest.approx(refits.norm, rel=1e-10)
    assert halves.norm > PopulationHalves(stream, stream).norm  # which has no pairs of samples with themselves


@pytest.mark.parametrize("name", ["optimal", "shampoo2", "shampoo"])
def test_a_whole_of_which_everything_was_seen_has_the_exact_cosine(name: str) -> None:
    torch.manual_seed(5)
    stream = ks.GradientStream.from_tensors(torch.randn(60, 3, 4).double(), torch.ones(60))
    approximation = ks.approx.get(name)
    found = PopulationHalves(stream, stream, 1 / 60).cosine(approximation)
    assert found.value == pytest.approx(ks.cosine(ks.SecondMoment(stream), approximation.fit(stream)), rel=1e-9)
    assert found.stderr == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("name", ["optimal", "shampoo2", "shampoo"])
def test_error_bars_of_a_finite_whole_are_as_wide_as_its_error(name: str) -> None:
    approximation, off = ks.approx.get(name), []
    for seed in range(24):
        draw = torch.Generator().manual_seed(seed)
        mixing = torch.randn(5, 5, generator=draw) * torch.tensor([3.0, 2.0, 1.0, 0.5, 0.3])
        common = torch.randn(320, 1, 1, generator=draw) * torch.randn(5, 4, generator=draw)
        grads = mixing @ torch.randn(320, 5, 4, generator=draw) + 2 * common
        grads = grads.double() / (1 + torch.arange(320).view(-1, 1, 1) / 80)
        whole = ks.GradientStream.from_tensors(grads, torch.ones(320))
        seen = ks.GradientStream.from_tensors(grads[seed % 4 :: 4], torch.ones(80))
        exact = ks.cosine(ks.SecondMoment(whole), approximation.fit(whole))
        found = PopulationHalves(seen, seen, 1 / 320).cosine(approximation)
        off.append((found.value - exact) / found.stderr)
    errors = torch.tensor(off)
    assert 0.6 < float(errors.square().mean().sqrt()) < 1.4, off
    assert float(errors.abs().max()) < 4, off


def test_a_thinned_history_fits_the_optimum_three_times(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = nn.Linear(4, 3, bias=False)
    optimizer = torch.optim.SGD(weight.parameters(), lr=0.0)
    history = ks.GradientHistory.attach(optimizer, weight, ["weight"], every=2)
    for seed in range(120):
        optimizer.zero_grad()
        draw = torch.Generator().manual_seed(seed)
        weight(torch.randn(8, 4, generator=draw)).square().mean().backward()
        optimizer.step()
    solved = []
    module = importlib.import_module("kronscope.approx.optimal")
    solve = module.singular_triples

    def counted(*args: Any, **kwargs: Any) -> Any:
        solved.append(1)
        return solve(*args, **kwargs)

    monkeypatch.setattr(module, "singular_triples", counted)
    (row,) = ks.measure_history(history, ("optimal",), progress=False)
    assert 0 < row.stderr < 0.1
    assert len(solved) == 3  # with everything, and with each half: 21 with a group of steps left out at a time
