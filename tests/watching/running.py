"""Small runs to watch: one network, its data, and every kind of optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import kronscope as ks

LAYERS = ("0.weight", "3.weight")
LOSS = nn.CrossEntropyLoss()


def network() -> nn.Sequential:
    """With dropout, so that a random number taken too much shows in the weights."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 4))


def points(count: int = 24, seed: int = 1) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 6, generator=drawn)
    return inputs, inputs[:, :4].argmax(1)


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=1e-2),
    "rmsprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=1e-3),
    "lbfgs": lambda model: torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3),
    "shampoo": lambda model: ks.Shampoo(model.named_parameters(), lr=1e-2, method="kronecker"),
    "soap": lambda model: ks.SOAP(model.named_parameters(), lr=1e-2, method="kronecker"),
    "kl": lambda model: ks.KLShampoo(list(model.parameters()), lr=1e-2, method="kronecker"),
}


def train(model: nn.Module, optimizer: Optimizer, steps: int, first: int = 1) -> None:
    """Steps with the numbers ``first``, ...; their batches depend on nothing but these, dropout on the global state."""
    for step in range(first, first + steps):
        inputs, targets = points(12, seed=step)

        def closure(inputs: Tensor = inputs, targets: Tensor = targets) -> Any:
            optimizer.zero_grad()
            loss = LOSS(model(inputs), targets)
            loss.backward()
            return loss.detach()  # torch 2.8 warns of a loss with a graph that LBFGS turns into a number

        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()


def bits(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}
