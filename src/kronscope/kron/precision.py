"""Products in full float32 precision, whatever torch was told to allow; and what it was told, put back exactly.

Torch has two interfaces. The older, ``torch.set_float32_matmul_precision``, sets all back ends at once. In the newer, a
back end's products have a setting of their own, or inherit their back end's, which may inherit the one of all; reading
gives what is in force, not where it comes from. Writing that back would pin what was inherited, so that later changes
of the general setting had no effect.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch

__all__ = ["exact_products", "full_precision"]

_BACKENDS = ("cuda", "mkldnn")


@contextmanager
def full_precision(device_types: Iterable[str], *, products: bool = True) -> Iterator[None]:
    """Run without autocast and without TF32 or bf16 products, whatever the surroundings; restores them.

    Args:
        device_types: Where autocast may be on.
        products: False leaves alone what torch allows products to be.
    """
    with ExitStack() as contexts:
        for kind in device_types:
            if torch.is_autocast_enabled(kind):
                contexts.enter_context(torch.autocast(kind, enabled=False))
        if products:
            contexts.enter_context(exact_products())
        yield


@contextmanager
def exact_products() -> Iterator[None]:
    """Run without TF32 or bf16 products; restores what was allowed."""
    try:
        precision = torch.get_float32_matmul_precision()
    except RuntimeError:
        # set through torch.backends.*.fp32_precision, which the older interface refuses to mix with
        precision = ""
    if precision == "highest":
        yield
        return
    own = {backend: _own_setting(backend) for backend in _BACKENDS} if _has_settings() else {}
    if precision:
        torch.set_float32_matmul_precision("highest")
    else:
        for backend in _BACKENDS:
            _set(backend, "matmul", "ieee")
    try:
        yield
    finally:
        if precision:
            # also those that the older interface reaches, but was not what set them
            torch.set_float32_matmul_precision(precision)
        for backend, value in own.items():
            _set(backend, "matmul", value)


def _has_settings() -> bool:
    return hasattr(torch._C, "_set_fp32_precision_setter")


def _get(backend: str, operation: str) -> str:
    return str(torch._C._get_fp32_precision_getter(backend, operation))


def _set(backend: str, operation: str, value: str) -> None:
    torch._C._set_fp32_precision_setter(backend, operation, value)


def _own_setting(backend: str) -> str:
    """Return what the products of a back end have been set to, "none" where they inherit."""
    found = _get(backend, "matmul")
    if found == "none":
        return found
    other = "ieee" if found != "ieee" else "tf32"
    with _changed("generic", other):
        if _get(backend, "matmul") != found:
            return "none"
        inherits = _get(backend, "all") == other
    if inherits:
        return found
    # the back end has a setting of its own, which the products may have from there
    with _changed(backend, other):
        return found if _get(backend, "matmul") == found else "none"


@contextmanager
def _changed(backend: str, value: str) -> Iterator[None]:
    before = _get(backend, "all")
    _set(backend, "all", value)
    try:
        yield
    finally:
        _set(backend, "all", before)
