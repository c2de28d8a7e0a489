"""Render sections as one self-contained HTML page."""

from __future__ import annotations

import html
import re
from base64 import b64encode
from collections.abc import Mapping
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from weightnorm.lab.records import RunRecord
from weightnorm.lab.reports.document import FigureSpec, Section
from weightnorm.lab.reports.figures import PAPER, RenderedFigure
from weightnorm.lab.reports.style import INK

TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)


def render(
    sections: list[Section],
    drawings: Mapping[FigureSpec, RenderedFigure],
    records: list[RunRecord],
    problems: list[str],
) -> str:
    """Render the page."""
    return TEMPLATES.get_template("page.html.j2").render(
        sections=sections,
        findings=[(section.title, section.all_findings) for section in sections],
        inline={item: inline(drawing, item.alt) for item, drawing in drawings.items()},
        runs=len(records),
        finished=sum(record.finished for record in records),
        problems=problems,
    )


def inline(drawing: RenderedFigure, alt: str) -> str:
    """Return a figure as an element of the page."""
    kind, content = next(iter(drawing.files.items()))
    if kind == "svg":
        return inline_svg(drawing.name, content.decode(), alt)
    data = b64encode(content).decode()
    return f'<img src="data:image/{kind};base64,{data}" alt="{html.escape(alt)}">'


def inline_svg(name: str, text: str, alt: str) -> str:
    """Return an SVG file as an element of the page.

    Ids get the figure's name as prefix; INK becomes the text color, which follows the color scheme.
    """
    view = re.search(r'<svg [^>]*(viewBox="[^"]*")[^>]*>', text)
    if view is None:
        raise ValueError(f"figure {name} is not an SVG with a viewBox")
    body = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", text[view.end() :])
    body = body.replace(INK, "currentColor").replace(PAPER, "none").strip()
    return f'<svg {view[1]} role="img" aria-label="{html.escape(alt)}">{body}'
