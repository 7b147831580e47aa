"""A module, its named parameters and groups made from it give the same plan, on architectures people train."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from kronscope.optim import SOAP, KLShampoo, Shampoo, param_groups
from kronscope.optim.roles import roles_in, roles_of


def plan(optimizer: Shampoo | SOAP | KLShampoo) -> dict[str, str]:
    return {row.name: row.method for row in optimizer.explain().rows}


def assert_one_plan(model: nn.Module) -> dict[str, str]:
    found = plan(Shampoo(model))
    assert plan(Shampoo(model.named_parameters())) == found
    assert plan(Shampoo(param_groups(model))) == {name: how for name, how in found.items() if "frozen" not in how}
    return found


# --- transformers ---------------------------------------------------------------------------------------------------

_SMALL = {
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
}
_T5 = {"vocab_size": 100, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
_GPT2 = {"vocab_size": 100, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16}
_RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic", "num_labels": 5}
_VIT = {**_SMALL, "image_size": 8, "patch_size": 4}
_MOE = {**_SMALL, "num_local_experts": 4, "num_experts": 4, "moe_intermediate_size": 32, "head_dim": 8}

# class, configuration, options, what gets AdamW though it is a matrix (by the ends of names)
ARCHITECTURES: list[tuple[str, str, dict[str, Any], set[str]]] = [
    ("T5ForConditionalGeneration", "T5Config", _T5, {"shared.weight", "relative_attention_bias.weight"}),
    ("ResNetForImageClassification", "ResNetConfig", _RESNET, {"classifier.1.weight"}),
    ("BertForQuestionAnswering", "BertConfig", _SMALL, {"embeddings.weight", "qa_outputs.weight"}),
    ("BertForMaskedLM", "BertConfig", _SMALL, {"embeddings.weight"}),
    ("BertForSequenceClassification", "BertConfig", _SMALL, {"embeddings.weight", "classifier.weight"}),
    ("RobertaForMaskedLM", "RobertaConfig", _SMALL, {"embeddings.weight", "lm_head.dense.weight"}),
    ("GPT2LMHeadModel", "GPT2Config", _GPT2, {"wte.weight", "wpe.weight"}),
    ("GPT2ForSequenceClassification", "GPT2Config", _GPT2, {"wte.weight", "wpe.weight", "score.weight"}),
    ("LlamaForCausalLM", "LlamaConfig", _SMALL, {"embed_tokens.weight", "lm_head.weight"}),
    ("LlamaForCausalLM", "LlamaConfig", {**_SMALL, "tie_word_embeddings": True}, {"embed_tokens.weight"}),
    ("LlamaForSequenceClassification", "LlamaConfig", _SMALL, {"embed_tokens.weight", "score.weight"}),
    ("LlamaModel", "LlamaConfig", _SMALL, {"embed_tokens.weight"}),
    (
        "ViTForImageClassification",
        "ViTConfig",
        _VIT,
        {"cls_token", "position_embeddings", "classifier.weight"},
    ),
    ("MixtralForCausalLM", "MixtralConfig", _MOE, {"embed_tokens.weight", "lm_head.weight"}),
    ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", _MOE, {"embed_tokens.weight", "lm_head.weight"}),
    (
        "GptOssForCausalLM",
        "GptOssConfig",
        _MOE,
        {"embed_tokens.weight", "lm_head.weight", "gate_up_proj_bias", "down_proj_bias"},
    ),
]


@pytest.mark.parametrize(
    ("kind", "config", "options", "elementwise"), ARCHITECTURES, ids=[f"{a[0]}{i}" for i, a in enumerate(ARCHITECTURES)]
)
def test_every_route_gives_the_same_plan_and_spares_embeddings_and_heads(kind, config, options, elementwise):
    transformers = pytest.importorskip("transformers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = getattr(transformers, kind)(getattr(transformers, config)(**options))
    found = assert_one_plan(model)
    matrices = {name for name, param in model.named_parameters() if param.ndim > 1}
    spared = {name for name in matrices if found[name].startswith("AdamW")}
    assert {end for end in elementwise if not any(name.endswith(end) for name in spared)} == set()
    assert {name for name in spared if not name.endswith(tuple(elementwise))} == set()


@pytest.mark.parametrize("kind", ["MixtralForCausalLM", "Qwen3MoeForCausalLM", "GptOssForCausalLM"])
def test_the_experts_of_transformers_are_matrices_of_their_own(kind):
    transformers = pytest.importorskip("transformers")
    model = getattr(transformers, kind)(getattr(transformers, kind.replace("ForCausalLM", "Config"))(**_MOE))
    experts = [(name, param) for name, param in model.named_parameters() if "experts" in name and param.ndim == 3]
    assert experts
    rows = {row.name: row for row in Shampoo(model).explain().rows}
    for name, param in experts:
        assert rows[name].blocks == param.shape[0], name
        assert rows[name].factors == tuple(param.shape[1:]), name


# --- models written by hand -----------------------------------------------------------------------------------------


class ResNet(nn.Module):
    """The names of torchvision and timm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, bias=False)
        self.layer1 = nn.Sequential(nn.Conv2d(8, 8, 3, bias=False), nn.Conv2d(8, 16, 3, bias=False))
        self.fc = nn.Linear(16, 5)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 6)
        self.word_embedding = nn.Embedding(50, 6)
        self.lstm = nn.LSTM(6, 7, bidirectional=True)
        self.decoder = nn.Linear(14, 9)


class Adapted(nn.Module):
    """What peft makes of a classifier: frozen base, adapters, and a head saved whole."""

    def __init__(self) -> None:
        super().__init__()
        block = nn.ModuleDict(
            {
                "base_layer": nn.Linear(16, 16),
                "lora_A": nn.ModuleDict({"default": nn.Linear(16, 4, bias=False)}),
                "lora_B": nn.ModuleDict({"default": nn.Linear(4, 16, bias=False)}),
            }
        )
        score = nn.ModuleDict(
            {
                "original_module": nn.Linear(16, 3, bias=False),
                "modules_to_save": nn.ModuleDict({"default": nn.Linear(16, 3, bias=False)}),
            }
        )
        layers = nn.ModuleList([nn.ModuleDict({"q_proj": block})])
        inner = nn.ModuleDict({"embed_tokens": nn.Embedding(20, 16), "layers": layers})
        self.base_model = nn.ModuleDict({"model": nn.ModuleDict({"model": inner, "score": score})})
        for name, param in self.named_parameters():
            param.requires_grad_("lora" in name or "modules_to_save" in name)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


MODELS: dict[str, tuple[Callable[[], nn.Module], set[str]]] = {
    "resnet": (ResNet, {"fc.weight"}),
    "mlp": (mlp, {"2.weight"}),
    "one layer": (lambda: nn.Linear(6, 3), set()),
    "list": (
        lambda: nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])}),
        {"layers.2.weight"},
    ),
    "one block": (
        lambda: nn.ModuleDict(
            {"layers": nn.ModuleList([nn.ModuleDict({"up": nn.Linear(4, 8), "down": nn.Linear(8, 4)})])}
        ),
        set(),
    ),
    "blocks": (lambda: nn.Sequential(*[nn.TransformerEncoderLayer(8, 2, 16) for _ in range(2)]), set()),
    "peft": (
        Adapted,
        {"base_model.model.score.modules_to_save.default.weight"},
    ),
}


@pytest.mark.parametrize("which", MODELS)
def test_hand_written_models_have_one_plan_too(which):
    build, heads = MODELS[which]
    found = assert_one_plan(build())
    assert {name for name, how in found.items() if how == "AdamW (head)"} == heads


@pytest.mark.parametrize("kind", [Shampoo, SOAP, KLShampoo])
def test_a_module_trains_as_its_named_parameters_do(kind):
    models = [ResNet().double() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [
        kind(models[0], lr=1e-2, weight_decay=0.1),
        kind(models[1].named_parameters(), 1e-2, weight_decay=0.1),
    ]
    for _ in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            torch.manual_seed(1)
            for param in model.parameters():
                param.grad = torch.randn_like(param)
            optimizer.step()
    for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert optimizers[0].state_dict()["param_groups"] == optimizers[1].state_dict()["param_groups"]


def test_a_model_knows_its_tables_whatever_they_are_called():
    model = Recurrent()
    roles = {name: roles_in(model)[param] for name, param in model.named_parameters()}
    assert roles["words.weight"] == roles["word_embedding.weight"] == "embedding"
    assert roles["decoder.weight"] == "head"
    names, params = zip(*model.named_parameters(), strict=True)
    assert dict(zip(names, roles_of(names, params), strict=True))["words.weight"] == "", "only the module can tell"


class Speaking(nn.Module):
    """A model that says what makes its outputs, which names do not and order neither."""

    def __init__(self) -> None:
        super().__init__()
        self.answer = nn.Linear(6, 9)
        self.blocks = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))

    def get_output_embeddings(self) -> nn.Module:
        return self.answer


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_model_says_itself_what_makes_its_outputs(wrapped):
    model = nn.ModuleDict({"module": Speaking()}) if wrapped else Speaking()
    heads = [name for name, how in plan(Shampoo(model)).items() if how == "AdamW (head)"]
    assert [name.removeprefix("module.") for name in heads] == ["answer.weight"]


def test_the_groups_of_a_run_are_one_model():
    """With a learning rate for each layer the last matrix of each group is not a head."""
    groups = [{"params": [(name, param)], "lr": 0.1} for name, param in mlp().named_parameters()]
    assert [how for how in plan(Shampoo(groups)).values() if "head" in how] == ["AdamW (head)"]


@pytest.mark.parametrize("call", ["{}", "fc{}", "layers.{}"])
def test_a_group_that_begins_with_the_head_does_not_hide_it(call):
    """A head with a learning rate of its own may be given first; the number in its name tells that it is last."""
    layers = {call.format(place): nn.Linear(8, size) for place, size in ((9, 8), (10, 8), (11, 4))}
    named = {f"{name}.weight": layer.weight for name, layer in layers.items()}
    last = call.format(11) + ".weight"
    groups = [
        {"params": [(last, named[last])], "lr": 0.1},
        {"params": [(name, weight) for name, weight in named.items() if name != last]},
    ]
    assert [name for name, how in plan(Shampoo(groups)).items() if how == "AdamW (head)"] == [last]


def test_numbers_that_only_fall_are_sizes_and_tell_nothing():
    sizes = ((8, 64), (64, 32), (32, 8))
    named = [(f"fc{rows}.weight", nn.Parameter(torch.zeros(rows, columns))) for columns, rows in sizes]
    assert [name for name, how in plan(Shampoo(named)).items() if how == "AdamW (head)"] == ["fc8.weight"]


def test_biases_of_experts_and_vectors_with_idle_dimensions_get_adamw():
    named = [
        ("experts.down_bias", nn.Parameter(torch.zeros(4, 6))),
        ("blocks.0.layer_scale", nn.Parameter(torch.zeros(1, 1, 6))),
        ("blocks.0.fc.weight", nn.Parameter(torch.zeros(6, 6))),
    ]
    assert list(plan(Shampoo(named)).values()) == ["AdamW (bias)", "AdamW (vector)", "Shampoo (whole)"]


def test_the_lengths_of_weight_normalisation_are_vectors():
    """Of a convolution they are (d, 1, 1), of a linear layer (d, 1): the same thing, and it has AdamW."""
    normed = nn.utils.parametrizations.weight_norm
    model = nn.Sequential(normed(nn.Conv1d(3, 4, 1)), normed(nn.Linear(4, 6)), normed(nn.Linear(6, 2)))
    found = {name: how for name, how in assert_one_plan(model).items() if "bias" not in name}
    assert list(found.values()) == [
        *("AdamW (vector)", "Shampoo (whole)"),
        *("AdamW (vector)", "Shampoo (whole)"),
        *("AdamW (vector)", "AdamW (head)"),
    ]
    with pytest.warns(FutureWarning, match="weight_norm"):
        earlier = nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 6)), nn.Linear(6, 2))
    assert assert_one_plan(earlier)["0.weight_g"] == "AdamW (vector)"


@pytest.mark.parametrize("route", [Shampoo, param_groups])
def test_a_parametrized_weight_is_not_worked_out_to_make_a_plan(route: Any) -> None:
    """Spectral normalisation takes a step of its power iteration at each look."""
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)), nn.Linear(8, 2))
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    route(model)
    assert before
    assert all(torch.equal(before[name], buffer) for name, buffer in model.named_buffers())


def test_a_parametrized_table_is_known_by_its_module():
    model = nn.ModuleDict({"words": nn.Embedding(9, 4), "mix": nn.Linear(4, 4), "decoder": nn.Linear(4, 3)})
    nn.utils.parametrizations.spectral_norm(model["words"])
    assert plan(Shampoo(model))["words.parametrizations.weight.original"] == "AdamW (embedding)"


# --- parameters without names ---------------------------------------------------------------------------------------


def meta(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, device="meta"))


def test_what_looks_like_an_embedding_and_has_no_name_gets_adamw_with_one_warning():
    params = [meta(32000, 512), meta(512, 2048), meta(32000, 512)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = SOAP([{"params": params[:2]}, {"params": params[2:]}])
    assert len(caught) == 1
    assert "32000 x 512" in str(caught[0].message)
    assert "SOAP(model, ...)" in str(caught[0].message)
    assert caught[0].filename == __file__
    kinds = list(plan(optimizer).values())
    assert kinds[0] == kinds[2] == "AdamW (shaped like an embedding or head)"
    assert kinds[1] == "SOAP (blocks of 256x256)"


def test_where_nothing_is_at_stake_nobody_is_warned():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Shampoo([meta(32000, 512)], method="kronecker")
        Shampoo([meta(320, 64), meta(64, 64)], method="kronecker")
        Shampoo([{"params": [meta(32000, 512)], "method": "adam"}])
        Shampoo([("lm_head.weight", meta(32000, 512))])
        # one matrix has nothing beside it that it could be taken for, and vectors get AdamW in any case
        Shampoo([meta(64, 64), meta(64)])


@pytest.mark.parametrize(
    "params",
    [
        lambda: [meta(4000, 64), meta(64, 64), meta(64)],
        lambda: nn.Sequential(nn.Linear(784, 1000), nn.Linear(1000, 10)).parameters(),
        lambda: [{"params": [meta(100, 8)]}, {"params": [meta(8, 8)], "lr": 0.1}],
        # as long as a vocabulary, but one of many: the layers of a large network
        lambda: [meta(24576, 3072) for _ in range(4)],
    ],
)
def test_matrices_without_names_are_preconditioned_with_one_warning(params: Any) -> None:
    """What is too small to be told by its shape was preconditioned without a word."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = KLShampoo(params())
    assert [str(warning.message).split(",")[0] for warning in caught] == [
        "KLShampoo was given parameters without names"
    ]
    assert "KLShampoo(model, ...)" in str(caught[0].message)
    assert "model.named_parameters()" in str(caught[0].message)
    assert caught[0].filename == __file__
    assert {how.split(" (")[0] for how in plan(optimizer).values()} <= {"KL-Shampoo", "AdamW"}
    with pytest.warns(UserWarning, match="without names, and preconditions all 2 matrices"):
        optimizer.add_param_group({"params": [meta(5, 5), meta(6, 5)]})


def test_a_sequence_says_nothing_of_its_tables_so_their_shape_does():
    with pytest.warns(UserWarning, match="32000 x 512"):
        found = plan(Shampoo([("0.weight", meta(32000, 512)), ("1.weight", meta(512, 512))]))
    assert found["0.weight"] == "AdamW (shaped like an embedding or head)"


@pytest.mark.parametrize("route", [lambda model: model, lambda model: model.named_parameters()])
def test_layers_that_thaw_train(route: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3))
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    optimizer = Shampoo(route(model), lr=1e-2)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for thawed in (False, True):
        model[0].requires_grad_(thawed)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(torch.randn(8, 4)), torch.randint(3, (8,))).backward()
        optimizer.step()
        moved = [not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True)]
        assert moved == [thawed, thawed, True, True, True, True]


# --- towers ---------------------------------------------------------------------------------------------------------


def _tower(*sizes: int) -> nn.Sequential:
    layers = [nn.Linear(first, second) for first, second in itertools.pairwise(sizes)]
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.ReLU())))


class _Clip(nn.Module):
    """Two towers of the same build, and a projection of each beside them."""

    def __init__(self, text: int, vision: int) -> None:
        super().__init__()
        self.text_model, self.vision_model = _tower(8, text, text), _tower(12, vision, vision)
        self.visual_projection = nn.Linear(vision, 6, bias=False)
        self.text_projection = nn.Linear(text, 6, bias=False)


TOWERS: dict[str, tuple[Callable[[], nn.Module], set[str]]] = {
    "clip": (lambda: _Clip(16, 20), {"visual_projection.weight", "text_projection.weight"}),
    "clip of one width": (lambda: _Clip(16, 16), {"visual_projection.weight", "text_projection.weight"}),
    "two towers": (
        lambda: nn.ModuleDict({"query": _tower(8, 16, 6), "document": _tower(30, 20, 6)}),
        {"query.2.weight", "document.2.weight"},
    ),
    "actor and critic": (
        lambda: nn.ModuleDict({"actor": _tower(8, 16, 4), "critic": _tower(8, 16, 1)}),
        {"actor.2.weight", "critic.2.weight"},
    ),
    # what follows is one after the other, and has one end
    "autoencoder": (
        lambda: nn.ModuleDict({"encoder": _tower(30, 16, 4), "decoder": _tower(4, 16, 30)}),
        {"decoder.2.weight"},
    ),
    "attention": (
        lambda: nn.ModuleDict({name: nn.Linear(8, 8) for name in ("q_proj", "k_proj", "v_proj", "o_proj")}),
        {"o_proj.weight"},
    ),
    "numbered": (lambda: nn.ModuleDict({f"fc{i}": nn.Linear(8, 8) for i in range(3)}), {"fc2.weight"}),
}


@pytest.mark.parametrize("kind", TOWERS)
def test_layers_that_end_towers_alike_are_treated_alike(kind: str) -> None:
    make, heads = TOWERS[kind]
    found = assert_one_plan(make())
    assert {name for name, how in found.items() if "head" in how} == heads


def test_the_projections_of_clip_are_treated_alike() -> None:
    transformers = pytest.importorskip("transformers")
    shared = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = {**shared, "vocab_size": 100, "bos_token_id": 1, "eos_token_id": 2}
    vision = {**shared, "hidden_size": 48, "image_size": 16, "patch_size": 8}
    model = transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=24))
    found = assert_one_plan(model)
    assert {how for name, how in found.items() if "projection" in name} == {"AdamW (head)"}
