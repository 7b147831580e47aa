"""Options of the optimizers: small frozen objects that check themselves, and their form in a state dict."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from kronscope.errors import OptionError
from kronscope.kron.roots import CoupledNewton, Eigh, Ridge, RootSolver, WarmQR
from kronscope.optim.periods import (
    DEFAULT_REFRESH,
    SLOWER_REFRESH,
    Adaptive,
    Budget,
    Every,
    Refresh,
    Schedule,
    Warmup,
    parse_refresh,
)

if TYPE_CHECKING:
    from kronscope.optim.rules import Rule

__all__ = [
    "DEFAULT_REFRESH",
    "SLOWER_REFRESH",
    "DEFAULT_SCALE",
    "EARLY_STEPS",
    "Adaptive",
    "Budget",
    "Every",
    "Graft",
    "Hyper",
    "Norm",
    "Refresh",
    "Scale",
    "Trace",
    "Warmup",
    "decode",
    "encode",
    "parse_refresh",
    "parse_scale",
    "register",
]


@dataclass(frozen=True)
class Trace:
    r"""The scale of the paper's Corollary 2: multiply :math:`L^e G R^e` by :math:`(\operatorname{tr} L)^{-(1/2+2e)}`.

    For :math:`e = -1/2` the update is :math:`\sqrt{\operatorname{tr} L}\, L^{-1/2} G R^{-1/2}`, about as large as
    Adam's.

    Attributes:
        bound: Largest root mean square of an update; a larger one is scaled down to it. None sets no bound.

    Raises:
        OptionError: ``bound`` is not positive.

    >>> Trace(bound=1.0)
    Trace(bound=1.0)
    """

    bound: float | None = None

    def __post_init__(self) -> None:
        """Check the bound."""
        if self.bound is not None and not self.bound > 0:
            raise OptionError(f"Trace(bound) must be positive or None, got {self.bound}.")


@dataclass(frozen=True)
class Graft:
    """Give the update of each block the length that another optimizer's update would have (grafting).

    Attributes:
        kind: The other optimizer: ``"sgd"``, ``"adagrad"``, ``"rmsprop"`` or ``"adam"``.
        beta2: Decay of its second moment; None takes the parameter group's, and 1 means sums.
        eps: Added to the square root of its second moment; None takes the parameter group's.

    Raises:
        OptionError: there is no such kind, or a number is out of range.

    >>> Graft("adam", beta2=0.999)
    Graft(kind='adam', beta2=0.999, eps=None)
    """

    kind: Literal["sgd", "adagrad", "rmsprop", "adam"] = "adam"
    beta2: float | None = None
    eps: float | None = None

    def __post_init__(self) -> None:
        """Check the kind and the numbers."""
        if self.kind not in ("sgd", "adagrad", "rmsprop", "adam"):
            raise OptionError(f"Graft(kind) must be sgd, adagrad, rmsprop or adam, got {self.kind!r}.")
        if self.beta2 is not None and not 0 <= self.beta2 <= 1:
            raise OptionError(f"Graft(beta2) must be between 0 and 1, got {self.beta2}.")
        if self.eps is not None and not self.eps >= 0:
            raise OptionError(f"Graft(eps) must not be negative, got {self.eps}.")


@dataclass(frozen=True)
class Norm:
    """Give the update of every block the same root mean square.

    Attributes:
        rms: That root mean square; Adam's updates typically have 0.2.

    Raises:
        OptionError: ``rms`` is not positive.

    >>> Norm(rms=0.2)
    Norm(rms=0.2)
    """

    rms: float = 0.2

    def __post_init__(self) -> None:
        """Check the size."""
        if not 0 < self.rms < math.inf:
            raise OptionError(f"Norm(rms) must be positive, got {self.rms}.")


Scale = Trace | Graft | Norm | None

# From trials with one seed each (benchmarks/records/optim_training_trial): Adam's length changed least with the
# learning rate and was best on MNIST, while Trace(bound=1.0) was better on characters at lr 0.003 but much worse at
# 0.01.
DEFAULT_SCALE = Graft("adam")

# Steps in which every gradient is taken into the factors: means of few gradients want them all.
EARLY_STEPS = 10

_KINDS: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (Every, Warmup, Adaptive, Budget, Trace, Graft, Norm, Eigh, WarmQR, CoupledNewton)
}


@dataclass(frozen=True)
class Hyper:
    """All options that the update of a block depends on; the block's gradient, state and step come on top.

    Attributes:
        rule: The algorithm.
        beta1: Decay of the gradient's mean, which is taken before preconditioning.
        beta2: Decay of the factors; 1 means sums.
        eps: With sums, added to the factors; with means, Adam's eps.
        exponents: Exponent of each factor; a single number serves all of them.
        scale: What sets the length of an update.
        refresh: When roots are taken; a :class:`Budget` is a schedule by now.
        damping: Added to the eigenvalues, relative to the largest; not used with sums.
        start: First preconditioned step.
        power_rounds: Rounds of power iteration per update; 1 is Shampoo.
        momentum: Heavy-ball momentum after scaling.
        nesterov: Whether momentum has Nesterov's form.
        solver: How roots are taken.
        statistics: After the first steps, only every so manieth gradient is taken into the factors.
    """

    rule: Rule
    beta1: float
    beta2: float
    eps: float
    exponents: tuple[float, ...]
    scale: Scale
    refresh: Schedule
    damping: float
    start: float
    power_rounds: int
    momentum: float
    nesterov: bool
    solver: RootSolver
    statistics: int = 1

    @property
    def is_sum(self) -> bool:
        """Whether factors are sums."""
        return self.beta2 == 1

    def exponent(self, mode: int) -> float:
        """Return the exponent of one mode's factor; the last serves all modes that follow."""
        return self.exponents[min(mode, len(self.exponents) - 1)]

    def schedule_step(self, step: int) -> int:
        """Return the step the refresh schedule sees: roots are first taken at ``start``."""
        return step if math.isinf(self.start) else step - int(self.start) + 1

    def takes_first_roots(self, step: int) -> bool:
        """Whether the roots that are taken at ``step`` are the first ones of their factors."""
        return self.schedule_step(step) <= self.refresh.period_at(1)

    def waits_for_roots(self, step: int) -> bool:
        """Whether some blocks may have no root yet after those of ``step``, though they are to be preconditioned."""
        return 1 <= self.schedule_step(step) < self.refresh.period_at(1)

    @property
    def ridge(self) -> Ridge:
        """What is added to the factors before a root is taken: eps to sums, damping to means."""
        return Ridge(eps=self.eps) if self.is_sum else Ridge(damping=self.damping)

    def gain(self) -> float:
        """Return what the square of a new gradient is multiplied with."""
        return 1.0 if self.is_sum else 1.0 - self.beta2

    def correction2(self, step: int) -> float:
        """Return the weight that a mean with ``beta2`` has collected after ``step`` updates; sums are as they are."""
        return 1.0 if self.is_sum else 1.0 - float(self.beta2**step)

    def counted(self, step: int) -> int:
        """Return the number of gradients that the factors count after ``step`` steps.

        After the first steps one of every run of ``statistics`` steps is taken, and counts for all of them. Which one
        changes from run to run: where kinds of data take turns, the factors see all of them.
        """
        late, every = step - EARLY_STEPS, self.statistics
        if every == 1 or late <= 0:
            return step
        run, place = (late - 1) // every, (late - 1) % every
        # without a branch, which would double the graphs of torch.compile: -1 where the run's turn is still to come
        return EARLY_STEPS + every * (run + 1 + (place - _turn(run, every)) // every)

    def gathers(self, step: int) -> bool:
        """Whether the gradient of ``step`` is taken into the factors."""
        return self.counted(step) > self.counted(step - 1)

    def leaves_out(self, step: int) -> bool:
        """Whether there may be gradients up to ``step`` that the factors have not seen."""
        return self.statistics > 1 and step > EARLY_STEPS

    def factor_decay(self, step: int) -> float:
        """Return what the factors are multiplied with at a step that gathers."""
        return float(self.beta2 ** (self.counted(step) - self.counted(step - 1)))

    def factor_gain(self, step: int) -> float:
        """Return what a new Gram matrix is multiplied with: it stands for all gradients of its run."""
        return float(self.counted(step) - self.counted(step - 1)) if self.is_sum else 1.0 - self.factor_decay(step)

    def factor_weight(self, step: int) -> float:
        """Return the weight the factors have collected after ``step`` updates; sums are read as they are."""
        return self.correction2(self.counted(step))

    def seen_share(self, step: int) -> float:
        """Return the weight of what has seen every gradient up to ``step``, over that of the factors."""
        if self.is_sum:
            return step / self.counted(step)
        return self.correction2(step) / self.factor_weight(step)

    def graft_beta2(self) -> float:
        """Return the decay of the graft's second moment; 1 means sums."""
        assert isinstance(self.scale, Graft)
        if self.scale.kind == "adagrad":
            return 1.0
        return self.beta2 if self.scale.beta2 is None else self.scale.beta2


def _turn(run: int, every: int) -> int:
    """Return which of the steps of a run, from 0, gives its gradient to the factors.

    Multiples of the golden ratio, modulo one, fill the interval evenly, so that kinds of data that take turns in few
    steps are all seen soon. But they nearly repeat after 13, 21, 34, ... of them, and kinds that take turns in as many
    steps would wait for hundreds. So every 21 runs they skip some, each time two more: then no kind waits longer than
    by chance, and short turns are seen as evenly as before. In whole numbers, which a graph of ``torch.compile`` can
    have for all steps.
    """
    skips = run // 21
    return (run + skips * (skips + 1)) * 40503 % 65536 * every // 65536


def parse_scale(value: object) -> Scale:
    """Turn a name, None or an object into a scale.

    Raises:
        OptionError: it is none of these.

    >>> parse_scale("adam")
    Graft(kind='adam', beta2=None, eps=None)
    """
    if value is None or isinstance(value, Trace | Graft | Norm):
        return value
    if value == "trace":
        return Trace()
    if value == "norm":
        return Norm()
    if value in ("sgd", "adagrad", "rmsprop", "adam"):
        return Graft(value)
    raise OptionError(
        f"scale must be 'trace', 'adam', 'adagrad', 'rmsprop', 'sgd', 'norm', None or an object (Trace, Graft, Norm), "
        f"got {value!r}."
    )


def register(kind: type[Any]) -> type[Any]:
    """Let a state dict hold objects of a frozen dataclass; usable as a decorator."""
    _KINDS[kind.__name__] = kind
    return kind


def encode(value: object) -> object:
    """Write an option object as a string, so that a state dict holds plain values only; others pass unchanged.

    >>> encode(Every(5))
    '{"type": "Every", "steps": 5, "spread": true}'
    """
    if _KINDS.get(type(value).__name__) is type(value):
        return json.dumps({"type": type(value).__name__, **asdict(value)})  # type: ignore[call-overload]
    return value


def decode(value: object) -> object:
    """Undo :func:`encode`.

    >>> decode('{"type": "Every", "steps": 5}')
    Every(steps=5, spread=True)
    """
    if isinstance(value, str) and value.startswith('{"type"'):
        fields = json.loads(value)
        kind = fields.pop("type")
        if kind not in _KINDS:
            raise OptionError(
                f"the saved optimizer has an option of the unknown kind {kind!r}; a newer version made it."
            )
        return _KINDS[kind](**fields)
    return value
