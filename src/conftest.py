"""Doctests of modules that need an optional package run where that package is."""

from __future__ import annotations

import importlib.util

collect_ignore = [
    f"kronscope/integrations/{name}.py"
    for name, packages in {
        "lightning": ("lightning",),
        "timm": ("timm", "torchvision"),
        "transformers": ("transformers", "accelerate"),
    }.items()
    if any(importlib.util.find_spec(package) is None for package in packages)
]
