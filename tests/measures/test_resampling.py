"""Error bars: unbiased where they say so, and as wide as they should be, on populations that are known exactly."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kronscope as ks
from kronscope.errors import ConvergenceError, DataError
from kronscope.measures import Resampler
from kronscope.measures.partition import random_groups
from kronscope.measures.population import PopulationHalves
from tests.gradients import zoo

SHAPE = (3, 4)


class Population:
    """A mixture of three Kronecker Gaussians."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.parts = [
            tuple(torch.randn(size, size, generator=generator, dtype=torch.float64) for size in SHAPE) for _ in range(3)
        ]

    def sample(self, count: int, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        kinds = torch.randint(0, 3, (count,), generator=generator)
        normal = torch.randn(count, *SHAPE, generator=generator, dtype=torch.float64)
        left, right = (torch.stack([part[side] for part in self.parts])[kinds] for side in (0, 1))
        return left @ normal @ right

    def cosine(self, name: str) -> float:
        H = torch.stack([torch.kron(a @ a.T, b.T @ b) for a, b in self.parts]).mean(0)
        values, vectors = torch.linalg.eigh(H)
        stream = ks.GradientStream.from_tensors(vectors.T.reshape(-1, *SHAPE), weights=values.clamp_min(0))
        return ks.cosine(ks.SecondMoment(stream), ks.approx.get(name).fit(stream))


def test_the_norm_is_unbiased_where_the_plug_in_is_not() -> None:
    # every sample of four (with replacement) from a population of three gradients: the expectation is a plain mean
    pool = torch.randn(3, 2, 2, dtype=torch.float64)
    H = ks.SecondMoment(ks.GradientStream.from_tensors(pool)).to_dense()
    unbiased, plug_in = [], []
    for chosen in itertools.product(range(3), repeat=4):
        stream = ks.GradientStream.from_tensors(pool[list(chosen)])
        unbiased.append(Resampler(stream, stream, "samples")._norms[0] ** 2)
        plug_in.append(ks.SecondMoment(stream).norm_squared())
    expected = float(H.square().sum())
    assert sum(unbiased) / len(unbiased) == pytest.approx(expected, rel=1e-12)
    assert sum(plug_in) / len(plug_in) > 1.05 * expected
    # E = (1 - 1/N) |H|² + E|g|⁴/N
    fourth = float(pool.flatten(1).square().sum(1).square().mean())
    assert sum(plug_in) / len(plug_in) == pytest.approx(0.75 * expected + 0.25 * fourth, rel=1e-12)


def test_the_norm_drops_pairs_of_one_sample_not_only_of_one_column() -> None:
    torch.manual_seed(2)
    G = torch.randn(6, 3, 2, 2, dtype=torch.float64)
    stream = _columns(G)
    found = Resampler(stream, stream, "samples")._norms[0] ** 2
    flat = G.flatten(2)
    pairs = torch.einsum("ica,jda->ijcd", flat, flat).square().sum((2, 3))
    expected = (pairs.sum() - pairs.diagonal().sum()) / (6 * 5)
    assert found == pytest.approx(float(expected), rel=1e-12)


def test_norms_of_replicates_are_those_of_the_samples_left() -> None:
    G = torch.randn(7, *SHAPE, dtype=torch.float64)
    stream = ks.GradientStream.from_tensors(G)
    whole = Resampler(stream, stream, "samples", groups=3)
    for group in range(3):
        rest = ks.GradientStream.from_tensors(G[random_groups(7, 3) != group])
        assert whole._norms[1 + group] == pytest.approx(Resampler(rest, rest, "samples", groups=3)._norms[0], rel=1e-12)


def test_draw_norms_are_unbiased_for_exact_labels() -> None:
    # a sample's gradient is one of two, with equal chance: all outcomes of three draws for each of two samples
    pool = torch.randn(2, 2, 2, 2, dtype=torch.float64)
    exact = torch.einsum("sca,scb->ab", pool.flatten(2), pool.flatten(2)) / 4
    found = []
    for chosen in itertools.product(range(2), repeat=6):
        drawn = torch.stack([pool[sample, list(chosen[3 * sample : 3 * sample + 3])] for sample in range(2)])
        stream = _columns(drawn / math.sqrt(3), draws=True)
        squares = [norm**2 for norm in Resampler(stream, stream, "draws")._norms]
        found.append(squares)
    means = torch.tensor(found).double().mean(0)
    # the norm is cut at zero, which these draws never reach
    assert torch.tensor(found).min() > 0
    assert means.tolist() == pytest.approx([float(exact.square().sum())] * 4, rel=1e-6)


def _columns(grads: Tensor, *, draws: bool = False) -> ks.GradientStream:
    from kronscope.gradients.atoms import DenseAtoms

    count = len(grads)
    weights = torch.full((count,), 1 / count, dtype=torch.float64)
    return ks.GradientStream.of_chunks(DenseAtoms(grads, weights, torch.arange(count)), draws=draws)


@pytest.mark.parametrize("name", ["shampoo2", "optimal", "identity"])
def test_population_error_bars_cover_the_truth(name: str) -> None:
    # a fit that iterates takes long: half as many of them, half as often
    slow = name == "optimal"
    population, replications = Population(), 30 if slow else 60
    truth, fit = population.cosine(name), ks.approx.get(name).fit
    groups: dict[str, Any] = {"groups": 10} if slow else {}
    values, errors, plug_ins = [], [], []
    for seed in range(replications):
        stream = ks.GradientStream.from_tensors(population.sample(40, seed))
        estimate = Resampler(stream, stream, "samples", **groups).cosine(fit)
        values.append(estimate.value)
        errors.append(estimate.stderr)
        plug_ins.append(ks.cosine(ks.SecondMoment(stream), fit(stream)))
    off = (torch.tensor(values) - truth).abs()
    coverage = float((off <= 2 * torch.tensor(errors)).double().mean())
    assert 0.85 <= coverage <= 1.0
    # wide enough; with 40 samples the bars of the optimal product are wider than its estimates vary, by 1.59 here
    spread = float(torch.tensor(values).std())
    assert 0.7 < float(torch.tensor(errors).mean()) / spread < 1.66
    bias, plug_in_bias = (abs(float(torch.tensor(found).mean()) - truth) for found in (values, plug_ins))
    # the plug-in of the identity happens to be unbiased on this population: there the estimate must be so too
    assert bias < (3 * spread / math.sqrt(replications) if name == "identity" else 0.25 * plug_in_bias)


def test_measure_gives_the_population_estimate() -> None:
    model = nn.Linear(4, 3, bias=False).double()
    data = [(zoo.images(30, 4), torch.randint(0, 3, (30,)))]
    results = ks.measure(model, nn.CrossEntropyLoss(), data, truth="empirical_fisher", population=True, progress=False)
    grads = [
        torch.autograd.grad(nn.functional.cross_entropy(model(x[None]), y[None]), model.weight)[0]
        for x, y in zip(*data[0], strict=True)
    ]
    stream = ks.GradientStream.from_tensors(torch.stack(grads))
    for row in results.select(approximation=("optimal", "shampoo2", "shampoo")):
        estimate = PopulationHalves(stream, stream).cosine(ks.approx.get(row.approximation))
        # of the optimum, iterations end at 1e-6
        assert (row.cosine, row.stderr) == pytest.approx((min(estimate.value, 1.0), estimate.stderr), rel=1e-4)


def test_error_bars_of_an_estimated_truth_contain_the_exact_value() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 30)).double()
    data = [(zoo.images(12, 5), torch.randint(0, 30, (12,)))]
    options: dict[str, Any] = {"layers": "0.weight", "approximations": ("optimal", "shampoo2"), "progress": False}
    exact = {row.approximation: row.cosine for row in ks.measure(model, nn.CrossEntropyLoss(), data, **options)}
    within = []
    for seed in range(10):
        found = ks.measure(model, nn.CrossEntropyLoss(), data, max_columns=2, accuracy=1.0, seed=seed, **options)
        within += [abs(row.cosine - exact[row.approximation]) <= 2 * row.stderr for row in found]
        assert all("random columns" in row.note and row.stderr > 0 for row in found)
    assert sum(within) / len(within) >= 0.8


@pytest.mark.parametrize("layer", ["0.weight", "2.weight"])
def test_sampled_fits_have_error_bars_as_wide_as_they_vary(layer: str) -> None:
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    data = [(zoo.images(40, 5), torch.randint(0, 4, (40,)))]
    for draws in (1, 6):
        rows = [
            ks.measure(
                model,
                nn.CrossEntropyLoss(),
                data,
                layers=layer,
                labels="sampled",
                draws=draws,
                seed=2 * seed,
                approximations=["shampoo2"],
                progress=False,
            ).rows[0]
            for seed in range(15)
        ]
        spread = float(torch.tensor([row.cosine for row in rows]).std())
        stderr = sum(row.stderr for row in rows) / len(rows)
        # leaving out samples also sees the samples vary, so it errs on the wide side
        assert 0.5 * spread < stderr < 6 * spread, (draws, spread, stderr)


def _history(steps: int, seed: int, every: int) -> ks.GradientHistory:
    """Gradients of a run that do not hang together, as those of shuffled batches late in training."""
    generator = torch.Generator().manual_seed(seed)
    weight = nn.Linear(SHAPE[1], SHAPE[0], bias=False).double()
    optimizer = torch.optim.SGD(weight.parameters(), lr=0.0)
    history = ks.GradientHistory.attach(optimizer, weight, ["weight"], every=every)
    grads = Population().sample(steps, int(torch.randint(0, 10_000, (), generator=generator)))
    for grad in grads:
        weight.weight.grad = grad.clone()
        optimizer.step()
    history.detach()
    return history


def test_thinned_histories_have_error_bars_that_contain_the_exact_value() -> None:
    within, ratios = [], []
    for seed in range(8):
        whole, thinned = (_history(240, seed, every) for every in (1, 5))
        names = ("optimal", "shampoo2", "shampoo")
        exact = {row.approximation: row for row in ks.measure_history(whole, names, progress=False)}
        for row in ks.measure_history(thinned, names, progress=False):
            truth = exact[row.approximation]
            assert math.isnan(truth.stderr)
            assert "48 of 240" in row.note
            within.append(abs(row.cosine - truth.cosine) <= 3 * row.stderr)
            ratios.append(abs(row.cosine - truth.cosine) / row.stderr)
    assert all(within), ratios
    # the bars are not so wide that anything would fit
    assert sum(ratio > 0.3 for ratio in ratios) > len(ratios) / 4


def test_too_few_units_are_an_error_that_says_so() -> None:
    stream = ks.GradientStream.from_tensors(torch.randn(2, 2, 2))
    with pytest.raises(DataError, match="at least three samples, got 2"):
        Resampler(stream, stream, "samples")
    with pytest.raises(DataError, match="at least three draws, got 1"):
        Resampler(stream, stream, "draws")


def test_a_drawn_fit_that_fails_without_some_samples_keeps_its_value() -> None:
    class Picky:
        name, title, calls = "picky", "picky", 0

        def fit(self, stream: ks.GradientStream) -> ks.Operator:
            self.calls += 1
            if self.calls > 2:
                raise ConvergenceError("it does not converge.")
            return ks.approx.get("identity").fit(stream)

    model = nn.Linear(4, 3).double()
    data = [(zoo.images(6, 4), torch.randint(0, 3, (6,)))]
    options: dict[str, Any] = {"approximations": [Picky()], "progress": False}
    (row,) = ks.measure(model, nn.CrossEntropyLoss(), data, labels="sampled", **options)
    assert row.cosine > 0
    assert math.isnan(row.stderr)
    assert "no error bar" in row.note
    Picky.calls = 0
    (row,) = ks.measure(model, nn.CrossEntropyLoss(), data, population=True, **options)
    assert math.isnan(row.cosine)
    assert "does not converge" in row.note
