"""
Ask for advice
==============

Which preconditioner fits each layer of a small convolutional network? Ask, and train as recommended.

Run it::

    python examples/advise_cnn.py

Needs scikit-learn and matplotlib. Writes the page advice.html and a picture of what was measured.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn

import kronscope as ks


def network() -> nn.Module:
    torch.manual_seed(0)
    body = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*body, nn.Linear(288, 64), nn.ReLU(), nn.Linear(64, 10))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> float:
    """Take some steps; return the loss on the digits that were not used."""
    digits = load_digits()
    inputs, targets = torch.tensor(digits.images / 16).float().unsqueeze(1), torch.tensor(digits.target)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        batch = torch.randint(1200, (64,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs[batch]), targets[batch]).backward()
        optimizer.step()
    with torch.no_grad():
        return float(nn.functional.cross_entropy(model(inputs[1200:]), targets[1200:]))


def main() -> None:
    digits = load_digits()
    sample = torch.tensor(digits.images[:32] / 16).float().unsqueeze(1), torch.tensor(digits.target[:32])
    model = network()
    # curvature changes most in the first steps: look after some
    train(model, ks.Shampoo(model, lr=3e-3), 20)
    advice = ks.advise(model, nn.CrossEntropyLoss(), [sample])
    print(advice)
    print(advice.results.select(layer="5.weight"))
    print("wrote", advice.report("advice.html"))
    print("wrote", advice.results.plot("runs/advise_cnn/cosines.png"))
    for name, groups in (("defaults", ks.param_groups), ("advice", advice.param_groups)):
        fresh = network()
        print(f"{name}: loss {train(fresh, ks.Shampoo(groups(fresh), lr=3e-3), 60):.3f} after 60 steps")


if __name__ == "__main__":
    main()
