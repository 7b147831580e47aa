"""The grammar of layer names."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kronscope.errors import LayerError, ModelError
from kronscope.gradients.matrices import resolve_layers
from tests.gradients.zoo import SeparateProjections, TiedLanguageModel, Transformer


def _names(model: nn.Module, layers: list[str] | None = None) -> list[str]:
    return [spec.name for spec in resolve_layers(model, layers)]


def test_none_takes_every_matrix_once_flattened_from_the_second_dimension() -> None:
    model = nn.Sequential(nn.Conv3d(2, 4, (1, 2, 3)), nn.BatchNorm3d(4), nn.Embedding(7, 3))
    specs = resolve_layers(model)
    assert [(spec.name, spec.shape) for spec in specs] == [("0.weight", (4, 12)), ("2.weight", (7, 3))]
    assert _names(TiedLanguageModel()) == ["tokens.weight", "positions.weight", "hidden.weight"]


def test_frozen_parameters_count() -> None:
    assert _names(nn.Linear(2, 2).requires_grad_(False)) == ["weight"]


def test_patterns_ranges_stacks_and_modules() -> None:
    model = Transformer()
    assert _names(model, ["blocks.*.qkv.weight"]) == ["blocks.0.qkv.weight", "blocks.1.qkv.weight"]
    assert _names(model, ["blocks.*.qkv.weight[4:8]"]) == ["blocks.0.qkv.weight[4:8]", "blocks.1.qkv.weight[4:8]"]
    assert _names(model, ["blocks.?.up.*"]) == ["blocks.0.up.weight", "blocks.1.up.weight"]
    assert _names(model, ["head", "embed.weight", "head.weight"]) == ["head.weight", "embed.weight"]
    assert _names(model, ["blocks.0.qkv.weight[-4:]"]) == ["blocks.0.qkv.weight[8:12]"]
    (stack,) = resolve_layers(SeparateProjections(), ["q.weight[1:3] + k + v.weight[:1]"])
    assert stack.segments == (("q.weight", 1, 3, 0, 5), ("k.weight", 0, 4, 0, 5), ("v.weight", 0, 1, 0, 5))
    assert stack.shape == (7, 5)


def test_a_single_name_may_be_given_as_a_string() -> None:
    assert [spec.name for spec in resolve_layers(nn.Linear(2, 2), "weight")] == ["weight"]


def test_all_names_of_a_shared_parameter_lead_to_it() -> None:
    model = TiedLanguageModel()
    specs = resolve_layers(model, ["head.weight", "tokens.weight"])
    assert [spec.name for spec in specs] == ["head.weight", "tokens.weight"]
    assert {spec.segments for spec in specs} == {(("tokens.weight", 0, 5, 0, 4),)}
    # A pattern that fits both names means the parameter once.
    assert _names(model, ["*"]) == _names(model)


def test_gather_stacks_rows() -> None:
    (spec,) = resolve_layers(SeparateProjections(), ["q.weight[1:3]+k.weight"])
    grads = {"q.weight": torch.randn(2, 4, 5), "k.weight": torch.randn(2, 4, 5)}
    assert torch.equal(spec.gather(grads, leading=1), torch.cat([grads["q.weight"][:, 1:3], grads["k.weight"]], 1))


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        (["blocks.0.qvk.weight"], "Unknown layer .*blocks.0.qkv.weight"),
        (["zzz"], "Unknown layer 'zzz'.*nearest names"),
        (["*.nothing"], "Unknown layer"),
        (["head.bias"], "'head.bias' of shape \\(3,\\).* not a matrix"),
        (["*.bias"], "fewer than two dimensions"),
        (["blocks.0"], "several matrices"),
        (["blocks.0.norm"], "no parameter of two or more dimensions"),
        (["head.weight[0:4]"], "within 0:3"),
        (["head.weight[2:2]"], "within 0:3"),
        (["head.weight[-9:2]"], "within 0:3"),
        (["head.weight+embed.weight[0:9]"], "within 0:4"),
        (["head.weight+embed.weight"], "equally many columns, got \\[4, 5\\]"),
        (["blocks.*.qkv.weight+head.weight"], "must be one parameter, but fits 2"),
        (["head.weight[0:2]+head.weight[1:3]"], "twice"),
        ([], "No layers"),
        ([3], "got int"),
    ],
)
def test_what_is_wrong_is_said(layers: list[str], words: str) -> None:
    with pytest.raises(LayerError, match=words):
        resolve_layers(Transformer(), layers)


def test_models_without_matrices() -> None:
    with pytest.raises(LayerError, match="no parameter of two or more"):
        resolve_layers(nn.LayerNorm(3))


def test_lazy_parameters_need_a_first_batch() -> None:
    with pytest.raises(ModelError, match="run one batch"):
        resolve_layers(nn.LazyLinear(3))
