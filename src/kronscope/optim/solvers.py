"""Which root solver to use: a table of measured times, and how to measure one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kronscope.errors import OptionError
from kronscope.kron.powers import default_cutoff
from kronscope.kron.roots import CoupledNewton, Eigh, Ridge, Roots, RootSolver, root_order
from kronscope.optim.config import register

__all__ = ["CostModel", "measure_solvers"]


@register
@dataclass(frozen=True)
class CostModel:
    """A root solver that takes, for each size of a factor, the solver that is fastest on the device.

    What is fastest stands in a table, so that a run and its continuation choose alike. The default table is empty: an
    eigendecomposition is taken on every device. On CPUs it is faster at every size; a Newton root takes about ten times
    as long. On CUDA nothing was measured. For decompositions speaks that newer versions of torch decompose the matrices
    of a stack in one call, where they did it one by one, and that roots are then the same as on a CPU. Near the
    rounding of float32 the two solvers differ, because a decomposition takes eigenvalues below it for zero: by 9 % of
    the root at size 768. :func:`measure_solvers` measures the table of your device. With an older torch,
    ``CostModel((("cuda", 128),))`` is the default of before.

    The Newton iteration is chosen only where both solvers give the same root: for exponents -1/p, and for a damping
    above the rounding error of the factor (below it, a decomposition knows which directions are empty and leaves them
    out).

    Attributes:
        newton: Pairs (device type, size): from this size on the coupled Newton iteration is taken on that device.
        tolerance: The residual above which a root is not used.
        is_warm: False: a root is taken without the eigenvectors of the one before.

    >>> CostModel(newton=(("cuda", 256),)).choice("cuda", 512, -0.5, Ridge(damping=1e-4))
    CoupledNewton(iterations=60, tolerance=0.001, is_warm=False)
    """

    newton: tuple[tuple[str, int], ...] = ()
    tolerance: float = 1e-3
    is_warm: bool = False

    def __post_init__(self) -> None:
        """Make the table hashable, also when it was read from a file."""
        object.__setattr__(self, "newton", tuple((str(kind), int(size)) for kind, size in self.newton))

    @property
    def is_thread_safe(self) -> bool:
        """Always true, since nothing is kept between calls."""
        return True

    def check(self, exponent: float, ridge: Ridge) -> None:
        """Do nothing: every exponent is taken."""

    def choice(
        self, device: str, size: int, exponent: float, ridge: Ridge, dtype: torch.dtype = torch.float32
    ) -> RootSolver:
        """Return the solver for factors of this size and type."""
        takes = root_order(exponent) is not None
        takes = takes and ridge.damping > default_cutoff(size, dtype)
        fast = any(kind == device and size >= least for kind, least in self.newton)
        return CoupledNewton(tolerance=self.tolerance) if fast and takes else Eigh(tolerance=self.tolerance)

    def solve(self, factors: Tensor, exponent: float, ridge: Ridge, warm: Tensor | None = None) -> Roots:
        """Return the roots of ``factors`` (B, d, d); each factor is divided by its trace first."""
        chosen = self.choice(factors.device.type, factors.shape[-1], exponent, ridge, factors.dtype)
        return chosen.solve(factors, exponent, ridge, warm)


def measure_solvers(
    device: str | torch.device = "cpu",
    sizes: Sequence[int] = (64, 256, 1024),
    *,
    exponent: float = -0.5,
    damping: float = 1e-4,
    batch: int = 1,
    repeats: int = 3,
) -> tuple[CostModel, dict[int, dict[str, float]]]:
    """Time the root solvers on a device, and make the table that :class:`CostModel` needs.

    Args:
        device: The device to measure.
        sizes: Sizes of the factors.
        exponent: Exponent of the root.
        damping: Added to the eigenvalues, relative to the largest.
        batch: Number of factors in a call.
        repeats: Number of calls, of which the fastest counts.

    Returns:
        The cost model, and the seconds per factor by size and by solver.

    Raises:
        OptionError: no size was given.

    >>> model, seconds = measure_solvers("cpu", sizes=[8], repeats=1)
    >>> sorted(seconds[8])
    ['CoupledNewton', 'Eigh']
    """
    if not sizes:
        raise OptionError("measure_solvers needs at least one size.")
    place = torch.device(device)
    generator = torch.Generator().manual_seed(0)
    table: dict[int, dict[str, float]] = {}
    for size in sorted(sizes):
        rows = torch.randn(batch, size, 2 * size, generator=generator).to(place)
        factors = rows @ rows.mT / (2 * size)
        row = {}
        for solver in (Eigh(float64=False), CoupledNewton()):
            row[type(solver).__name__] = (
                min(_seconds(solver, factors, exponent, damping) for _ in range(repeats)) / batch
            )
        table[size] = row
    faster = [size for size, row in table.items() if row["CoupledNewton"] < row["Eigh"]]
    return CostModel(((place.type, min(faster)),) if faster else ()), table


def _seconds(solver: RootSolver, factors: Tensor, exponent: float, damping: float) -> float:
    _wait(factors)
    begin = time.perf_counter()
    _wait(solver.solve(factors, exponent, Ridge(damping=damping)).matrices)
    return time.perf_counter() - begin


def _wait(tensor: Tensor) -> None:
    if tensor.device.type == "cuda":
        torch.cuda.synchronize(tensor.device)
