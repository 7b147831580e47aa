"""The code blocks of docs/integrations.md run, in order, in one namespace, where all packages are there."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from tests.integrations.tiny import needed
from tests.test_docs import DOCS, blocks

PAGE = DOCS / "integrations.md"


@pytest.mark.filterwarnings("ignore")  # the packages warn of each other's deprecations
def test_the_page_runs(timm: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("transformers", "accelerate", "lightning", "peft", "tensorboard"):
        needed(package)
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "__docs__"}
    for block in blocks(PAGE.read_text(encoding="utf-8"), "python no-run"):
        # blank lines in front make a traceback name the line of the document
        exec(compile("\n" * (block.line - 1) + block.code, str(PAGE), "exec", dont_inherit=True), namespace)
    assert (tmp_path / "out" / "checkpoint-10").is_dir()
    assert (tmp_path / "out" / "metrics.csv").exists() is False  # made at the first call
    assert list((tmp_path / "out" / "tensorboard").iterdir())
