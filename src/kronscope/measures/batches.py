r"""Streams as a batch of B samples sees them, in expectation over batches, in closed form (Lemmas 7 and 8)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kronscope.curvature import SecondMoment
from kronscope.errors import OptionError
from kronscope.gradients.stream import GradientStream, Known

__all__ = ["FitBatches", "batch_stream"]


@dataclass(frozen=True)
class FitBatches:
    """The batches over which a fit is the expectation; the fields are the arguments of :func:`batch_stream`.

    >>> FitBatches(256, replacement=False).options, FitBatches(256, replacement=False, labels="exact").options
    ('replacement=False', '')
    """

    size: int = 1
    replacement: bool = True
    labels: str = "real"

    def of(self, stream: GradientStream) -> GradientStream:
        """Return a stream of single samples as batches see it."""
        return batch_stream(stream, self.size, replacement=self.replacement, labels=self.labels)

    @property
    def options(self) -> str:
        """What rows say of batches that are drawn without replacement, where that makes a difference."""
        matters = self.size > 1 and self.labels == "real"
        return "replacement=False" if matters and not self.replacement else ""


def batch_stream(
    stream: GradientStream, batch_size: int, *, replacement: bool = True, labels: str = "real"
) -> GradientStream:
    r"""Return the gradients as a batch of B samples sees them, in expectation over all batches.

    The stream that comes out has the second moment :math:`B\, \mathbb{E}[g_B g_B^\top]`, where :math:`g_B` is the mean
    gradient of a random batch. With :math:`E_2` the second moment of single samples and :math:`\bar g` their mean, it
    is :math:`E_2 + (B-1)\, \bar g \bar g^\top` for batches drawn with replacement, and :math:`\frac{N-B}{N-1} E_2 +
    \frac{(B-1) N}{N-1}\, \bar g \bar g^\top` for batches drawn without, from N samples.

    Args:
        stream: Gradients of single samples, with weights 1/N.
        batch_size: The batch size B.
        replacement: Whether the samples of a batch are drawn with replacement.
        labels: Which labels the gradients are of. With the model's own (``"exact"``, or ``"sampled"`` anew for every
            batch) gradients have mean zero, so B changes nothing (Lemma 7).

    Returns:
        A stream with one more gradient, the mean; or the same stream where B changes nothing.

    Raises:
        OptionError: B is below one, or above N without replacement.

    >>> import torch, kronscope as ks
    >>> stream = ks.GradientStream.from_tensors(torch.randn(50, 3, 4, generator=torch.Generator().manual_seed(0)))
    >>> batch_stream(stream, 32)
    GradientStream(3x4, 51 samples, 1 columns)
    """
    if batch_size < 1:
        raise OptionError(f"batch_size must be 1 or more, got {batch_size}.")
    if batch_size == 1 or labels != "real":
        return stream
    count = stream.num_samples
    if not replacement and batch_size > count:
        raise OptionError(f"a batch of {batch_size} cannot be drawn from {count} samples without replacement.")
    own, extra = 1.0, batch_size - 1.0
    if not replacement:
        own, extra = (count - batch_size) / (count - 1), (batch_size - 1) * count / (count - 1)
    moment = SecondMoment(stream)
    mean = moment.mean()
    shrunk = stream if own == 1.0 else stream.map(lambda atoms: replace(atoms, weights=atoms.weights * own))
    # the factors follow from those of single samples; going over the data again would give the same
    left, right = own * moment.left() + extra * mean @ mean.T, own * moment.right() + extra * mean.T @ mean
    return shrunk.with_atom(mean, extra).knowing(Known(left, right))
