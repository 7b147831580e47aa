"""The gallery's examples: copied to the build folder, run there, with the pictures they write."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

__all__ = ["example_order", "picture_scraper", "setup", "staged_examples"]

_ORDER = (
    "measure_digits",
    "history_adagrad",
    "measure_transformer",
    "custom_approximation",
    "train_digits",
    "watch_gpt",
    "advise_cnn",
    "trainer",
    "lightning_watch",
    "ddp",
    "fsdp2",
)
# of examples that draw nothing themselves
_THUMBNAILS = {
    "watch_gpt.py": "images/watching/watch-middle.png",
    "trainer.py": "_static/trainer.svg",
    "lightning_watch.py": "_static/loop.svg",
    "fsdp2.py": "_static/sharded.svg",
}
# What each thumbnail shows, for those who do not see it.
_ALT = {
    "measure_digits": "Cosines of two layers, before and after training, one line for each approximation",
    "history_adagrad": "Cosines of two layers with Adagrad's matrix over a run, a line for each approximation",
    "measure_transformer": "Cosines of layers of a language model as dots with error bars, one row for each layer",
    "custom_approximation": "Cosines of two layers as dots, with Adafactor beside other approximations",
    "train_digits": "Losses of AdamW, Shampoo, SOAP and KL-Shampoo over the steps of a run",
    "watch_gpt": "The live page of a run: curves, a heat map of layers and steps, and a table",
    "advise_cnn": "Cosines of four layers as dots, one for each way to precondition them",
    "trainer": "Drawing of a falling loss that stops half-way and goes on from a checkpoint",
    "lightning_watch": "Drawing of a training loop around the blocks of an optimizer",
    "ddp": "Drawing of four processes that are connected with each other",
    "fsdp2": "Drawing of a matrix cut into rows, each held by one process",
}
_THUMBNAIL = re.compile(r"(image:: \S+/sphx_glr_(?P<stem>\w+)_thumb\.\w+\n\s+:alt:)[ ]*$", re.MULTILINE)
_HEAD = """Gallery
=======

Scripts that run in seconds, on data that comes with the libraries. Each is a file in ``examples/``; what they print and
draw here was made when these pages were built.
"""


def staged_examples(source: Path, target: Path) -> Path:
    """Copy the scripts whose text has changed, so that what they write stays out of the sources."""
    target.mkdir(parents=True, exist_ok=True)
    # pictures of an earlier build would be shown before the code that draws them
    shutil.rmtree(target / "runs", ignore_errors=True)
    scripts = {path.name: path.read_text(encoding="utf-8") for path in source.glob("*.py")}
    for name, picture in _THUMBNAILS.items():
        scripts[name] += f'\n# sphinx_gallery_thumbnail_path = "{picture}"\n'
    scripts["GALLERY_HEADER.rst"] = _HEAD
    for old in target.glob("*.py"):
        if old.name not in scripts:
            old.unlink()
    for name, text in scripts.items():
        path = target / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
    return target


def example_order(filename: str) -> int:
    """From the first thing one does to the last; new ones come at the end."""
    stem = Path(filename).stem
    return _ORDER.index(stem) if stem in _ORDER else len(_ORDER)


def picture_scraper(block: Any, block_vars: dict[str, Any], gallery_conf: dict[str, Any]) -> str:
    """Show each picture that a block of code has written under ``runs/``, once."""
    from sphinx_gallery.scrapers import figure_rst

    script = Path(block_vars["src_file"])
    shown = block_vars["example_globals"].setdefault("_shown_pictures", set())
    names = iter(block_vars["image_path_iterator"])
    placed = []
    for picture in sorted((script.parent / "runs" / script.stem).rglob("*.png")):
        if picture not in shown:
            shown.add(picture)
            target = next(names)
            shutil.copyfile(picture, target)
            placed.append(target)
    return figure_rst(placed, gallery_conf["src_dir"]) if placed else ""


def _with_words(app: Any, name: str, content: list[str]) -> None:
    # sphinx-gallery leaves the alternative text of thumbnails empty
    if name == "gallery/index":
        content[0] = _THUMBNAIL.sub(lambda match: f"{match[1]} {_ALT[match['stem']]}", content[0])


def setup(app: Any) -> dict[str, bool]:
    """Say what thumbnails show; an example without words for its thumbnail ends the build."""
    app.connect("source-read", _with_words)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
