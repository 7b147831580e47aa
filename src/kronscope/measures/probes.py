r"""The paper's own estimator: random probes and matrix-vector products.

It is here to compare with. On a fixed matrix it is noisy where the exact value costs less.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from kronscope.curvature import SecondMoment
from kronscope.errors import OptionError
from kronscope.kron import Operator
from kronscope.measures.resampling import Estimate

__all__ = ["Probes"]


@dataclass(frozen=True)
class Probes:
    r"""The paper's way to estimate cosines, from a few random vectors v (probes) with normal entries.

    .. math:: \|H\|^2 \approx \operatorname{mean} \|Hv\|^2, \quad S = \tfrac{\|H\|}{\|K\|} K, \quad
              \cos \approx 1 - \frac{\operatorname{mean}\|(H - S)v\|^2}{2\,\|H\|^2} .

    It is here for comparison: the exact value usually costs less.

    Attributes:
        count: Number of probes, two or more.
        seed: Seed of the random numbers.

    Raises:
        OptionError: ``count`` is below two.

    >>> import torch, kronscope as ks
    >>> stream = ks.GradientStream.from_tensors(torch.randn(50, 3, 4, generator=torch.Generator().manual_seed(0)))
    >>> H = ks.SecondMoment(stream)
    >>> estimate = Probes(count=50).cosine(H, ks.approx.get("shampoo2").fit(stream))
    >>> abs(estimate.value - 0.909) < 3 * estimate.stderr
    True
    """

    count: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the number of probes."""
        if self.count < 2:
            raise OptionError(f"the probe estimator needs two probes or more for an error bar, got {self.count}.")

    def cosine(self, moment: SecondMoment, operator: Operator) -> Estimate:
        """Estimate the cosine; its standard error comes from leaving out one probe at a time."""
        generator = torch.Generator().manual_seed(self.seed)
        probes = torch.randn(self.count, *moment.shape, dtype=torch.float64, generator=generator)
        images = moment.matvec(probes.to(moment.left().device)).flatten(1)
        moved = operator.apply(probes.to(images.device)).flatten(1)
        norm = operator.norm()
        if not norm > 0:
            return Estimate(math.nan, math.nan)

        def estimate(keep: torch.Tensor) -> float:
            square = images[keep].square().sum(1).mean()
            scaled = moved[keep] * (square.sqrt() / norm)
            return 1.0 - float((images[keep] - scaled).square().sum(1).mean() / (2 * square))

        everything = torch.arange(self.count)
        left_out = torch.tensor([estimate(everything[everything != skip]) for skip in range(self.count)])
        spread = float(((left_out - left_out.mean()) ** 2).sum())
        return Estimate(estimate(everything), math.sqrt((self.count - 1) / self.count * spread))
