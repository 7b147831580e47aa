"""Hugging Face models, built from their configuration: nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kronscope.gradients.capture import Recorder
from kronscope.gradients.matrices import resolve_layers
from tests.gradients.naive import close, matrices, stream_matrices

transformers = pytest.importorskip("transformers")


def _gpt2() -> tuple[nn.Module, dict[str, Tensor], Tensor, Callable[[nn.Module, Any], Tensor]]:
    config = transformers.GPT2Config(
        n_embd=4,
        n_layer=1,
        n_head=2,
        vocab_size=4,
        n_positions=6,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation="eager",
    )
    inputs = {"input_ids": torch.randint(0, 4, (4, 3))}
    return transformers.GPT2LMHeadModel(config), inputs, torch.randint(0, 4, (4, 3)), _token_logits


def _token_logits(model: nn.Module, inputs: Any) -> Tensor:
    logits: Tensor = model(**inputs).logits
    return logits.transpose(1, 2)


def _logits(model: nn.Module, inputs: Any) -> Tensor:
    logits: Tensor = model(**inputs).logits
    return logits


def _bert() -> tuple[nn.Module, dict[str, Tensor], Tensor, Callable[[nn.Module, Any], Tensor]]:
    config = transformers.BertConfig(
        hidden_size=4,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=6,
        vocab_size=7,
        max_position_embeddings=5,
        num_labels=3,
        attn_implementation="eager",
    )
    mask = torch.ones(4, 3, dtype=torch.long)
    mask[1, 2] = 0
    inputs = {"input_ids": torch.randint(0, 7, (4, 3)), "attention_mask": mask}
    return transformers.BertForSequenceClassification(config), inputs, torch.randint(0, 3, (4,)), _logits


def _vit() -> tuple[nn.Module, dict[str, Tensor], Tensor, Callable[[nn.Module, Any], Tensor]]:
    # Eager attention takes its softmax in float32 whatever the model's type.
    config = transformers.ViTConfig(
        hidden_size=4,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=6,
        image_size=4,
        patch_size=2,
        num_labels=3,
        attn_implementation="sdpa",
    )
    inputs = {"pixel_values": torch.randn(4, 3, 4, 4, dtype=torch.float64)}
    return transformers.ViTForImageClassification(config), inputs, torch.randint(0, 3, (4,)), _logits


@pytest.mark.parametrize(
    ("build", "general"), [(_gpt2, set()), (_bert, set()), (_vit, {"cls_token", "position_embeddings"})]
)
def test_every_layer(build: Callable[[], Any], general: set[str]) -> None:
    model, inputs, targets, call = build()
    model = model.double()
    loss = nn.CrossEntropyLoss()
    specs = resolve_layers(model)
    forward = call if call is _token_logits else None
    recorder = Recorder(model, loss, [(inputs, targets)], specs, forward)
    slow = {plan.name.rsplit(".", 1)[-1] for plan in recorder.plan() if plan.backend != "hooks"}
    assert slow == general
    streams = recorder.streams()
    reference = Recorder(model, loss, [(inputs, targets)], specs, forward, backend="func").streams()
    for spec in specs:
        truth = matrices(model, call, loss, inputs, targets, spec, "exact")
        assert close(stream_matrices(streams[spec.name]), truth), spec.name
        assert close(stream_matrices(reference[spec.name]), truth), spec.name


def test_heads_are_found_in_rows_and_columns_as_each_library_stores_them() -> None:
    def names(model: nn.Module, layer: str) -> list[str]:
        return [spec.name for spec in resolve_layers(model, layer)]

    # Conv1D stores (in, out): query, key and value have their heads in the columns
    gpt2 = _gpt2()[0]
    path = "transformer.h.0.attn"
    found = [f"{path}.c_attn.weight[:, {at}:{at + 2}]" for at in range(0, 12, 2)]
    found += [f"{path}.c_proj.weight[{at}:{at + 2}]" for at in range(0, 4, 2)]
    assert names(gpt2, f"{path}[heads]") == names(gpt2, "transformer.h.*.attn[heads]") == found
    path = "bert.encoder.layer.0.attention"
    found = [f"{path}.self.{part}.weight[{at}:{at + 2}]" for part in ("query", "key", "value") for at in (0, 2)]
    found += [f"{path}.output.dense.weight[:, {at}:{at + 2}]" for at in (0, 2)]
    assert names(_bert()[0], f"{path}[heads]") == found
    config = transformers.LlamaConfig(
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=5,
    )
    path = "model.layers.0.self_attn"
    found = [f"{path}.q_proj.weight[{at}:{at + 2}]" for at in (0, 2, 4, 6)]
    found += [f"{path}.{part}_proj.weight[{at}:{at + 2}]" for part in "kv" for at in (0, 2)]
    found += [f"{path}.o_proj.weight[:, {at}:{at + 2}]" for at in (0, 2, 4, 6)]
    assert names(transformers.LlamaForCausalLM(config), f"{path}[heads]") == found
