"""Record the gradients of a training run and compare approximations with Adagrad's matrix.

    python examples/history_adagrad.py

The gradients go to a folder, as they would in a long run: a crash keeps everything up to the last step, and another
process can read them.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn

import kronscope as ks


def main() -> None:
    pixels, digits = load_digits(return_X_y=True)
    inputs, targets = torch.as_tensor(pixels / 16, dtype=torch.float32), torch.as_tensor(digits)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    loss = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "gradients"
        # A hook that runs before every optimizer.step(); the training loop does not change.
        history = ks.GradientHistory.attach(optimizer, model, layers=["*.weight"], path=path)
        for _ in range(200):
            batch = torch.randint(len(inputs), (64,))
            optimizer.zero_grad()
            loss(model(inputs[batch]), targets[batch]).backward()
            optimizer.step()
        history.close()

        history = ks.GradientHistory.open(path)
        approximations = ("optimal", "shampoo2", "shampoo", "diagonal")
        print(ks.measure_history(history, approximations, at=[1, 10, 50, 100, 200]))
        print("\nWith the weights of an exponential mean, as most optimizers hold it (beta = 0.95), at the last step:")
        for row in ks.measure_history(history, approximations, beta=0.95):
            print(f"  {row.layer}  {row.approximation:<9} {row.cosine:.4f}")
        history.close()


if __name__ == "__main__":
    main()
