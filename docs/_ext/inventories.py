"""Inventories of other projects' documentation, from short lists, so that links to them need no network to build.

A list has the base address in its first line, then lines ``role name path``; ``$`` at the end of a path stands for the
name. Sphinx wants the compressed form, which is written to the build folder.
"""

from __future__ import annotations

import zlib
from pathlib import Path

__all__ = ["local_inventories"]


def local_inventories(lists: Path, built: Path) -> dict[str, tuple[str, str]]:
    """Write an inventory for each list, and return Sphinx' ``intersphinx_mapping``."""
    built.mkdir(parents=True, exist_ok=True)
    mapping = {}
    for source in sorted(lists.glob("*.txt")):
        base, *lines = [line.strip() for line in source.read_text(encoding="utf-8").splitlines() if line.strip()]
        entries = [line.split() for line in lines]
        content = "".join(f"{name} py:{role} 1 {path} -\n" for role, name, path in entries)
        head = f"# Sphinx inventory version 2\n# Project: {source.stem}\n# Version: \n"
        head += "# The remainder of this file is compressed using zlib.\n"
        target = built / f"{source.stem}.inv"
        target.write_bytes(head.encode() + zlib.compress(content.encode()))
        mapping[source.stem] = (base, str(target))
    return mapping
