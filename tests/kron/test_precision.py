"""Products are exact inside, and every setting is afterwards as it was, inherited ones included."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kronscope.kron.precision import exact_products, full_precision

LEVELS = [(backend, "all") for backend in ("generic", "cuda", "mkldnn")] + [("cuda", "matmul"), ("mkldnn", "matmul")]

pytestmark = pytest.mark.skipif(
    not hasattr(torch._C, "_set_fp32_precision_setter"), reason="this torch has the older interface alone"
)


def settings() -> dict[tuple[str, str], str]:
    return {level: torch._C._get_fp32_precision_getter(*level) for level in LEVELS}


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")
    for level in LEVELS:
        torch._C._set_fp32_precision_setter(*level, "none")


SETTINGS: dict[str, Any] = {
    "nothing": lambda: None,
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
    "allow_tf32": lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
    "all": lambda: setattr(torch.backends, "fp32_precision", "tf32"),
    "cuda": lambda: torch._C._set_fp32_precision_setter("cuda", "all", "tf32"),
    "cuda's products": lambda: torch._C._set_fp32_precision_setter("cuda", "matmul", "tf32"),
    "mkldnn's products": lambda: torch._C._set_fp32_precision_setter("mkldnn", "matmul", "bf16"),
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("later", ["ieee", "tf32"])
def test_settings_are_exact_inside_and_inherit_afterwards_as_before(name, later):
    SETTINGS[name]()
    before = settings()
    with exact_products():
        inside = settings()
        assert inside["cuda", "matmul"] in ("ieee", "none")
        assert inside["mkldnn", "matmul"] in ("ieee", "none")
    assert settings() == before
    # what inherits still follows the general setting, and what has its own does not
    torch.backends.fp32_precision = later  # type: ignore[attr-defined]
    with exact_products():
        pass
    after = settings()
    torch.backends.fp32_precision = before["generic", "all"]  # type: ignore[attr-defined]
    fresh = settings()
    assert fresh == before
    torch.backends.fp32_precision = later  # type: ignore[attr-defined]
    assert settings() == after


@pytest.mark.parametrize("name", SETTINGS)
def test_an_error_inside_restores_too(name):
    SETTINGS[name]()
    before = settings()
    with pytest.raises(RuntimeError, match="inside"), full_precision({"cpu"}):
        raise RuntimeError("inside")
    assert settings() == before
