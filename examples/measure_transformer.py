"""
Measure layers of a language model
==================================

A Hugging Face model, some of its layers, and a truth that would be too expensive to compute exactly.

Run it::

    python examples/measure_transformer.py

The model is made from a configuration, with random weights, so nothing is downloaded; a model from ``from_pretrained``
works the same way.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import kronscope as ks

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=24,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    max_position_embeddings=8,
)
model = LlamaForCausalLM(config)

# %%
# Each batch is ``(inputs, targets)``: a dictionary for the model, and the next token at every position. The model
# returns logits (samples, tokens, words), but ``nn.CrossEntropyLoss`` wants the words second: ``forward`` does that.

tokens = torch.randint(config.vocab_size, (24, 7))
data = [({"input_ids": part[:, :-1]}, part[:, 1:]) for part in tokens.split(12)]


def classes_second(model: nn.Module, inputs: dict[str, Tensor]) -> Any:
    return model(**inputs).logits.transpose(1, 2)


# %%
# Layers can be named in several ways.

attention = "model.layers.0.self_attn"
layers = [
    f"{attention}.q_proj.weight+{attention}.k_proj.weight",  # two weights as one matrix
    f"{attention}.v_proj",  # a module with one weight
    "model.layers.0.mlp.*",  # every weight that fits
]

# %%
# With T tokens and V words the exact Gauss–Newton matrix takes T(V-1) backward passes per sequence. ``max_columns``
# makes kronscope take the largest of them exactly and draw random sums of the others; the numbers then have error bars.

loss = nn.CrossEntropyLoss()
results = ks.measure(model, loss, data, layers=layers, forward=classes_second, max_columns=64)
print(results)
results.plot("runs/measure_transformer/cosines.png")

# %%
# The empirical Fisher matrix has one column per sequence, so this one is exact.

print(ks.measure(model, loss, data, layers=layers, forward=classes_second, truth="empirical_fisher"))
