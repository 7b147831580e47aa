"""Measure a small network on scikit-learn's digits, before and after training.

    python examples/measure_digits.py

Prints the cosines of every layer at both moments, and writes the numbers, a picture and an interactive report to
``runs/measure_digits``.
"""

from __future__ import annotations

from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn

import kronscope as ks

OUT = Path("runs/measure_digits")
APPROXIMATIONS = ("optimal", "shampoo2", "shampoo", "kfac-reduce", "soap", "diagonal")


def main() -> None:
    pixels, digits = load_digits(return_X_y=True)
    inputs = torch.as_tensor(pixels / 16, dtype=torch.float32).view(-1, 1, 8, 8)
    targets = torch.as_tensor(digits)
    # The samples to measure on: batches that are the same in every pass.
    data = [(inputs[at : at + 64], targets[at : at + 64]) for at in range(0, 128, 64)]

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, stride=2),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 4 * 4, 10),
    )
    loss = nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    steps = 100

    results = ks.measure(model, loss, data, approximations=APPROXIMATIONS, step=0)
    for _ in range(steps):
        batch = torch.randint(len(inputs), (128,))
        optimizer.zero_grad()
        loss(model(inputs[batch]), targets[batch]).backward()
        optimizer.step()
    # Measuring takes the model in eval mode and gives it back as it was, so it can go on training.
    results = results.merge(ks.measure(model, loss, data, approximations=APPROXIMATIONS, step=steps))

    print(results)
    for path in (
        results.save(OUT / "results.json"),
        results.plot(OUT / "cosines.png"),
        results.report(OUT / "report.html"),
    ):
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
