"""One rule per optimizer family: everything that differs between them. Nothing else knows a family's name.

A new family is one file here, with its rule (decorated with :func:`register`) and the optimizer people call, and its
export in ``kronscope.optim``. The order of a step is :mod:`kronscope.optim.step`'s; it calls the methods below on
stacks: state tensors, gradients and updates have one row per block.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar

from torch import Tensor

from kronscope.errors import OptionError, StateError
from kronscope.kron.operators import Operator
from kronscope.kron.roots import RootSolver
from kronscope.optim.apply import apply_updates
from kronscope.optim.block_state import Blocks, Tensors
from kronscope.optim.blocks import Layout, Tile
from kronscope.optim.config import DEFAULT_REFRESH, Hyper, Refresh

__all__ = ["Moments", "Rule", "register"]


class Moments(NamedTuple):
    """What a step takes from the gradients.

    Attributes:
        mean: Mean of the gradients, not corrected for its bias; for SOAP the finished update.
        lengths: The lengths (B, 1, ...) of the grafted optimizer's updates, where they came in the same pass.
        graft: These updates themselves, where blocks may make a part of them instead of their own.
    """

    mean: Tensor
    lengths: Tensor | None = None
    graft: Tensor | None = None


class Rule(ABC):
    """What one family does with a stack of equal blocks; it has no state of its own.

    Attributes:
        name: Its name in saved states.
        title: Its name in tables.
        class_name: The optimizer people call.
        fixed: Options of the common step that it does not have, at the values that leave them out.
        default_refresh: The schedule where none is asked for.
        default_statistics: Steps between two gradients that are taken into the factors, where no number is asked for.
        has_own_length: How long a step is does not depend on the factors, whatever ``scale`` is.
        packs: Whether large factors are kept as triangles.
        apart: Steps between the first roots of a block's two sides: a product of two roots of the same gradient wants
            both at once, factors that are whitened with each other's roots one after the other.
        is_staggered: Whether blocks take their roots at different steps of a refresh period.
        has_separate_roots: Whether the roots of a step may be taken apart from each other, by threads or processes:
            :meth:`refresh` changes only what :meth:`root_tensors` returns.
        carries: Whether :meth:`refresh` returns something for :meth:`carry`, and changes nothing itself.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    class_name: ClassVar[str]
    fixed: ClassVar[Mapping[str, object]] = {}
    default_refresh: ClassVar[Refresh] = DEFAULT_REFRESH
    default_statistics: ClassVar[int] = 1
    has_own_length: ClassVar[bool] = False
    packs: ClassVar[bool] = True
    apart: ClassVar[int] = 0
    is_staggered: ClassVar[bool] = True
    has_separate_roots: ClassVar[bool] = True
    carries: ClassVar[bool] = False

    # --- options and plan -----------------------------------------------------------------------------------------

    def for_group(self, group: Mapping[str, Any]) -> Rule:
        """Return the rule that a parameter group's options ask for: this one, unless an option picks a variant."""
        return self

    def check_fixed(self, group: Mapping[str, Any]) -> None:
        """Refuse options that this family does not have.

        Raises:
            OptionError: there is one.
        """
        for name, value in self.fixed.items():
            if group[name] != value:
                raise OptionError(f"{self.class_name} has no option {name!r}; leave it out.")

    @abstractmethod
    def check_options(self, group: Mapping[str, Any]) -> None:
        """Refuse values of options that this family cannot work with.

        Raises:
            OptionError: there is one.
        """

    def check_saved_by(self, name: str) -> None:
        """Refuse a state that another family saved: the same names mean other things there.

        Raises:
            StateError: it did.
        """
        if name != self.name:
            saver = _RULES[name].class_name if name in _RULES else name
            raise StateError(f"the state was saved by {saver}; this optimizer is {self.class_name}.")

    def layout(self, shape: tuple[int, ...]) -> Layout | None:
        """Return how a parameter of this shape is treated, if options and roles do not decide it; None if they do."""
        return None

    # --- costs ----------------------------------------------------------------------------------------------------

    @abstractmethod
    def matrices(self, solver: RootSolver) -> int:
        """Return how many matrices of a factor's size are kept for each factor, itself included."""

    @abstractmethod
    def refresh_cost(self, block: Sequence[int], mode: int, hyper: Hyper) -> float:
        """Return what it costs to refresh one factor of one block, in multiply-adds of a matrix product."""

    @abstractmethod
    def passes(self, hyper: Hyper) -> tuple[int, int]:
        """Return the products with a matrix of each factor's size: at every step, and where it gathers."""

    # --- the step -------------------------------------------------------------------------------------------------

    @abstractmethod
    def new_state(self, blocks: Blocks, hyper: Hyper) -> Tensors:
        """Make the state of blocks that have had no gradient."""

    @abstractmethod
    def accumulate(self, state: Tensors, grads: Tensor, modes: Sequence[int], hyper: Hyper, step: int) -> Moments:
        """Take gradients (B, ...) into factors and moments.

        Args:
            state: What :meth:`new_state` made; changed in place.
            grads: The gradients; not changed.
            modes: The modes that have a factor.
            hyper: Options.
            step: The step all these blocks are at, from 1.
        """

    @abstractmethod
    def refresh(self, state: Tensors, mode: int, index: Tensor | slice, hyper: Hyper, step: int) -> Tensor | None:
        """Take the roots (or bases) of one mode and some blocks anew.

        Returns:
            What :meth:`carry` needs to bring moments, which all modes of a block share, up to date; None for nothing.
        """

    @abstractmethod
    def root_tensors(self, state: Tensors, mode: int) -> list[Tensor]:
        """Return what :meth:`refresh`, or :meth:`carry` apart from moments, changes in a mode, one row per block.

        Where a family :attr:`carries`, it is the one tensor of the shape that :meth:`refresh` returns.
        """

    def carry(self, state: Tensors, mode: int, index: Tensor | slice, found: Tensor, hyper: Hyper, step: int) -> None:
        """Bring moments up to date with what :meth:`refresh` found; called only where it returns something."""
        raise NotImplementedError(f"{self.title} found something in refresh, but has no carry.")

    @abstractmethod
    def direction(
        self, state: Tensors, moments: Moments, modes: Sequence[int], hyper: Hyper, step: int, *, peek: bool = False
    ) -> Tensor:
        """Return the updates from what :meth:`accumulate` returned; ``peek`` leaves the state as it is."""

    def apply(self, targets: list[Tensor], updates: list[Tensor], group: dict[str, Any], steps: Sequence[int]) -> None:
        """Change parameters.

        Args:
            targets: The parameters, or the parts or copies of them that this process changes.
            updates: Updates of the same shapes; may be changed.
            group: Gives the learning rate and the decay.
            steps: The step each parameter is at.
        """
        apply_updates(targets, updates, group)

    @abstractmethod
    def reference(
        self, state: Tensors, grad: Tensor, modes: Sequence[int], hyper: Hyper, step: int, refresh: Sequence[bool]
    ) -> Tensor:
        """Do all of the above for one block, written to be read; see :func:`reference_update`."""

    # --- looking at a state ---------------------------------------------------------------------------------------

    @abstractmethod
    def preview(self, state: Tensors, mean: Tensor, modes: Sequence[int], hyper: Hyper, step: int) -> Tensor:
        """Return the updates the present state would make.

        Args:
            state: The state; not changed.
            mean: The mean of the gradients as it is kept; without one (``betas[0] = 0``) the last gradients.
            modes: The modes that have a factor.
            hyper: Options.
            step: The step the blocks are at.
        """

    @abstractmethod
    def residuals(self, state: Tensors, mode: int, rows: Tensor | slice, hyper: Hyper, step: int) -> Tensor:
        """Return for some blocks (B,) how far what was last refreshed is from fitting the present factor."""

    @abstractmethod
    def conditions(self, state: Tensors, mode: int, hyper: Hyper, step: int, *, quick: bool = False) -> Tensor:
        """Return the condition numbers (B,) of the factors of one mode; NaN where unknown.

        Args:
            state: The blocks' state.
            mode: The mode.
            hyper: The options.
            step: The step.
            quick: A lower bound will do.
        """

    @abstractmethod
    def operator_tensors(self, modes: Sequence[int]) -> list[str]:
        """Return the names of the state tensors that :meth:`operator` reads."""

    @abstractmethod
    def operator(self, state: Tensors, tile: Tile, hyper: Hyper, step: int) -> Operator:
        """Return the curvature matrix that the state of one block (without the first index) stands for."""


_RULES: dict[str, Rule] = {}

R = TypeVar("R", bound=Rule)


def register(kind: type[R]) -> type[R]:
    """Let states name a family; a decorator for its rule."""
    _RULES[kind.name] = kind()
    return kind
