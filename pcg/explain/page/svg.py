"""Figures of matplotlib as SVG, for a page or for a file: text stays text."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import Any
from xml.etree import ElementTree

import matplotlib
from markupsafe import Markup
from matplotlib.artist import Artist
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

COLORS = {
    "paper": "#fcfcfa", "ink": "#1d2127", "soft": "#59616c", "rule": "#dcdfe2", "other": "#8892a0",
    "activations": "#c9573a", "workspace": "#e9a78d",
    "save": "#1f5ba3", "save-in": "#e2ecf8", "compress": "#0f6b59", "compress-in": "#dcf1ea",
    "recompute": "#8a4d05", "recompute-in": "#fbecd6", "drop": "#5d646e", "drop-in": "#fcfcfb",
}  # fmt: skip
"""The light colours, by the names of the page's variables (style.css) that stand for them there."""

_NOTE = "note: "
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "pcg",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9.0,
    "text.color": COLORS["ink"],
    "text.parse_math": False,
    "axes.edgecolor": COLORS["rule"],
    "axes.labelcolor": COLORS["soft"],
    "axes.facecolor": "none",
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": COLORS["rule"],
    "xtick.color": COLORS["rule"],
    "xtick.labelcolor": COLORS["soft"],
    "ytick.left": False,
    "ytick.labelcolor": COLORS["soft"],
    "legend.frameon": False,
}


def note(artist: Artist, words: str) -> None:
    """Give what an artist draws a title, which is shown where it is pointed at."""
    artist.set_gid(f"{_NOTE}{words}")


def svg_file(
    draw: Callable[[Figure], None], size: tuple[float, float], title: str, paper: str = "white"
) -> str:
    """Return a figure as an SVG file.

    Args:
        draw: a function that fills the figure.
        size: the figure's width and height in units of 72 pixels.
        title: what the figure shows.
        paper: the colour behind it.
    """
    file = io.StringIO()
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=size, facecolor=paper)
        FigureCanvasSVG(figure)
        draw(figure)
        figure.savefig(file, format="svg", metadata={"Date": None, "Title": title})
    return re.sub(f'<g id="{_NOTE}([^"]*)">', r"<g><title>\1</title>", file.getvalue())


def svg_element(
    name: str, draw: Callable[[Figure], None], size: tuple[float, float], title: str
) -> Markup:
    """Return a figure as an element of a page, in its colours.

    Artists that have a `note` get the class `point` and a title.

    Args:
        name: a prefix of the element's ids.
        draw: a function that fills the figure.
        size: the figure's width and height in units of 72 pixels.
        title: what the figure shows, for readers who do not see it.
    """
    root = ElementTree.fromstring(svg_file(draw, size, title, "none"))
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag.endswith(("}metadata", "}style", "}clipPath")):
                parent.remove(child)
    for part in root.iter():
        part.tag = part.tag.rpartition("}")[2]
        given = {key.rpartition("}")[2]: value for key, value in part.attrib.items()}
        part.attrib = {k: v for k, v in given.items() if k not in ("id", "clip-path")}
        id_ = given.get("id", "")
        if part.find("{*}title") is not None:
            part.set("class", "point")
        elif part.tag == "path" and id_:  # a marker, which others refer to
            part.set("id", f"{name}-{id_}")
        if "href" in given:
            part.set("href", f"#{name}-{given['href'][1:]}")
    width = f"{1.2 * 72 * size[0]:.0f}"
    kept = {"viewBox": root.get("viewBox", ""), "width": width}
    root.attrib = {**kept, "role": "img", "class": "plot"}
    text = ElementTree.tostring(root, "unicode", short_empty_elements=False)
    for variable, color in COLORS.items():
        text = text.replace(color, f"var(--{variable})")
    return Markup(text)
