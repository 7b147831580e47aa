"""The python code blocks of README.md and docs/*.md run, in order, one namespace per file.

A block opened by ```` ```python no-run ```` is shown but not run.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
FENCE = re.compile(
    r"^(?P<ticks>`{3,})(?P<info>[^`\n]*)\n(?P<code>.*?)^(?P=ticks)`*[ \t]*$", re.MULTILINE | re.DOTALL
)


class Block(NamedTuple):
    """A code block and the number of its first line."""

    line: int
    code: str


def runnable_blocks(text: str) -> list[Block]:
    """Find the blocks whose info string is exactly ``python``."""
    return [
        Block(line=text.count("\n", 0, match.start("code")) + 1, code=match["code"])
        for match in FENCE.finditer(text)
        if match["info"].strip() == "python"
    ]


def documents() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


WITH_BLOCKS = [path for path in documents() if runnable_blocks(path.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("path", WITH_BLOCKS, ids=lambda path: str(path.relative_to(ROOT)))
def test_code_blocks_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # examples may save files
    namespace: dict[str, object] = {"__name__": "__docs__"}
    for block in runnable_blocks(path.read_text(encoding="utf-8")):
        # Blank lines in front make a traceback name the line of the document.
        code = "\n" * (block.line - 1) + block.code
        exec(compile(code, str(path), "exec"), namespace)


def test_the_readme_has_an_example_that_runs() -> None:
    assert ROOT / "README.md" in WITH_BLOCKS


def test_only_blocks_marked_python_run() -> None:
    shown = "```python no-run\nboom\n```\n```\nboom\n```\n"
    text = "a\n```python\nx = 1\n```\n" + shown + "````python\n'''\n```\n'''\n````"
    assert runnable_blocks(text) == [Block(3, "x = 1\n"), Block(12, "'''\n```\n'''\n")]
