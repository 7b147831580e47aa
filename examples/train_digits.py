"""
Compare with AdamW
==================

Train the same small network with AdamW and with the three optimizers of kronscope, from the same start, on the same
batches, at the same learning rate, and draw the losses.

Run it::

    python examples/train_digits.py
"""

from collections.abc import Callable
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

import kronscope as ks

pixels, digits = load_digits(return_X_y=True)
inputs, targets = torch.as_tensor(pixels / 16, dtype=torch.float32), torch.as_tensor(digits)
train_inputs, train_targets, test_inputs, test_targets = inputs[:1200], targets[:1200], inputs[1200:], targets[1200:]

# %%
# The only line that differs is the one that makes the optimizer. Ours take the model itself, so that they can tell
# biases and the last layer, which get AdamW inside the same optimizer, from the other weights.

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01),
    "Shampoo": lambda model: ks.Shampoo(model, lr=3e-3, weight_decay=0.01),
    "KLShampoo": lambda model: ks.KLShampoo(model, lr=3e-3, weight_decay=0.01),
    "SOAP": lambda model: ks.SOAP(model, lr=3e-3, weight_decay=0.01),
}


def train(make: Callable[[nn.Module], torch.optim.Optimizer], steps: int = 150) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = make(model)
    losses = []
    for step in range(steps):
        batch = torch.randint(len(train_inputs), (64,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(train_inputs[batch]), train_targets[batch]).backward()
        optimizer.step()
        if step % 10 == 9:
            with torch.no_grad():
                losses.append(nn.functional.cross_entropy(model(test_inputs), test_targets).item())
    return losses


curves = {name: train(make) for name, make in OPTIMIZERS.items()}
for name, losses in curves.items():
    print(f"{name:<10} loss {losses[0]:.3f} after 10 steps, loss {losses[-1]:.3f} after 150")

# %%
# One seed on a small data set: a first impression, not a comparison. The page on optimizers has that, and says where
# AdamW is ahead.

figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
for name, losses in curves.items():
    axes.plot(range(10, 151, 10), losses, label=name, marker="o", markersize=3)
axes.set(xlabel="step", ylabel="loss on held-out digits", yscale="log")
axes.legend()
out = Path("runs/train_digits")
out.mkdir(parents=True, exist_ok=True)
figure.savefig(out / "losses.png", dpi=150)
