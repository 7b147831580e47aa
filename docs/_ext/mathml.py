"""Formulas as MathML, which browsers draw themselves: the pages need no script and no network."""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml

__all__ = ["setup"]

# Parentheses grow with what they enclose in MathML, so their sizes in TeX are left out.
_SIZES = re.compile(r"\\[bB]igg?[lr]?(?![a-zA-Z])")


def _mathml(tex: str, *, as_block: bool) -> str:
    return tex2mathml(_SIZES.sub("", tex), as_block=as_block)


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
