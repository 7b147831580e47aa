"""docs/scaling.md is what its script makes."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).parents[3]


def test_the_scaling_document_is_what_its_script_makes() -> None:
    """All numbers of processes on the small model, up to 64 on the large one: the rest takes most of the time."""
    spec = importlib.util.spec_from_file_location("scaling_estimate", ROOT / "benchmarks" / "scaling_estimate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
        small, large = module.MODELS.items()
        assert module.SIZES == (8, 64, 256, 1024)
        parts = [module.HEAD, *module.table(small[0], *small[1])]
        with mock.patch.object(module, "SIZES", (8, 64)):
            parts += module.table(large[0], *large[1])
        made = "\n".join([*parts, module.TAIL]).splitlines()
    finally:
        del sys.modules[spec.name]
    written = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8").splitlines()
    left_out = [place for place, line in enumerate(written) if line.startswith(("| 256 |", "| 1024 |"))][2:]
    assert len(left_out) == 2
    assert [line for place, line in enumerate(written) if place not in left_out] == made
