"""What wheel and sdist contain: the sources, what the build backend adds, and nothing else.

    python tests/contents.py dist

`make dist` runs it on what was built; a test runs the same where the build backend is installed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

ROOT = Path(__file__).parent.parent
# Made by the build backend.
_DIST_INFO = {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE"}
# Of no use outside of this repository.
_NOT_IN_SDIST = {".ci/run"}
# Sources whose names begin with a dot; others are left by tools and editors.
_HIDDEN_SOURCES = {".ci", ".github", ".gitignore"}


def sources(untracked: bool) -> set[str]:
    """Files under version control, and on request those to come; in an unpacked sdist those that are there.

    Where git is not installed, or refuses a clone because it is another user's, they are those that are there, too.
    """
    if (ROOT / ".git").exists():
        command = ["git", "ls-files", "-z", "--cached", *(["--others", "--exclude-standard"] if untracked else [])]
        try:
            listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        except (OSError, subprocess.CalledProcessError):
            return set(_found())
        # a file that is removed but not yet committed is not missed
        return {name for name in listed.split("\0") if name and (ROOT / name).exists()}
    return set(_found())


def _found() -> Iterator[str]:
    """What is there, but for what .gitignore lists and what tools leave."""
    listed = (ROOT / ".gitignore").read_text(encoding="utf-8").split("\n")
    patterns = [line for line in listed if line and not line.startswith("#")]
    for folder, folders, files in os.walk(ROOT):
        inside = Path(folder).relative_to(ROOT)
        folders[:] = [name for name in folders if not _is_left_over(inside / name, patterns, folder=True)]
        kept = (inside / name for name in files if not _is_left_over(inside / name, patterns, folder=False))
        yield from (path.as_posix() for path in kept if path != Path("PKG-INFO"))


def _is_left_over(path: Path, patterns: list[str], *, folder: bool) -> bool:
    if path.name.startswith(".") and path.name not in _HIDDEN_SOURCES:
        return True
    for pattern in patterns:
        if pattern.endswith("/") and not folder:
            continue
        bare = pattern.rstrip("/")
        # as git has it: with a slash a pattern is the whole path, without one the name at any depth
        if fnmatchcase(path.as_posix() if "/" in bare else path.name, bare.lstrip("/")):
            return True
    return False


def wheel_problems(wheel: Path, *, untracked: bool = False) -> list[str]:
    """Say what is missing in a wheel and what should not be there."""
    stem = "-".join(wheel.name.split("-")[:2])
    packages = ("src/kronscope/", "src/kronscope_command.py")
    wanted = {name.removeprefix("src/") for name in sources(untracked) if name.startswith(packages)}
    wanted |= {f"{stem}.dist-info/{name}" for name in _DIST_INFO}
    with zipfile.ZipFile(wheel) as opened:
        return _compared(wheel, set(opened.namelist()), wanted)


def sdist_problems(sdist: Path, *, untracked: bool = False) -> list[str]:
    """Say what is missing in an sdist and what should not be there."""
    stem = sdist.name.removesuffix(".tar.gz")
    wanted = {f"{stem}/{name}" for name in (sources(untracked) - _NOT_IN_SDIST) | {"PKG-INFO"}}
    with tarfile.open(sdist) as opened:
        return _compared(sdist, {member.name for member in opened.getmembers() if member.isfile()}, wanted)


def _compared(archive: Path, found: set[str], wanted: set[str]) -> list[str]:
    lacks = [f"{archive.name} lacks {name}" for name in sorted(wanted - found)]
    return lacks + [f"{archive.name} should not contain {name}" for name in sorted(found - wanted)]


def main() -> None:
    folder = Path(sys.argv[1])
    wheels, sdists = list(folder.glob("*.whl")), list(folder.glob("*.tar.gz"))
    if len(wheels) != 1 or len(sdists) != 1:
        sys.exit(f"{folder} should hold one wheel and one sdist, but holds {len(wheels)} and {len(sdists)}")
    problems = wheel_problems(wheels[0]) + sdist_problems(sdists[0])
    if problems:
        sys.exit("\n".join(problems))
    sys.stdout.write(f"{wheels[0].name} and {sdists[0].name} contain the sources and nothing else\n")


if __name__ == "__main__":
    main()
