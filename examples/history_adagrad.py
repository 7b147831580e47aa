"""
Follow the gradients of a training run
======================================

Adagrad's matrix is the sum of the outer products of all gradients that a run has seen. This script records them while
an ordinary optimizer trains, and compares approximations with the matrix at several steps.

Run it::

    python examples/history_adagrad.py

The gradients go to a folder, as they would in a long run: a crash keeps everything up to the last step, and another
process can read them.
"""

import tempfile
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn

import kronscope as ks

pixels, digits = load_digits(return_X_y=True)
inputs, targets = torch.as_tensor(pixels / 16, dtype=torch.float32), torch.as_tensor(digits)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
loss = nn.CrossEntropyLoss()
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)

# %%
# ``attach`` adds a hook that runs before every ``optimizer.step()``. The training loop does not change.

folder = tempfile.TemporaryDirectory()
path = Path(folder.name) / "gradients"
history = ks.GradientHistory.attach(optimizer, model, layers=["*.weight"], path=path)
for _ in range(200):
    batch = torch.randint(len(inputs), (64,))
    optimizer.zero_grad()
    loss(model(inputs[batch]), targets[batch]).backward()
    optimizer.step()
history.close()

# %%
# Open the folder, here or in another process, and measure at some steps.

history = ks.GradientHistory.open(path)
approximations = ("optimal", "shampoo2", "shampoo", "diagonal")
results = ks.measure_history(history, approximations, at=[1, 10, 50, 100, 200])
print(results)
results.plot("runs/history_adagrad/cosines.png")

# %%
# Most optimizers do not keep a sum but an exponential mean. ``beta`` weighs the gradients as such a mean does.

print("With the weights of an exponential mean (beta = 0.95), at the last step:")
for row in ks.measure_history(history, approximations, beta=0.95):
    print(f"  {row.layer}  {row.approximation:<9} {row.cosine:.4f}")
history.close()
folder.cleanup()
