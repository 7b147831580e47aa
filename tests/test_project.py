"""What the project says about itself in several files is the same in all of them."""

from __future__ import annotations

import re
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

import kronscope
from tests.contents import sdist_problems, sources, wheel_problems

ROOT = Path(__file__).parent.parent


def pyproject() -> dict[str, Any]:
    if sys.version_info < (3, 11):
        pytest.skip("tomllib came with Python 3.11")
    import tomllib

    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return found


def pins(name: str) -> dict[str, str]:
    text = (ROOT / name).read_text(encoding="utf-8")
    return dict(re.findall(r"^([a-z0-9-]+)==([^;\s]+)", text, re.MULTILINE))


def test_the_oldest_versions_are_those_that_are_allowed() -> None:
    project = pyproject()["project"]
    groups = [project["dependencies"], *(project["optional-dependencies"][name] for name in ("figures", "paper"))]
    bounds = {}
    for requirement in (item for group in groups for item in group):
        found = re.match(r"([a-z0-9-]+)>=([\d.]+)", requirement)
        assert found is not None, f"{requirement} has no lower bound"
        bounds[found[1]] = found[2]
    oldest = pins("constraints-oldest.txt")
    for name, bound in bounds.items():
        pinned = oldest[name].split(".")
        wanted = bound.split(".")
        wanted += ["0"] * (len(pinned) - len(wanted))
        assert pinned == wanted, f"pyproject.toml allows {name} {bound}, make test-oldest installs {oldest[name]}"


def test_every_version_of_python_that_is_claimed_is_run() -> None:
    project = pyproject()["project"]
    claimed = [name.rpartition(" ")[2] for name in project["classifiers"] if re.search(r":: 3\.\d+$", name)]
    text = (ROOT / ".github" / "workflows" / "test.yml").read_text(encoding="utf-8")
    matrix = re.search(r"python: \[(.*)\]", text)
    assert matrix is not None
    assert re.findall(r"[\d.]+", matrix[1]) == claimed
    assert project["requires-python"] == f">={claimed[0]}"


def test_the_version_is_one() -> None:
    version = pyproject()["project"]["version"]
    assert kronscope.__version__ == version
    assert f"version: {version}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_commands_in_the_workflows_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for path in sorted((ROOT / ".github" / "workflows").glob("*.yml")):
        used = set(re.findall(r"run: make ([a-z-]+)|target: ([a-z-]+)", path.read_text(encoding="utf-8")))
        names = {name for pair in used for name in pair if name}
        assert names, f"{path.name} runs nothing"
        assert names <= targets


def test_the_build_backend_is_one_version() -> None:
    (wanted,) = pyproject()["build-system"]["requires"]
    assert re.fullmatch(r"hatchling==[\d.]+", wanted)
    assert wanted in (ROOT / "Makefile").read_text(encoding="utf-8")
    assert wanted in pyproject()["project"]["optional-dependencies"]["dev"]
    assert f"hatchling=={pins('constraints.txt')['hatchling']}" == wanted


def test_the_pins_with_hashes_are_the_pins() -> None:
    text = (ROOT / "constraints-hashed.txt").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    found = [re.fullmatch(r"(\S+==[^\s;]+)\s*(;.*?)?((?:\s+--hash=sha256:[0-9a-f]{64})+)", line) for line in lines]
    assert all(found)
    hashed = [(one[1], (one[2] or "").strip()) for one in found if one is not None]
    plain = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = [line.partition(";") for line in plain if line and not line.startswith(("#", "torch=="))]
    assert hashed == [(name.strip(), f"{sign}{marker}".strip()) for name, sign, marker in pinned]


def test_wheel_and_sdist_contain_the_sources_and_nothing_else(tmp_path: Path) -> None:
    try:
        from hatchling.builders.sdist import SdistBuilder
        from hatchling.builders.wheel import WheelBuilder
    except ImportError as error:
        pytest.skip(f"the build backend cannot be imported ({error}); `make dist` checks what it builds")
    (wheel,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    (sdist,) = SdistBuilder(str(ROOT)).build(directory=str(tmp_path))
    assert wheel_problems(Path(wheel), untracked=True) == []
    assert sdist_problems(Path(sdist), untracked=True) == []
    with zipfile.ZipFile(wheel, "a") as opened:
        opened.writestr("kronscope/left_over.txt", "")
    assert wheel_problems(Path(wheel), untracked=True) == [
        f"{Path(wheel).name} should not contain kronscope/left_over.txt"
    ]


@pytest.mark.parametrize("clone", ["none", "of another user", "without git"])
def test_sources_are_found_without_git(clone: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = {".gitignore", ".ci/run", ".github/workflows/test.yml", "src/kronscope/runs/run.py", "docs/index.md"}
    others = {
        *("PKG-INFO", ".hypothesis/.gitignore", ".venv-docs/lib/a.py", ".idea/a.xml", "src/kronscope/.a.py.swp"),
        *("runs/x/config.json", "kronscope-demo/a.json", "docs/gallery/a.md", "src/a.egg-info/PKG-INFO", "build/a"),
        *("dist/a.whl", "src/kronscope/__pycache__/a.pyc", ".mypy_cache/a", ".coverage", "docs/sg_execution_times.rst"),
    }
    for name in wanted | others:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / ".gitignore").write_text((ROOT / ".gitignore").read_text(encoding="utf-8"), encoding="utf-8")
    if clone != "none":
        (tmp_path / ".git").mkdir()  # a repository that git refuses, with the same code as another user's
        (tmp_path / ".git" / "HEAD").touch()
    if clone == "without git":
        monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("tests.contents.ROOT", tmp_path)
    assert sources(untracked=True) == sources(untracked=False) == wanted


# at import, as for the parameters of tests
_DRAWN = torch.rand(3)


def test_what_modules_draw_when_they_are_imported_is_the_same_in_every_run() -> None:
    assert torch.equal(_DRAWN, torch.rand(3, generator=torch.Generator().manual_seed(0)))
