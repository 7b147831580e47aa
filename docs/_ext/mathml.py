"""Formulas as MathML, which browsers draw themselves: the pages need no script and no network."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from html import unescape
from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml

__all__ = ["setup"]

# Parentheses grow with what they enclose in MathML, so their sizes in TeX are left out.
_SIZES = re.compile(r"\\[bB]igg?[lr]?(?![a-zA-Z])")
# docutils reads the digits of \frac12 as one number.
_HALVES = re.compile(r"\\([dt]?frac)(\d)(\d)")
# those that HTML knows and XML does not
_ENTITIES = re.compile(r"&(?!(?:lt|gt|amp|quot|apos);)\w+;")
_NAMESPACE = "http://www.w3.org/1998/Math/MathML"
_ACCENTS = "\u02c6\u02c9\u02dc"  # hat, bar, tilde


def _mathml(tex: str, *, as_block: bool) -> str:
    tex = _HALVES.sub(r"\\\1{\2}{\3}", _SIZES.sub("", tex))
    root = ET.fromstring(_ENTITIES.sub(lambda match: unescape(match[0]), tex2mathml(tex, as_block=as_block)))
    for element in root.iter(f"{{{_NAMESPACE}}}munderover"):
        letter, index, accent = element
        # docutils puts the index of a letter with an accent below it; it belongs beside both
        if accent.text in _ACCENTS:
            element.tag = f"{{{_NAMESPACE}}}msub"
            both = ET.Element(f"{{{_NAMESPACE}}}mover", accent="true")
            both.extend([letter, accent])
            element[:] = [both, index]
    ET.register_namespace("", _NAMESPACE)
    return ET.tostring(root, encoding="unicode")


def _inline(writer: Any, node: nodes.math) -> None:
    writer.body.append(_mathml(node.astext(), as_block=False))
    raise nodes.SkipNode


def _block(writer: Any, node: nodes.math_block) -> None:
    writer.body.append(f'<div class="formula">{_mathml(node.astext(), as_block=True)}</div>\n')
    raise nodes.SkipNode


def setup(app: Any) -> dict[str, bool]:
    """Make it the way HTML pages show formulas."""
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
    app.config.html_math_renderer = "mathml"
    return {"parallel_read_safe": True, "parallel_write_safe": True}
