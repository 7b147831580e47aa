"""Tiny models made from configurations, and data that needs no download."""

from __future__ import annotations

import importlib
import importlib.util
import os
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kronscope as ks


def needed(package: str) -> ModuleType:
    """An optional package; without it the test is skipped, or fails where ``make test-integrations`` installed it."""
    if importlib.util.find_spec(package) is None:
        if os.environ.get("KRONSCOPE_INTEGRATIONS"):
            pytest.fail(f"{package} is not installed, but KRONSCOPE_INTEGRATIONS says that all packages are")
        pytest.skip(f"needs {package}: `make test-integrations` has it")
    return importlib.import_module(package)


FAMILIES: dict[str, Any] = {"shampoo": ks.Shampoo, "soap": ks.SOAP, "kl": ks.KLShampoo}
VOCABULARY, LENGTH = 24, 6


def language_model(dtype: torch.dtype = torch.float64, **config: Any) -> Any:
    """A Llama of two layers, the same in every call."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    settings = LlamaConfig(
        num_key_value_heads=2, max_position_embeddings=LENGTH, **{"vocab_size": VOCABULARY, **sizes, **config}
    )
    return LlamaForCausalLM(settings).to(dtype)


class Sentences(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Counting upwards from a start, which a language model can learn."""

    def __init__(self, count: int = 64) -> None:
        drawn = torch.Generator().manual_seed(1)
        starts = torch.randint(0, VOCABULARY, (count, 1), generator=drawn)
        steps = torch.randint(1, 4, (count, 1), generator=drawn)
        self.tokens = (starts + steps * torch.arange(LENGTH)) % VOCABULARY

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def network() -> nn.Module:
    """A perceptron with an embedding-free body and a head, the same in every call."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 4)).double()


def points(count: int = 64) -> torch.utils.data.TensorDataset:
    """Inputs and classes for :func:`network`."""
    drawn = torch.Generator().manual_seed(2)
    inputs = torch.randn(count, 6, generator=drawn, dtype=torch.float64)
    return torch.utils.data.TensorDataset(inputs, inputs[:, :4].argmax(1))


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Copies of a model's parameters, without the names wrappers put in front."""
    found = {}
    for name, param in model.named_parameters():
        whole = param.full_tensor() if hasattr(param, "full_tensor") else param
        found[name.replace("module.", "").replace("_orig_mod.", "")] = whole.detach().cpu().clone()
    return found


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float = 0.0) -> None:
    """Compare two models' parameters; exactly by default."""
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        apart = float((value - theirs[name]).abs().max())
        assert apart <= tolerance, f"{name} differs by {apart}"
