"""Advice compares what it says it compares, prices it by the optimizers' plans, and trains."""

from __future__ import annotations

import itertools
import json
import math
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import kronscope as ks
from kronscope.advising.advise import Advice, LayerAdvice, Option, _choice
from kronscope.advising.candidates import Blocks, OneSide, candidates
from kronscope.errors import LayerError, OptionError
from kronscope.kron.block_diagonal import BlockDiagonal
from kronscope.measures import Results
from kronscope.optim.blocks import LayoutOptions, plan_layout
from tests.report.chromium import Browser

LOSS = nn.CrossEntropyLoss()


class Attention(nn.Module):
    """One fused attention layer and a head, for sequences of vectors."""

    def __init__(self, width: int = 12, heads: int = 2) -> None:
        super().__init__()
        self.num_heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.fc = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        logits: torch.Tensor = self.fc(mixed.transpose(1, 2).flatten(2).mean(1))
        return logits


def network() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(64, 24), nn.Tanh(), nn.Linear(24, 3))


def images(count: int = 12) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.randn(count, 1, 6, 6), torch.randint(3, (count,)))]


def gradients(m: int, n: int, count: int = 30) -> torch.Tensor:
    return torch.randn(count, m, n, dtype=torch.float64)


@pytest.mark.parametrize("side", [0, 1])
def test_one_side_is_its_formula(side: int) -> None:
    G = gradients(3, 5)
    K = OneSide(side).fit(ks.GradientStream.from_tensors(G))
    L, R = torch.einsum("imn,ikn->mk", G, G) / 30, torch.einsum("imn,imk->nk", G, G) / 30
    eye = torch.eye(3 if side else 5).double()
    expected = torch.kron(eye, R) / 3 if side else torch.kron(L, eye) / 5
    torch.testing.assert_close(K.to_dense(), expected)


@pytest.mark.parametrize("fit", [Blocks("split", parts=3), Blocks(size=4), Blocks(size=2), Blocks("heads", parts=6)])
def test_blocks_are_shampoo_of_each_block_alone(fit: Blocks) -> None:
    G = gradients(6, 5)
    stream = ks.GradientStream.from_tensors(G)
    rows = [(a, a + 6 // fit.parts) for a in range(0, 6, 6 // fit.parts)] if fit.parts else _cut(6, fit.size)
    cols = [(0, 5)] if fit.parts else _cut(5, fit.size)
    places, blocks = torch.arange(30).view(6, 5), []
    for (a, b), (c, d) in itertools.product(rows, cols):
        own = ks.GradientStream.from_tensors(G[:, a:b, c:d].contiguous())
        blocks.append((places[a:b, c:d], ks.approx.get("shampoo2").fit(own)))
    expected = BlockDiagonal((6, 5), blocks)
    torch.testing.assert_close(fit.fit(stream).to_dense(), expected.to_dense())
    H = ks.SecondMoment(stream).to_dense()
    cosine = float((H * expected.to_dense()).sum() / H.norm() / expected.to_dense().norm())
    assert ks.cosine(ks.SecondMoment(stream), fit.fit(stream)) == pytest.approx(cosine)


def _cut(length: int, size: int) -> list[tuple[int, int]]:
    return [(a, min(a + size, length)) for a in range(0, length, size)]


@pytest.mark.parametrize("family", [ks.Shampoo, ks.SOAP, ks.KLShampoo])
@pytest.mark.parametrize(("method", "factors"), [("left", (6,)), ("right", (10,)), ("kronecker", (6, 10))])
def test_one_factor_alone_can_be_trained_with(family: type, method: str, factors: tuple[int, ...]) -> None:
    model = nn.Linear(10, 6)
    optimizer = family([{"params": [("fc.weight", model.weight)], "method": method}], lr=1e-2)
    (row,) = optimizer.explain().rows
    assert row.factors == factors
    model(torch.randn(4, 10)).square().sum().backward()
    before = model.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(model.weight, before)
    operator = optimizer.operator(model.weight)
    if family is ks.Shampoo and method != "kronecker":
        grad = model.weight.grad
        assert grad is not None
        expected = OneSide(method == "right").fit(ks.GradientStream.from_tensors(grad.double().unsqueeze(0)))
        torch.testing.assert_close(operator.to_dense(), expected.to_dense(), rtol=1e-5, atol=1e-8)


def test_one_factor_needs_a_matrix_and_keeps_its_side_in_a_budget() -> None:
    with pytest.raises(OptionError, match="needs a matrix"):
        plan_layout((4, 3, 3, 3), LayoutOptions(method="left", view="modes"))
    with pytest.raises(OptionError, match="method must be"):
        LayoutOptions(method="middle")
    model = nn.Linear(512, 256, bias=False)
    groups = [{"params": [("fc.weight", model.weight)], "method": "right"}]
    (row,) = ks.Shampoo(groups, lr=1e-2, memory_budget=2**20).explain().rows
    assert set(row.factors) == {256}
    assert row.blocks > 1


def test_fused_attention_is_split_and_cut_by_heads() -> None:
    model = Attention()
    assert [one.name for one in candidates("qkv.weight", model.qkv.weight, model)] == [
        *("shampoo2", "left", "right", "diagonal", "blocks", "split", "heads"),
    ]
    options = {one.name: one.options for one in candidates("qkv.weight", model.qkv.weight, model)}
    assert options["split"]["split"] == 3
    assert options["heads"]["split"] == 6
    assert [one.name for one in candidates("fc.weight", model.fc.weight, model)][-1] != "heads"


def test_sides_that_are_too_long_have_no_factor() -> None:
    table = nn.Parameter(torch.empty(50000, 16))
    assert [one.name for one in candidates("emb.weight", table, nn.Module())] == ["right", "diagonal", "blocks"]


def test_advice_is_measured_priced_and_can_be_trained_with() -> None:
    model, data = network(), images()
    advice = ks.advise(model, LOSS, data, progress=False)
    assert [entry.layer for entry in advice.layers] == ["0.weight", "3.weight", "5.weight"]
    for entry in advice.layers:
        measured = {row.approximation: row.cosine for row in advice.results.select(layer=entry.layer)}
        assert {one.name: one.cosine for one in entry.options} == {k: v for k, v in measured.items() if k != "optimal"}
        assert entry.optimal == measured["optimal"]
        assert [one.cosine for one in entry.options] == sorted((one.cosine for one in entry.options), reverse=True)
        if entry.layer != "5.weight":
            assert entry.choice.cosine >= entry.options[0].cosine - advice.tolerance
        prices = {one.name: one.milliseconds for one in entry.options}
        assert prices["diagonal"] < prices["shampoo2"]
        assert max(prices["left"], prices["right"]) < prices["shampoo2"]
    head = advice.layers[-1]
    assert (head.choice.name, head.choice.settings) == ("diagonal", {"method": "adam"})
    assert head.reason.startswith("AdamW, as for every head")
    fitted = ks.advise(model, LOSS, data, tables=True, layers="5.weight", progress=False).layers[0]
    assert fitted.choice.cosine >= fitted.options[0].cosine - advice.tolerance
    groups = advice.param_groups(model)
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
    plan = {row.name: row for row in ks.Shampoo(groups, lr=1e-2).explain().rows}
    for entry in advice.layers:
        row = plan[entry.layer]
        assert (row.factors == ()) == (entry.choice.name == "diagonal")
    optimizer = ks.Shampoo(advice.param_groups(model), lr=1e-2)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = LOSS(model(data[0][0]), data[0][1])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    text = " ".join(str(advice).split())
    assert all(entry.layer in text and entry.reason in text for entry in advice.layers)


@pytest.mark.parametrize("columns", [80, 100, 400])
def test_the_table_is_no_wider_than_the_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    options = (option("shampoo2", 1.0, 3.0), option("diagonal", 0.97, 1.0))
    names = [f"encoder.transformer_layers.{n}.self_attention_output.dense.weight" for n in range(3)]
    layers = tuple(
        LayerAdvice(name, (64, 288), 1.0, options, options[1], "a reason of many words " * 6) for name in names
    )
    text = str(Advice(layers, Results([]), 0.05))
    assert max(map(len, text.splitlines())) <= max(80, min(columns, 120))
    assert all(name in text.splitlines() for name in names)
    short = tuple(replace(layer, layer="fc", reason="cheaper") for layer in layers)
    assert len(str(Advice(short, Results([]), 0.05)).splitlines()) == 4


def test_attention_gets_all_options_and_measuring_changes_nothing() -> None:
    model = Attention()
    data = [(torch.randn(6, 4, 12), torch.randint(3, (6,)))]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    advice = ks.advise(model, LOSS, data, progress=False)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    (qkv,) = [entry for entry in advice.layers if entry.layer == "qkv.weight"]
    assert {"split", "heads"} <= {one.name for one in qkv.options}
    assert all(0 < one.cosine <= 1 for one in qkv.options)


def option(name: str, cosine: float, milliseconds: float) -> Option:
    return Option(name, {}, cosine, milliseconds, 0)


@pytest.mark.parametrize(
    ("options", "tolerance", "least", "chosen", "says"),
    [
        (
            [("shampoo2", 0.9, 4.0), ("left", 0.87, 1.0)],
            0.05,
            0.1,
            "left",
            "75 % cheaper than both sides, and its cosine is 0.03",
        ),
        ([("shampoo2", 0.9, 4.0), ("left", 0.899, 1.0)], 0.05, 0.1, "left", "both sides, and fits as well"),
        ([("shampoo2", 0.9, 4.0), ("left", 0.8, 1.0)], 0.05, 0.1, "shampoo2", "one-sided L would save 75 %"),
        ([("shampoo2", 0.9, 4.0), ("left", 0.8, 1.0)], 0.2, 0.1, "left", "cheaper"),
        ([("shampoo2", 0.9, 4.0), ("left", 0.89, 1.0)], 0.05, 10.0, "shampoo2", "next to nothing"),
        ([("shampoo2", math.nan, 4.0), ("diagonal", math.nan, 1.0)], 0.05, 0.1, "diagonal", "nothing could be"),
    ],
)
def test_what_is_recommended(
    options: list[tuple[str, float, float]], tolerance: float, least: float, chosen: str, says: str
) -> None:
    choice, reason = _choice([option(*one) for one in options], tolerance, least)
    assert choice.name == chosen
    assert says in reason


def test_layers_that_cannot_be_measured_are_left_out_with_a_word() -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.idle = nn.Linear(6, 3), nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.fc(x)
            return found

    data = [(torch.randn(8, 6), torch.randint(3, (8,)))]
    with pytest.warns(UserWarning, match=r"no advice for idle\.weight"):
        advice = ks.advise(Unused(), LOSS, data, progress=False)
    assert [entry.layer for entry in advice.layers] == ["fc.weight"]
    with pytest.raises(LayerError, match=r"idle\.weight"):
        ks.advise(Unused(), LOSS, data, layers="idle.weight", progress=False)


def test_names_that_look_like_patterns_are_names() -> None:
    odd = {"a[0]": nn.Linear(6, 5), "a0": nn.Linear(5, 5), "b*": nn.Linear(5, 5), "b?": nn.Linear(5, 4)}
    model = nn.Sequential(OrderedDict(odd))
    data = [(torch.randn(8, 6), torch.randint(4, (8,)))]
    advice = ks.advise(model, LOSS, data, progress=False)
    assert [entry.layer for entry in advice.layers] == [f"{name}.weight" for name in odd]
    # each gets another option, so that one that is taken for a pattern shows
    layers = tuple(
        replace(entry, choice=replace(entry.choice, settings={"lr": 10.0**-place}))
        for place, entry in enumerate(advice.layers)
    )
    groups = replace(advice, layers=layers).param_groups(model)
    rates = {name: group.get("lr") for group in groups for name, _ in group["params"] if name.endswith("weight")}
    assert rates == {"a[0].weight": 1.0, "a0.weight": 0.1, "b*.weight": 0.01, "b?.weight": 0.001}


def test_what_cannot_be_advised_on_is_said() -> None:
    model, data = network(), images(4)
    with pytest.raises(OptionError, match="tolerance must be"):
        ks.advise(model, LOSS, data, tolerance=1.5)
    with pytest.raises(LayerError, match="whole parameters"):
        ks.advise(model, LOSS, data, layers="3.weight[0:4]")
    model[3].requires_grad_(False)
    with pytest.raises(LayerError, match="is not trained"):
        ks.advise(model, LOSS, data, layers="3.weight")
    assert [one.layer for one in ks.advise(model, LOSS, data, progress=False).layers] == ["0.weight", "5.weight"]
    with pytest.raises(OptionError, match="fit no parameter"):
        ks.advise(model, LOSS, data, progress=False).param_groups(nn.Linear(2, 2))


@pytest.mark.browser
def test_the_page_shows_every_option(tmp_path: Path, opened: Browser) -> None:
    advice = ks.advise(network(), LOSS, images(), progress=False)
    data, page = advice.save(tmp_path)
    assert [entry["layer"] for entry in json.loads(data.read_text())["layers"]] == ["0.weight", "3.weight", "5.weight"]
    opened.size(1000, 800)
    opened.open(page)
    assert opened.texts("#table tbody td:nth-child(1)") == ["0.weight", "3.weight", "5.weight"]
    assert opened.texts("#table tbody td:nth-child(3)") == [entry.choice.title for entry in advice.layers]
    assert len(opened.texts("#all .track")) == sum(len(entry.options) for entry in advice.layers)
    assert opened.console == []
    assert all(address.startswith(("file:", "data:")) for address in opened.requests)
    opened.screenshot(tmp_path / "advice.png")


def test_prices_are_those_of_the_plan_so_that_small_layers_are_not_cut_for_nothing() -> None:
    """What calls cost counts: blocks of small matrices need fewer products and more calls."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(32, 96), nn.Tanh(), nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, 96), nn.Linear(96, 3)
    )
    data = [(torch.randn(24, 32), torch.randint(3, (24,)))]
    advice = ks.advise(model, nn.CrossEntropyLoss(), data, progress=False)
    plan = ks.Shampoo(model).explain()
    assert plan.rate is not None
    for entry in advice.layers[:-1]:
        (row,) = [row for row in plan.rows if row.name == entry.layer]
        prices = {one.name: one.milliseconds for one in entry.options}
        own = 1e3 * (row.cost + plan.call_cost * row.calls.later) / plan.rate
        assert prices["shampoo2"] == pytest.approx(own, rel=1e-6), entry.layer
        assert prices["blocks"] > prices["shampoo2"]
        assert entry.choice.name != "blocks"


def test_a_family_is_a_class() -> None:
    with pytest.raises(OptionError, match=r"family must be an optimizer's class, such as kronscope.SOAP, got 'soap'"):
        ks.advise(nn.Linear(2, 2), nn.MSELoss(), [], family="soap")  # type: ignore[arg-type]
