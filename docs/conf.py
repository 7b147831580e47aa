"""How Sphinx builds the documentation; `make docs` runs it, without a network."""

from __future__ import annotations

import os
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "_ext"))

import kronscope
from gallery import example_order, picture_scraper, staged_examples
from inventories import local_inventories

project = "kronscope"
author = "The kronscope developers"
copyright = author
release = version = kronscope.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.intersphinx",
    "sphinx_copybutton",
    "sphinx_gallery.gen_gallery",
    # our own, in _ext
    "gallery",
    "mathml",
    "examples_in_docstrings",
    "links_to_the_repository",
    "whole_site",
]
exclude_patterns = ["_ext", "inventories", "**sg_execution_times*", "gallery/*.py"]
suppress_warnings = ["config.cache"]
nitpicky = True
# Types in annotations that have no page of their own: type variables, aliases, and what is private or optional.
nitpick_ignore_regex = [
    ("py:.*", r"kronscope\.\w+\.\w+.*"),
    ("py:.*", r"(transformers|lightning|hypothesis)\..*"),
    ("py:class", r"Log|LossFunction|OperatorSource|Refresh|RootSolver|SearchStrategy|Spanned|tuple\[int"),
]

# --- pages
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 4
highlight_language = "none"

# --- docstrings
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_default_options = {"members": True}
autodoc_mock_imports = ["lightning", "timm", "wandb"]
autoclass_content = "class"
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
python_use_unqualified_type_names = True
maximum_signature_line_length = 88

# --- other people's documentation: the few names we refer to, listed in inventories/, so that no build needs a network
intersphinx_mapping = local_inventories(HERE / "inventories", HERE.parent / "build" / "inventories")
intersphinx_timeout = 5

# tables that examples print are as wide as a page
os.environ["COLUMNS"] = "84"
# --- the gallery: examples/, run where their output does not litter the sources
sphinx_gallery_conf = {
    "examples_dirs": str(staged_examples(HERE.parent / "examples", HERE.parent / "build" / "examples")),
    "gallery_dirs": "gallery",
    # the others need torchrun, or packages that are not installed here
    "filename_pattern": r"(measure_\w+|history_\w+|custom_\w+|train_\w+|watch_\w+|advise_\w+)\.py$",
    "within_subsection_order": example_order,
    "image_scrapers": (picture_scraper,),
    "matplotlib_animations": False,
    "download_all_examples": False,
    "show_memory": False,
    "write_computation_times": False,
    "show_signature": False,
    "remove_config_comments": True,
    "abort_on_example_error": True,
    "capture_repr": (),
    "min_reported_time": 3600,
    "reset_modules": (),
    "default_thumb_file": str(HERE / "_static" / "processes.svg"),
}

# --- the look
html_theme = "furo"
html_title = "kronscope"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_search_scorer = str(HERE / "_ext" / "search_scores.js")
html_show_search_summary = False  # fetching pages is what browsers forbid on a file system
html_copy_source = False
html_show_sourcelink = False
html_favicon = "_static/logo.svg"
html_theme_options = {"sidebar_hide_name": False, "light_logo": "logo.svg", "dark_logo": "logo.svg"}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
