"""Every public name is explained where it is defined: what it does, its arguments, what it returns, and an example.

The reference pages of the documentation are made of these docstrings. Their examples run as doctests.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, UnionType
from typing import Any, NamedTuple

import pytest

DOCS = Path(__file__).parent.parent / "docs"
PACKAGES = (
    "kronscope",
    "kronscope.approx",
    "kronscope.curvature",
    "kronscope.errors",
    "kronscope.figures",
    "kronscope.gradients",
    "kronscope.integrations",
    "kronscope.integrations.loggers",
    "kronscope.integrations.transformers",
    "kronscope.kron",
    "kronscope.measures",
    "kronscope.optim",
    "kronscope.report",
    "kronscope.runs",
    "kronscope.testing",
)
# Made by class methods, which explain their own arguments, or not made at all: protocols.
NOT_CONSTRUCTED = {"Approximation", "GradientHistory", "GradientStream", "Operator", "Run", "Watch"}
# Parts of kronscope.integrations that need a package which `make test` does not install.
ELSEWHERE = {"lightning", "timm"}


class Public(NamedTuple):
    """A public name, and what it stands for."""

    name: str
    value: Any


def public() -> Iterator[Public]:
    seen: set[int] = set()
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in module.__all__:
            if name in ELSEWHERE:
                continue
            value = getattr(module, name)
            if not isinstance(value, ModuleType | UnionType | dict | tuple) and id(value) not in seen:
                seen.add(id(value))
                yield Public(f"{package}.{name}", value)


NAMES = list(public())


def methods(cls: type) -> Iterator[tuple[str, Any]]:
    for name, member in vars(cls).items():
        function = getattr(member, "__func__", getattr(member, "fget", member))
        if not name.startswith("_") and inspect.isfunction(function):
            yield name, function


def section(doc: str, name: str) -> str:
    found = re.search(rf"^{name}:\n((?:    .*\n|\n)*)", doc + "\n", re.MULTILINE)
    return found[1] if found else ""


@pytest.mark.parametrize("entry", NAMES, ids=lambda entry: entry.name)
def test_a_public_name_is_explained(entry: Public) -> None:
    doc = inspect.getdoc(entry.value) or ""
    assert doc, "it has no docstring"
    assert ">>> " in doc, "its docstring has no example"
    for line in doc.splitlines():
        assert len(line) <= 120
    is_class = inspect.isclass(entry.value)
    if is_class:
        undocumented = [name for name, method in methods(entry.value) if not method.__doc__]
        assert not undocumented, f"these methods have no docstring: {undocumented}"
    if is_class and (issubclass(entry.value, Exception) or entry.value.__name__ in NOT_CONSTRUCTED):
        return
    explained = section(doc, "Args") + section(doc, "Attributes")
    signature = inspect.signature(entry.value)
    missing = [name for name in signature.parameters if not re.search(rf"^    {name}: \S", explained, re.MULTILINE)]
    assert not missing, f"these arguments are not explained: {missing}"
    if not is_class and signature.return_annotation not in (None, "None"):
        assert section(doc, "Returns").strip(), "it does not say what it returns"


@pytest.mark.parametrize("entry", NAMES, ids=lambda entry: entry.name)
def test_a_public_name_has_its_place_in_the_reference(entry: Public) -> None:
    short = entry.name.rpartition(".")[2]
    pages = "\n".join(path.read_text(encoding="utf-8") for path in sorted((DOCS / "api").glob("*.md")))
    places = re.findall(rf"^\.\. auto(?:function|class):: {short}$|^ *:members:.*\b{short}\b", pages, re.MULTILINE)
    assert places or entry.name.startswith("kronscope.errors."), "docs/api does not show it"


def test_the_list_covers_the_library() -> None:
    names = {entry.name for entry in NAMES}
    assert {"kronscope.measure", "kronscope.Shampoo", "kronscope.approx.get", "kronscope.errors.RunError"} <= names
    assert len(names) > 100


@pytest.mark.parametrize(
    ("doc", "name", "content"),
    [
        ("Do it.\n\nArgs:\n    x: One.\n    y: Two.\n\nReturns:\n    z.", "Args", "    x: One.\n    y: Two.\n\n"),
        ("Do it.", "Args", ""),
    ],
)
def test_sections_are_found(doc: str, name: str, content: str) -> None:
    assert section(doc, name) == content
