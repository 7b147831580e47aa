"""
Watch a small GPT train
=======================

Records of every layer, cosines of the live preconditioner, and warnings in words, while a character GPT trains.

Run it::

    python examples/watch_gpt.py

Writes to runs/watch-gpt; ``kronscope watch runs/watch-gpt`` in another terminal shows the page while it trains. Started
again, it goes on in the same folder: here from the first step, since this script saves no checkpoint.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import kronscope as ks

LETTERS, CONTEXT, WIDTH = 24, 12, 32


class GPT(nn.Module):
    """Two transformer layers over characters."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(LETTERS, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, LETTERS, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        """Map (samples, places) to logits (samples, characters, places)."""
        mask = nn.Transformer.generate_square_subsequent_mask(text.shape[1])
        inside = self.blocks(self.tokens(text) + self.places.weight[: text.shape[1]], mask, is_causal=True)
        logits: Tensor = self.head(inside)
        return logits.transpose(1, 2)


def text(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Counting upwards in steps of 1 to 3, from a random start, and the next character at every place."""
    start = torch.randint(LETTERS, (count, 1), generator=generator)
    step = torch.randint(1, 4, (count, 1), generator=generator)
    rows = (start + step * torch.arange(CONTEXT + 1)) % LETTERS
    return rows[:, :-1], rows[:, 1:]


def main() -> None:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    model, loss = GPT(), nn.CrossEntropyLoss()
    optimizer = ks.Shampoo(model, lr=3e-3)
    sample = text(8, generator)
    layers = ["blocks.*"]
    with ks.watch(optimizer, model, 10, loss, [sample], layers, path="runs/watch-gpt") as watch:
        for step in range(60):
            inputs, targets = text(32, generator)
            optimizer.zero_grad()
            found = loss(model(inputs), targets)
            found.backward()
            watch.note(loss=found.item())
            optimizer.step()
            if step % 20 == 0 or step == 59:
                print(f"step {step + 1}: loss {found.item():.4f}")
    last = watch.to_pandas().groupby("step").mean(numeric_only=True)
    print(last[["gradient_norm", "update_ratio", "residual"]])
    # a run this short may end before the first cosines are paid for; then it says when they were due
    print(watch.results.select(step=watch.results.steps[0]) if watch.results.steps else watch)
    print("warnings:", *(watch.warnings or ["none"]), sep="\n  ")


if __name__ == "__main__":
    main()
