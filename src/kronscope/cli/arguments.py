"""Arguments that several commands take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["Checkpoint", "Data", "Forward", "Loss", "MaxSamples", "MemoryBudget", "Model"]

Model = Annotated[str, typer.Argument(help="'package.module:name': a model, or a function that returns one.")]
Data = Annotated[
    str,
    typer.Option(help="'package.module:name' of batches or a function that returns them, or a .pt or .npz file."),
]
Loss = Annotated[
    str, typer.Option(help="cross-entropy, mse, bce or 'package.module:name', with options in parentheses.")
]
Forward = Annotated[
    str | None,
    typer.Option(
        help="'package.module:name' of a function (model, inputs) -> logits, for models with conventions of their own."
    ),
]
Checkpoint = Annotated[Path | None, typer.Option(help="A state_dict to load into the model.")]
MaxSamples = Annotated[int | None, typer.Option(help="Use only the first samples.")]
MemoryBudget = Annotated[str | None, typer.Option(help="Such as 4GiB.")]
