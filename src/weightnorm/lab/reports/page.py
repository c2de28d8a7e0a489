"""Sections rendered as one HTML page that needs nothing but itself."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from weightnorm.lab.records import RunRecord
from weightnorm.lab.reports.figures import PAPER, Picture
from weightnorm.lab.reports.looks import INK
from weightnorm.lab.reports.section import Plot, Section

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
    pictures: Mapping[Plot, Picture],
    records: list[RunRecord],
    problems: list[str],
) -> str:
    """The page."""
    return TEMPLATES.get_template("page.html.j2").render(
        sections=sections,
        inline={plot: inline(picture, plot.alt) for plot, picture in pictures.items()},
        runs=len(records),
        finished=sum(record.finished for record in records),
        problems=problems,
    )


def inline(picture: Picture, alt: str) -> str:
    """An SVG file as an element of the page: its ids unlike any other figure's, its ink the
    page's own, so that it turns with the colour scheme."""
    text = picture.svg.decode()
    view = re.search(r'<svg [^>]*(viewBox="[^"]*")[^>]*>', text)
    if view is None:
        raise ValueError(f"figure {picture.name} is not an SVG with a viewBox")
    body = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{picture.name}-", text[view.end() :])
    body = body.replace(INK, "currentColor").replace(PAPER, "none").strip()
    return f'<svg {view[1]} role="img" aria-label="{html.escape(alt)}">{body}'
