"""How well a model in training does on data it has not seen."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kronscope.paper.data import SampleBatches
from kronscope.paper.models import logits

__all__ = ["evaluate"]


def evaluate(model: nn.Module, loss: nn.Module, data: SampleBatches, device: str = "cpu") -> dict[str, float]:
    r"""Mean loss and accuracy on held-out samples, in evaluation mode; parameters and buffers stay as they are.

    The accuracy is the share of samples whose largest logit is that of their class or, with a single logit, whose
    logit has the sign of :math:`y - \tfrac12`.

    Args:
        model: The model; its mode is restored.
        loss: A loss that averages over a batch.
        data: The samples.
        device: Where the model is.

    Returns:
        ``accuracy``, ``loss`` and ``samples``.

    >>> from kronscope.paper import data
    >>> zeros = nn.Linear(64, 1)
    >>> _ = nn.init.zeros_(zeros.weight), nn.init.constant_(zeros.bias, -1.0)
    >>> evaluate(zeros, nn.BCEWithLogitsLoss(), data.load("digits2").sample(360, seed=0))["accuracy"]
    0.49444444444444446
    """
    mode = model.training
    model.eval()
    right, total = 0, 0.0
    try:
        with torch.no_grad():
            for batch in data:
                inputs, targets = (tensor.to(device) for tensor in batch)
                output = logits(model, inputs)
                right += int(_hits(output, targets).sum())
                total += float(loss(output, targets)) * len(inputs)
    finally:
        model.train(mode)
    return {"accuracy": right / data.num_samples, "loss": total / data.num_samples, "samples": data.num_samples}


def _hits(output: Tensor, targets: Tensor) -> Tensor:
    if targets.is_floating_point():
        return (output > 0) == (targets > 0.5)
    return output.argmax(1) == targets
