"""All layers together: shares of the whole matrix and cosines of block-diagonal approximations, against dense ones."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kronscope as ks
from kronscope.curvature import whole as curvature_whole
from kronscope.curvature.whole import block_squares
from kronscope.errors import DataError, LayerError, MemoryBudgetError, OptionError, ResultsError
from kronscope.testing import oracle
from tests.gradients.zoo import Attention, Hidden, ResidualConvnet, TiedLanguageModel, images
from tests.measures.small import mlp

LOSS = nn.CrossEntropyLoss()


def whole_matrix(
    model: nn.Module, inputs: Tensor, targets: Tensor, names: list[str], truth: str
) -> tuple[Tensor, list[slice]]:
    """H of several parameters from full Jacobians, and where each parameter lies in it."""

    def flat(values: tuple[Tensor | None, ...]) -> Tensor:
        pairs = zip(names, values, strict=True)
        return torch.cat([(torch.zeros_like(parameters[n]) if g is None else g).flatten() for n, g in pairs])

    parameters = dict(model.named_parameters())
    H: Any = 0.0
    for sample in range(len(targets)):
        outputs = model(inputs[sample : sample + 1])
        loss = LOSS(outputs, targets[sample : sample + 1])
        (first,) = torch.autograd.grad(loss, outputs, create_graph=True)
        weights = [parameters[name] for name in names]
        J = torch.stack(
            [flat(torch.autograd.grad(out, weights, retain_graph=True, allow_unused=True)) for out in outputs.flatten()]
        )
        if truth == "empirical_fisher":
            g = J.T @ first.flatten().detach()
            H = H + torch.outer(g, g) / len(targets)
            continue
        hessian = torch.stack(
            [torch.autograd.grad(one, outputs, retain_graph=True)[0].flatten() for one in first.flatten()]
        )
        H = H + J.T @ hessian @ J / len(targets)
    cuts, start = [], 0
    for name in names:
        cuts.append(slice(start, start + parameters[name].numel()))
        start += parameters[name].numel()
    return H.detach(), cuts


CASES = [
    (nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), lambda: images(6, 4), (6,), 3),
    (Attention(True), lambda: images(4, 3, 5), (4,), 4),
    (ResidualConvnet(), lambda: images(4, 2, 4, 4), (4,), 3),
    (Hidden(), lambda: images(4, 5), (4,), 3),
    (TiedLanguageModel(), lambda: torch.randint(5, (3, 3)), (3, 3), 5),
]


@pytest.mark.parametrize("truth", ["gauss_newton", "empirical_fisher"])
@pytest.mark.parametrize(("model", "inputs", "targets", "classes"), CASES)
def test_shares_and_cosines_are_those_of_the_dense_matrix(
    model: nn.Module, inputs: Any, targets: tuple[int, ...], classes: int, truth: str
) -> None:
    model = model.double().eval()
    data = (inputs(), torch.randint(classes, targets))
    names = ["shampoo2", "diagonal"]
    results = ks.measure(model, LOSS, [data], truth=truth, approximations=names, whole_model=True, progress=False)
    found = results.whole_model()
    layers = list(found.layers)
    H, cuts = whole_matrix(model, *data, layers, truth)
    square = float(H.norm()) ** 2
    assert found.norm == pytest.approx(math.sqrt(square), rel=1e-9)
    for a, one in enumerate(cuts):
        for b, two in enumerate(cuts):
            assert found.squares[a][b] == pytest.approx(float(H[one, two].norm()) ** 2, rel=1e-8, abs=1e-12 * square)
    assert sum(found.shares.values()) + found.cross_share == pytest.approx(1.0)
    shapes = {row.layer: row.shape for row in results}
    for name in names:
        blocks = []
        for layer, cut in zip(layers, cuts, strict=True):
            K = oracle.approximation_of_matrix(name, H[cut, cut], shapes[layer])
            blocks.append(K * float((H[cut, cut] * K).sum() / K.square().sum()))  # at its best scale
        K = torch.block_diag(*blocks)
        diagonal = torch.block_diag(*(H[cut, cut] for cut in cuts))
        assert found.cosines[name] == pytest.approx((oracle.cosine(H, K), oracle.cosine(diagonal, K)), abs=1e-8)


def test_tiles_of_any_size_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = [
        ks.GradientStream.from_factors(torch.randn(9, 2, m).double(), torch.randn(9, 2, n).double())
        for m, n in ((3, 4), (2, 5))
    ]
    whole = block_squares(streams)
    monkeypatch.setattr(curvature_whole, "_TILE_ENTRIES", 4)
    torch.testing.assert_close(block_squares(streams), whole, rtol=1e-12, atol=0)
    dense = [stream.map(lambda chunk: chunk.dense()) for stream in streams]
    torch.testing.assert_close(block_squares(dense), whole, rtol=1e-12, atol=0)
    with pytest.raises(DataError, match="same samples and columns"):
        block_squares([streams[0], ks.GradientStream.from_tensors(torch.ones(3, 2, 2))])


def test_a_layer_without_gradients_counts_nothing_and_stops_nothing() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3), nn.Linear(3, 3)).double()
    nn.init.zeros_(model.get_parameter("1.weight"))
    data = [(torch.randn(8, 4, dtype=torch.float64), torch.randint(3, (8,)))]
    found = ks.measure(model, LOSS, data, approximations=["shampoo2"], whole_model=True, progress=False).whole_model()
    assert found.shares["0.weight"] == 0
    assert found.nearest("1.weight") == "2.weight"
    assert not any(math.isnan(value) for value in found.cosines["shampoo2"])


def test_the_answer_is_printed_saved_and_selected_like_curves(tmp_path: Path) -> None:
    model, data = mlp()
    results = ks.measure(model, LOSS, data, approximations=["shampoo2"], whole_model=True, progress=False)
    again = ks.Results.load(results.save(tmp_path / "run.json"))
    assert again.whole_model() == results.whole_model()
    text = str(results)
    assert "between layers" in text
    assert "with its block diagonal" in text
    assert max(map(len, text.splitlines())) <= 100
    assert "between layers" in results.report(tmp_path / "report.html").read_text(encoding="utf-8")
    with pytest.raises(ResultsError, match="keep all layers"):
        results.select(layer="0.weight").whole_model()
    later = ks.measure(model, LOSS, data, approximations=["shampoo2"], whole_model=True, step=5, progress=False)
    with pytest.raises(ResultsError, match=r"2 answers for the whole model .*step 5"):
        results.merge(later).whole_model()
    assert results.merge(later).select(step=5).whole_model() == later.whole_model()


def test_what_has_no_whole_is_refused_before_the_work() -> None:
    model, data = mlp()
    with pytest.raises(LayerError, match=r"'0\.weight' and '0\.weight\[0:2\]' have some"):
        ks.measure(model, LOSS, data, ["0.weight", "0.weight[0:2]"], whole_model=True, progress=False)
    with pytest.raises(OptionError, match="leave population at False"):
        ks.measure(model, LOSS, data, population=True, whole_model=True, progress=False)
    wide = nn.Linear(3, 300)
    points = [(torch.randn(8, 3), torch.randint(300, (8,)))]
    with pytest.raises(OptionError, match="whole_model=True needs exact labels, but 299 columns"):
        ks.measure(wide, LOSS, points, max_columns=10, whole_model=True, progress=False)
    with pytest.raises(MemoryBudgetError, match="keeps the gradients of all layers"):
        ks.measure(mlp()[0], LOSS, data * 40, memory_budget=100_000, whole_model=True, progress=False)
    with pytest.raises(ResultsError, match="measure with whole_model=True"):
        ks.measure(model, LOSS, data, progress=False).whole_model()
