"""Ranges of rows and columns, and heads of attention: which entries they are, and that their matrix is right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from numpy import s_
from torch import Tensor, nn

import kronscope as ks
from kronscope.errors import LayerError
from kronscope.gradients.matrices import resolve_layers
from kronscope.testing import oracle
from tests.gradients.zoo import (
    Attention,
    Hidden,
    Products,
    Recurrent,
    ResidualConvnet,
    SeparateProjections,
    TiedLanguageModel,
    Transformer,
    images,
)

LOSS = nn.CrossEntropyLoss()


def _names(model: nn.Module, layers: str | list[str]) -> list[str]:
    return [spec.name for spec in resolve_layers(model, layers)]


def _tokens(samples: int) -> tuple[Tensor, Tensor]:
    return torch.randint(5, (samples, 3)), torch.randint(5, (samples, 3))


# model, shape of the inputs, layer, and the entries of parameters it is stacked of
CASES: list[tuple[Any, Any, str, dict[str, list[Any]]]] = [
    (Attention(True), (4, 3, 5), "attention.in_proj_weight[:, 2:5]", {"attention.in_proj_weight": [s_[:, 2:5]]}),
    (Attention(False), (4, 3, 5), "attention.in_proj_weight[3:8, 1:]", {"attention.in_proj_weight": [s_[3:8, 1:]]}),
    (Attention(True, True), (4, 3, 5), "*out_proj.weight[:, -3:]", {"attention.out_proj.weight": [s_[:, 3:]]}),
    (SeparateProjections(), (4, 3, 5), "q[:2, :3]+k[:, 1:4]", {"q.weight": [s_[:2, :3]], "k.weight": [s_[:, 1:4]]}),
    (SeparateProjections(), (4, 3, 5), "q[:, 0:2]+q[:, 3:5]", {"q.weight": [s_[:, :2], s_[:, 3:]]}),
    (ResidualConvnet(), (4, 2, 4, 4), "conv.weight[1:4, 5:11]", {"conv.weight": [s_[1:4, 5:11]]}),
    (ResidualConvnet(), (4, 2, 4, 4), "stem.weight[:, 9:]", {"stem.weight": [s_[:, 9:]]}),
    (Products(), (4, 3, 5), "a[1:4, 2:5]", {"a": [s_[1:4, 2:5]]}),
    (Hidden(), (4, 5), "b[:, 1:3]", {"b": [s_[:, 1:3]]}),
    (Recurrent(nn.LSTM), (4, 3, 3), "cell.weight_hh_l0[4:8, 1:3]", {"cell.weight_hh_l0": [s_[4:8, 1:3]]}),
    (TiedLanguageModel(), "tokens", "tokens.weight[1:4, 1:3]", {"tokens.weight": [s_[1:4, 1:3]]}),
]


@pytest.mark.parametrize(("model", "shape", "layer", "parts"), CASES, ids=[case[2] for case in CASES])
def test_the_matrix_of_a_block_is_the_dense_one(model: Any, shape: Any, layer: str, parts: Any) -> None:
    model = model.double()
    inputs, targets = _tokens(4) if shape == "tokens" else (images(*shape), torch.randint(3, (4,)))
    # torch.func cannot follow these two
    ways = ["auto"] if isinstance(model, (Recurrent, Attention)) else ["auto", "func"]
    weights = dict(model.named_parameters())
    entries, start = [], 0
    for name, cuts in parts.items():
        places = torch.arange(start, start + weights[name].numel()).view(len(weights[name]), -1)
        entries += [places[cut] for cut in cuts]
        start += weights[name].numel()
    index = torch.cat(entries).flatten()
    dense = oracle.gauss_newton(model, LOSS, inputs, targets, list(parts))
    for backend in ways:
        H = ks.second_moment(model, LOSS, [(inputs, targets)], layer=layer, backend=backend, progress=False)
        torch.testing.assert_close(H.to_dense(), dense[index[:, None], index], rtol=1e-9, atol=1e-12)


def test_ranges_of_columns_have_names_that_can_be_given_again() -> None:
    model = nn.Linear(6, 4)
    assert _names(model, "weight[:, 0:3]") == ["weight[:, 0:3]"]
    assert _names(model, "weight[ 0:2 ,-2: ]") == ["weight[0:2, 4:6]"]
    assert _names(model, "weight[1:, :]") == ["weight[1:4]"]
    assert _names(model, "weight[:, :]") == ["weight[0:4]"]
    assert _names(model, "weight[/2]") == ["weight[0:2]", "weight[2:4]"]
    assert _names(model, "weight[:, /3]") == ["weight[:, 0:2]", "weight[:, 2:4]", "weight[:, 4:6]"]
    assert _names(model, "weight[1:3/2, 2:6/2]") == [
        "weight[1:2, 2:4]",
        "weight[1:2, 4:6]",
        "weight[2:3, 2:4]",
        "weight[2:3, 4:6]",
    ]
    for name in _names(model, ["weight[/2, /2]", "weight[:, /2]", "weight[/4]"]):
        assert _names(model, name) == [name]


def test_equal_parts_are_stacked_part_by_part() -> None:
    model = SeparateProjections()
    assert _names(model, "q.weight[/2]+k.weight[/2]") == ["q.weight[0:2]+k.weight[0:2]", "q.weight[2:4]+k.weight[2:4]"]
    assert _names(model, "q.weight[/2]+k.weight") == ["q.weight[0:2]+k.weight", "q.weight[2:4]+k.weight"]
    with pytest.raises(LayerError, match=r"cut into \[2, 4\] layers"):
        resolve_layers(model, "q.weight[/2]+k.weight[/4]")


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        ("head.weight[:, 0:9]", "columns of .* within 0:4 .*has 4 columns"),
        ("head.weight[:, 2:2]", "within 0:4"),
        ("head.weight[0:9, 0:2]", "rows of .* within 0:3"),
        ("head.weight[/2]", "cannot be cut into 2 equal parts: they are 3"),
        ("head.weight[:, /0]", "cannot be cut into 0 equal parts"),
        ("head.weight[:, 0:2]+embed.weight", r"equally many columns, got \[2, 5\]"),
        ("embed.weight[:, 0:3]+embed.weight[0:2, 2:5]", "entries of 'embed.weight' twice"),
        ("head.weight[heads=2]", "not known as a projection"),
        ("blocks.0.qkv.weight[heads]", r"do not say how many heads it has; write 'blocks.0.qkv.weight\[heads=8\]'"),
        ("blocks.0.qkv.weight[heads=5]", "12 rows .* cannot be cut into 15 heads"),
        ("blocks.0.nothing[heads]", "Unknown layer"),
    ],
)
def test_what_is_wrong_is_said(layer: str, words: str) -> None:
    with pytest.raises(LayerError, match=words):
        resolve_layers(Transformer(), layer)


class Grouped(nn.Module):
    """Four query heads of width 2 share two heads of keys and values; all projections are fused, or none."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.num_heads, self.num_key_value_heads = 4, 2
        if fused:
            self.qkv_proj = nn.Linear(6, 16)
        else:
            self.q_proj, self.k_proj, self.v_proj = nn.Linear(6, 8), nn.Linear(6, 4), nn.Linear(6, 4)
        self.o_proj = nn.Linear(8, 6)


def test_heads_of_multihead_attention() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.MultiheadAttention(8, 2))
    rows = [f"1.in_proj_weight[{at}:{at + 4}]" for at in range(0, 24, 4)]
    columns = ["1.out_proj.weight[:, 0:4]", "1.out_proj.weight[:, 4:8]"]
    assert _names(model, "1[heads]") == _names(model, "?[heads]") == rows + columns
    assert _names(model, "*.in_proj_weight[heads]") == rows
    assert _names(model, "1.out_proj[heads]") == columns
    assert _names(model, "1.in_proj_weight[heads=4]") == [f"1.in_proj_weight[{at}:{at + 2}]" for at in range(0, 24, 2)]
    apart = nn.MultiheadAttention(8, 2, kdim=3, vdim=5)
    assert _names(apart, "k_proj_weight[heads]") == ["k_proj_weight[0:4]", "k_proj_weight[4:8]"]


def test_heads_of_grouped_attention() -> None:
    model = nn.Sequential(Grouped(False), Grouped(True))
    assert len(_names(model, "0.q_proj[heads]")) == 4
    assert _names(model, "0.v_proj[heads]") == ["0.v_proj.weight[0:2]", "0.v_proj.weight[2:4]"]
    assert _names(model, "0.k_proj[heads=1]") == ["0.k_proj.weight[0:4]"]
    assert _names(model, "1.qkv_proj[heads]") == [f"1.qkv_proj.weight[{at}:{at + 2}]" for at in range(0, 16, 2)]
    assert _names(model, "1.o_proj[heads]") == [f"1.o_proj.weight[:, {at}:{at + 2}]" for at in range(0, 8, 2)]
    assert len(_names(model, "0[heads]")) == 4 + 2 + 2 + 4


def test_a_head_is_measured_like_any_layer() -> None:
    model = Attention(True).double()
    data = [(images(6, 3, 5), torch.randint(4, (6,)))]
    results = ks.measure(model, LOSS, data, layers=["attention[heads]"], progress=False)
    assert len(results.layers) == 6 + 2
    row = results.select(layer="attention.out_proj.weight[:, 0:3]", approximation="shampoo2").rows[0]
    whole = oracle.gauss_newton(model, LOSS, *data[0], "attention.out_proj.weight").view(6, 6, 6, 6)
    H = whole[:, :3, :, :3].reshape(18, 18)
    K = oracle.approximation_of_matrix("shampoo2", H, (6, 3))
    assert row.cosine == pytest.approx(oracle.cosine(H, K), abs=1e-9)


def test_a_history_has_blocks_of_gradients() -> None:
    model = nn.Linear(6, 4).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    layer = "weight[:, 0:2]+weight[:, 4:6]"
    history = ks.GradientHistory.attach(optimizer, model, layers=[layer])
    model.weight.grad = torch.randn(4, 6, dtype=torch.float64)
    optimizer.step()
    history.detach()
    expected = torch.cat([model.weight.grad[:, 0:2], model.weight.grad[:, 4:6]])
    assert torch.equal(history.read(layer, 0, 1)[0], expected)


def test_a_watched_block_has_its_own_norms() -> None:
    model = nn.Linear(6, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ks.watch(optimizer, model, every=1, layers=["weight[1:3, 2:5]"]) as watch:
        before = model.weight.detach().clone()
        model(torch.randn(8, 6)).square().mean().backward()
        optimizer.step()
    (record,) = watch.to_pandas().to_dict("records")
    assert record["weight_norm"] == pytest.approx(float(before[1:3, 2:5].norm()), rel=1e-5)
    assert model.weight.grad is not None
    assert record["gradient_norm"] == pytest.approx(float(model.weight.grad[1:3, 2:5].norm()), rel=1e-5)


def test_advice_is_for_whole_parameters() -> None:
    data = [(torch.randn(8, 6), torch.randint(4, (8,)))]
    with pytest.raises(LayerError, match="advice is for whole parameters"):
        ks.advise(nn.Linear(6, 4), LOSS, data, layers=["weight[:, 0:3]"], progress=False)
