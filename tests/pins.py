"""Writes constraints-hashed.txt: the pins of constraints.txt with the SHA-256 of every file the package index has.

    python tests/pins.py

torch is left out: under one version there are other files for CPUs and for every version of CUDA, on other indexes.
"""

from __future__ import annotations

import html
import re
import sys
import urllib.request
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).parent.parent
INDEX = "https://pypi.org/simple"
LEFT_OUT = ("torch",)
HEAD = """\
# The pins of constraints.txt but for torch, with the SHA-256 of every file that the package index has for them.
# Written by `make pins`; SECURITY.md says how to install from it. Compared with constraints.txt by a test.
"""


def pins() -> list[tuple[str, str, str]]:
    """Name, version and marker of every line of constraints.txt but those left out."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    found = [re.fullmatch(r"([a-z0-9-]+)==([^;\s]+)\s*(;.*)?", line) for line in lines if line and line[0] != "#"]
    assert all(found), "a line of constraints.txt is not a pin"
    return [(one[1], one[2], one[3] or "") for one in found if one is not None and one[1] not in LEFT_OUT]


def files_of(name: str) -> dict[str, str]:
    """The index's files of a package, with their SHA-256."""
    with urllib.request.urlopen(f"{INDEX}/{name}/", timeout=60) as answer:
        links = re.findall(r'href="([^"]+)"', answer.read().decode())
    parts = [urlsplit(html.unescape(link)) for link in links]
    return {
        unquote(part.path.rpartition("/")[2]): part.fragment.removeprefix("sha256=")
        for part in parts
        if part.fragment.startswith("sha256=")
    }


def is_of(file: str, name: str, version: str) -> bool:
    """Whether a file is a wheel or an sdist of that version."""
    stem = file.removesuffix(".tar.gz").removesuffix(".zip")
    if file.endswith(".whl"):
        found = file.split("-")[:2]
    elif stem != file and "-" in stem:
        found = list(stem.rpartition("-")[::2])
    else:
        return False
    return re.sub(r"[-_.]+", "-", found[0]).lower() == name and found[1] == version


def main() -> None:
    lines = [HEAD.rstrip("\n")]
    for name, version, marker in pins():
        hashes = sorted({digest for file, digest in files_of(name).items() if is_of(file, name, version)})
        if not hashes:
            sys.exit(f"the index has no file of {name} {version}")
        lines.append(f"{name}=={version}{marker} \\")
        lines.append(" \\\n".join(f"    --hash=sha256:{digest}" for digest in hashes))
    (ROOT / "constraints-hashed.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
