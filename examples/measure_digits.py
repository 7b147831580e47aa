"""
Measure a small network
=======================

Which layers of a network does a Kronecker preconditioner fit, and does training change it? This script measures a small
convolutional network on scikit-learn's digits, before and after training, and writes the numbers, a picture and an
interactive report to ``runs/measure_digits``.

Run it::

    python examples/measure_digits.py
"""

from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn

import kronscope as ks

OUT = Path("runs/measure_digits")
APPROXIMATIONS = ("optimal", "shampoo2", "shampoo", "kfac-reduce", "soap", "diagonal")

# %%
# The samples to measure on are batches ``(inputs, targets)`` that are the same in every pass, so a list, or a
# ``DataLoader`` that does not shuffle.

pixels, digits = load_digits(return_X_y=True)
inputs = torch.as_tensor(pixels / 16, dtype=torch.float32).view(-1, 1, 8, 8)
targets = torch.as_tensor(digits)
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

# %%
# One call measures every layer. ``step`` is written into the rows, so that results of several moments can be put
# together.

results = ks.measure(model, loss, data, approximations=APPROXIMATIONS, step=0)

# %%
# Now train. Measuring leaves the model as it was, so it can go on in the middle of a run.

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
steps = 100
for _ in range(steps):
    batch = torch.randint(len(inputs), (128,))
    optimizer.zero_grad()
    loss(model(inputs[batch]), targets[batch]).backward()
    optimizer.step()

results = results.merge(ks.measure(model, loss, data, approximations=APPROXIMATIONS, step=steps))
print(results)

# %%
# In the table, ``optimal`` is the best that any Kronecker product can do. ``shampoo2`` comes close to it in both
# layers, at both moments; ``shampoo``, the original form, does not. ``soap`` is not a Kronecker product and may be
# better still.

for path in (
    results.save(OUT / "results.json"),
    results.plot(OUT / "cosines.png"),
    results.report(OUT / "report.html"),
):
    print(f"wrote {path}")
