"""The registry: a new approximation is one file with a frozen dataclass, registered by name.

The command line, the docs' table, legends and the conformance tests follow from what is registered here.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, ClassVar, Protocol, TypeVar

from kronscope.errors import OptionError
from kronscope.gradients.stream import GradientStream
from kronscope.kron import Operator

__all__ = ["Approximation", "all_approximations", "get", "names", "options_of", "register", "several"]


class Approximation(Protocol):
    """Anything that can fit an operator to a gradient stream; your own class needs ``name``, ``title`` and ``fit``.

    Attributes:
        name: The name it is registered under, and that rows of results have.
        title: The name people read in legends and tables.
        kronecker: Whether the fit is a single Kronecker product.
        fits_truth: Whether it is always fitted on the truth itself, as the bound for the others is.
        uses_batches: Whether the batch size it is fitted with makes a difference to it.
        in_shampoo_basis: Whether it is diagonal in the eigenbasis of Shampoo's factors. Approximations that are share
            one decomposition.

    >>> from dataclasses import dataclass
    >>> import torch, kronscope as ks
    >>> @dataclass(frozen=True)
    ... class Traces:
    ...     name = "traces"
    ...     title = "Multiple of the identity"
    ...     def fit(self, stream):
    ...         m, n = stream.shape
    ...         return ks.kron.Identity((m, n), ks.SecondMoment(stream).trace() / (m * n))
    >>> stream = ks.GradientStream.from_tensors(torch.ones(4, 2, 3))
    >>> round(ks.cosine(ks.SecondMoment(stream), Traces().fit(stream)), 3)
    0.408
    """

    name: ClassVar[str]
    title: ClassVar[str]
    kronecker: ClassVar[bool]
    fits_truth: ClassVar[bool]
    uses_batches: ClassVar[bool]
    in_shampoo_basis: ClassVar[bool]

    def fit(self, stream: GradientStream) -> Operator:
        """Fit the operator to the stream's second moment.

        Args:
            stream: The gradients.

        Returns:
            An operator of the stream's shape.
        """
        ...


_REGISTRY: dict[str, type[Any]] = {}
_Class = TypeVar("_Class", bound=type[Any])


def register(cls: _Class) -> _Class:
    """Register an approximation class under its ``name``, so that it can be asked for by that name; a class decorator.

    Args:
        cls: A frozen dataclass with the members of :class:`Approximation`; its fields, if any, have defaults.

    Returns:
        The class itself.

    Raises:
        OptionError: another class has the name already.

    >>> from dataclasses import dataclass
    >>> try:
    ...     @register
    ...     @dataclass(frozen=True)
    ...     class Mine:
    ...         name = "shampoo2"
    ... except OptionError as error:
    ...     print(error)
    an approximation named 'shampoo2' exists already (Shampoo2); pick another name.
    """
    known = _REGISTRY.get(cls.name)
    if known is not None and known.__qualname__ != cls.__qualname__:
        raise OptionError(
            f"an approximation named {cls.name!r} exists already ({known.__qualname__}); pick another name."
        )
    _set_flags(cls)
    _REGISTRY[cls.name] = cls
    return cls


def names() -> tuple[str, ...]:
    """List the registered names, in the order of the table in the documentation.

    Returns:
        The names.

    >>> names()[:4]
    ('optimal', 'optimal-paper', 'kronecker-sum', 'shampoo2')
    """
    return tuple(_REGISTRY)


def get(name: str | Approximation, **options: Any) -> Approximation:
    """Make an approximation from its name.

    Args:
        name: A registered name; an object that is an approximation already is returned as it is.
        options: Fields of the approximation, such as ``rank`` or ``exponent``.

    Returns:
        The approximation; its ``fit(stream)`` gives an operator.

    Raises:
        OptionError: no such name or option; the message lists what exists.

    >>> get("kronecker-sum", rank=3)
    KroneckerSumFit(rank=3, tolerance=1e-08, max_rounds=200)
    """
    if not isinstance(name, str):
        if isinstance(name, type):
            raise OptionError(f"an approximation is an object, got the class {name.__name__}: write {name.__name__}().")
        if not callable(getattr(name, "fit", None)) or not isinstance(getattr(name, "name", None), str):
            raise OptionError(f"an approximation needs a name and a fit(stream) method, got {name!r}.")
        _set_flags(type(name))
        return name
    if name not in _REGISTRY:
        near = difflib.get_close_matches(name, _REGISTRY, n=3)
        hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"there are: {', '.join(_REGISTRY)}."
        raise OptionError(f"there is no approximation {name!r}; {hint}")
    cls = _REGISTRY[name]
    allowed = {field.name for field in fields(cls)}
    if unknown := set(options) - allowed:
        raise OptionError(
            f"{name!r} has no option {', '.join(sorted(unknown))}; it has: {', '.join(sorted(allowed)) or 'none'}."
        )
    made: Approximation = cls(**options)
    return made


def _set_flags(cls: type[Any]) -> None:
    """Give a class the usual answer to what it does not say about itself."""
    usual = {"kronecker": False, "fits_truth": False, "uses_batches": True, "in_shampoo_basis": False}
    for flag, default in usual.items():
        if not hasattr(cls, flag):
            setattr(cls, flag, default)


def options_of(approximation: Approximation) -> str:
    """Write the options of an approximation that are not at their defaults as text.

    Args:
        approximation: The approximation.

    Returns:
        Text such as ``"rank=3"``; empty if all are at their defaults.

    >>> options_of(get("kronecker-sum", rank=3)), options_of(get("kronecker-sum"))
    ('rank=3', '')
    """
    if not is_dataclass(approximation):
        # what another class says of itself, if it does
        return "" if type(approximation).__repr__ is object.__repr__ else _text(approximation)
    known = [field for field in fields(approximation) if field.init]
    given = {field.name: _text(getattr(approximation, field.name)) for field in known}
    usual = {
        field.name: _text(field.default if field.default_factory is MISSING else field.default_factory())
        for field in known
    }
    return ", ".join(f"{name}={text}" for name, text in given.items() if text != usual[name])


def _text(value: object) -> str:
    """A value on one line; without the address that an object shows by default, another one in every run."""
    return type(value).__name__ if type(value).__repr__ is object.__repr__ else " ".join(repr(value).split())


def several(approximations: Sequence[str | Approximation] | str | Approximation) -> tuple[Approximation, ...]:
    """Make approximations from names and objects, and check that no name occurs twice.

    Args:
        approximations: Names or objects.

    Returns:
        The approximations, in the order given.

    Raises:
        OptionError: none is given, or two have one name.

    >>> [item.title for item in several(["optimal", "shampoo2"])]
    ['Optimal Kronecker', 'Shampoo²']
    """
    given = approximations if isinstance(approximations, Sequence) else (approximations,)
    found = tuple(get(item) for item in ((given,) if isinstance(given, str) else given))
    if not found:
        raise OptionError("approximations must hold at least one approximation, such as 'shampoo2'.")
    names_given = [item.name for item in found]
    if twice := sorted({name for name in names_given if names_given.count(name) > 1}):
        raise OptionError(
            f"the approximation {twice[0]!r} is given twice; measure the two in separate calls and merge the results."
        )
    return found


def all_approximations() -> tuple[Approximation, ...]:
    """Make one of each registered approximation, with default options.

    Returns:
        The approximations, in the order of :func:`names`.

    >>> [item.name for item in all_approximations() if item.fits_truth]
    ['optimal', 'optimal-paper', 'kronecker-sum']
    """
    return tuple(get(name) for name in _REGISTRY)
