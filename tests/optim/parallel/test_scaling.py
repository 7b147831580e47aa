"""docs/scaling.md is what its script makes."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_scaling_document_is_what_its_script_makes() -> None:
    spec = importlib.util.spec_from_file_location("scaling_estimate", ROOT / "benchmarks" / "scaling_estimate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
        assert module.document() == (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
    finally:
        del sys.modules[spec.name]
