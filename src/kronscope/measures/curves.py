r"""Curves behind a layer's cosines: Figure 2's spectrum, the exponent sweep and the batch-size sweep."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from kronscope.approx import Approximation, Optimal, singular_triples
from kronscope.curvature import SecondMoment
from kronscope.errors import KronscopeError
from kronscope.gradients.stream import GradientStream
from kronscope.kron import KroneckerProduct, Operator
from kronscope.measures.batches import batch_stream
from kronscope.measures.rows import variants

__all__ = ["EXPONENTS", "batch_size_curve", "default_batch_sizes", "exponent_curve", "kronecker_spectrum"]

# What leading singular values beyond the first may cost in multiply-adds, and the passes over the data each one takes.
# Two beyond the first show whether that stands out; they are left out only if each one takes several times as much.
_SPECTRUM_OPERATIONS = 2e12
_USUAL_PASSES = 40
_LEAST_RANK = 3
_PATIENCE = 3.0

EXPONENTS: tuple[float, ...] = tuple(round(0.05 * i, 2) for i in range(41))


def kronecker_spectrum(stream: GradientStream, rank: int = 8) -> dict[str, Any]:
    r"""Return what Figure 2 shows: the leading singular values of H, rearranged, and the traces behind them.

    For :math:`\hat H = \sum_i \sigma_i\, u_i v_i^\top` they explain why a single round of power iteration from the
    identity (Shampoo²) comes so close to the optimum.

    Args:
        stream: The truth.
        rank: How many leading singular values to find; 1 gives the curves alone. Where each one costs much (a pass over
            a large layer in every round) fewer are found: three, or the first alone where one takes many minutes.

    Returns:
        ``ratio`` :math:`\sigma_1/\|\sigma\|` (the optimal cosine), ``left`` and ``right`` (the cosine between the first
        singular vector and one round of power iteration from the identity,
        :math:`\alpha_1\sigma_1/\sqrt{\sum\alpha_i^2\sigma_i^2}`), ``sigma``, ``alpha_left``
        :math:`= \operatorname{tr} U_i` and ``alpha_right`` :math:`= \operatorname{tr} V_i`, ``rounds`` and ``residual``
        of the optimum. Of a matrix that is zero the first three are NaN.

    >>> import torch, kronscope as ks
    >>> stream = ks.GradientStream.from_tensors(torch.randn(50, 3, 4, generator=torch.Generator().manual_seed(0)))
    >>> spectrum = kronecker_spectrum(stream, rank=2)
    >>> round(spectrum["ratio"], 3), round(spectrum["left"], 3), len(spectrum["sigma"])
    (0.909, 1.0, 2)
    """
    moment = SecondMoment(stream)
    if not moment.norm() > 0:
        nothing: dict[str, Any] = {name: [] for name in ("sigma", "alpha_left", "alpha_right")}
        return {"ratio": math.nan, "left": math.nan, "right": math.nan, **nothing, "rounds": 0, "residual": 0.0}
    best = Optimal().solve(stream)
    first_left, first_right = best.operator.left.matrix, best.operator.right.matrix
    grams = moment.left(), moment.right()
    curves = [
        float((gram * vector).sum() / (torch.linalg.matrix_norm(gram) * torch.linalg.matrix_norm(vector)))
        for gram, vector in zip(grams, (first_left, first_right), strict=True)
    ]
    sigma, lefts, rights = [best.sigma], first_left[None], first_right[None]
    affordable = _SPECTRUM_OPERATIONS / (_USUAL_PASSES * moment.passes.contraction_cost())
    rank = min(rank, max(int(affordable), _LEAST_RANK if _PATIENCE * affordable >= 1 else 1))
    if rank > 1:
        triples = singular_triples(moment, rank, tolerance=1e-6, max_rounds=200)
        sigma, lefts, rights = triples.sigma.tolist(), triples.left, triples.right
    alpha_left = lefts.diagonal(dim1=1, dim2=2).sum(1)
    alpha_right = rights.diagonal(dim1=1, dim2=2).sum(1)
    # the first pair is PSD; the signs of the others are arbitrary
    return {
        "ratio": best.sigma / moment.norm(),
        "left": curves[0],
        "right": curves[1],
        "sigma": sigma,
        "alpha_left": alpha_left.abs().tolist(),
        "alpha_right": alpha_right.abs().tolist(),
        "rounds": best.rounds,
        "residual": best.residual,
    }


def exponent_curve(
    truth: GradientStream, fitted: GradientStream, exponents: Sequence[float] = EXPONENTS
) -> dict[str, list[float]]:
    r"""Return the cosine of :math:`(L \otimes R)^p` with the truth for many powers p, from one eigendecomposition.

    p = 1 is Shampoo², p = ½ is Shampoo, and p = 0 the projection onto the range.

    Args:
        truth: The gradients that the matrix H is made of.
        fitted: The gradients that L and R are made of; may be the same object.
        exponents: The powers p.

    Returns:
        Two lists of the same length, ``exponent`` and ``cosine``.

    >>> import torch, kronscope as ks
    >>> stream = ks.GradientStream.from_tensors(torch.randn(50, 3, 4, generator=torch.Generator().manual_seed(0)))
    >>> curve = exponent_curve(stream, stream, [0.5, 1.0])
    >>> [round(value, 3) for value in curve["cosine"]]
    [0.902, 0.909]
    """
    moment = SecondMoment(truth)
    norm = moment.norm()
    left, right = SecondMoment(fitted).factors()
    if left.trace() == 0 or norm == 0:
        return {"exponent": list(exponents), "cosine": [math.nan] * len(exponents)}
    base = KroneckerProduct(left, right)
    return {"exponent": list(exponents), "cosine": [_cosine(moment, norm, base.power(p)) for p in exponents]}


def _cosine(moment: SecondMoment, norm: float, operator: Operator) -> float:
    size = norm * operator.norm()
    return moment.inner(operator) / size if size > 0 else math.nan


def default_batch_sizes(samples: int) -> list[int]:
    """Return powers of two from 1 to N, and N.

    >>> default_batch_sizes(10)
    [1, 2, 4, 8, 10]
    """
    sizes = [2**i for i in range(samples.bit_length()) if 2**i <= samples]
    return sizes if sizes[-1] == samples else [*sizes, samples]


def batch_size_curve(
    truth: GradientStream,
    fitted: GradientStream,
    approximations: Sequence[Approximation],
    sizes: Sequence[int] | None = None,
    *,
    replacement: bool = True,
    labels: str = "real",
) -> dict[str, list[float]]:
    """Return how each approximation's cosine with the truth changes with the batch size it is fitted with.

    With the model's own labels (``"exact"`` or ``"sampled"``) the curves are flat, as Lemma 7 of the paper says.

    Args:
        truth: The gradients that the matrix H is made of.
        fitted: The gradients of single samples that approximations are fitted on.
        approximations: The approximations; those that do not depend on the batch size are left out.
        sizes: The batch sizes; None takes powers of two, up to the number of samples.
        replacement: Whether the samples of a batch are drawn with replacement.
        labels: Which labels ``fitted`` was made with.

    Returns:
        The list ``batch_size``, and for each approximation the list of its cosines; NaN where it has no fit.

    >>> import torch, kronscope as ks
    >>> stream = ks.GradientStream.from_tensors(torch.randn(50, 3, 4, generator=torch.Generator().manual_seed(0)))
    >>> curves = batch_size_curve(stream, stream, [ks.approx.get("shampoo2")], [1, 10])
    >>> [round(value, 3) for value in curves["shampoo2"]]
    [0.909, 0.879]
    """
    moment = SecondMoment(truth)
    norm = moment.norm()
    sizes = default_batch_sizes(fitted.num_samples) if sizes is None else list(sizes)
    streams = [batch_stream(fitted, size, replacement=replacement, labels=labels) for size in sizes]
    curves: dict[str, list[float]] = {"batch_size": [float(size) for size in sizes]}
    for approximation in approximations:
        if approximation.fits_truth or not approximation.uses_batches:
            continue
        values = []
        for stream in streams:
            try:
                values.append(_cosine(moment, norm, approximation.fit(stream)))
            except KronscopeError:
                values.append(math.nan)
        curves[variants([approximation])[0]] = values
    return curves
