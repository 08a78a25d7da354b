"""HTML and SVG elements as text. Whatever is not an element is escaped, in one place."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


Child = str | int | None
"""What stands in an element: text is escaped, `Markup` is not, None is nothing."""

_VOID = frozenset({"input", "meta"})


def element(tag: str, /, *children: Child, **attributes: str | float | bool | None) -> Markup:
    """One element.

    Args:
        tag: its name.
        children: what stands in it.
        attributes: `class_` is `class`, other underscores are hyphens; True has no value, and False
            and None leave the attribute out.
    """
    opening = tag
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        opening += f" {key.rstrip('_').replace('_', '-')}"
        if value is not True:
            text = f"{value:.6g}" if isinstance(value, float) else str(value)
            opening += f'="{escape(text)}"'
    if tag in _VOID:
        return Markup(f"<{opening}>")
    return Markup(f"<{opening}>{joined(children)}</{tag}>")


def joined(children: Iterable[Child]) -> Markup:
    """Elements and texts one after the other."""
    return Markup("".join(_text(child) for child in children))


def _text(child: Child) -> str:
    if child is None:
        return ""
    return child if isinstance(child, Markup) else escape(str(child), quote=False)


# ------------------------------------------------------------------------------- common groups


def table(heads: Iterable[Child], *bodies: Markup, class_: str = "", caption: str) -> Markup:
    """A table with one row of heads.

    Args:
        heads: of the columns; one that starts with "#" is of a column of numbers.
        bodies: `tbody` elements.
        class_: of the table.
        caption: what it shows, for who does not see the page.
    """
    cells = []
    for head in heads:
        text = str(head)
        numbers = text.startswith("#")
        cells.append(
            element("th", text.removeprefix("#"), scope="col", class_="n" if numbers else None)
        )
    return element(
        "table",
        element("caption", caption, class_="unseen"),
        element("thead", element("tr", *cells)),
        *bodies,
        class_=class_ or None,
    )


def row(head: Child, *cells: Child, **attributes: str | None) -> Markup:
    """A row of a table: its head, then cells of numbers."""
    return element(
        "tr",
        element("th", head, scope="row"),
        *(element("td", cell, class_="n") for cell in cells),
        **attributes,
    )


def scroll(label: str, *children: Child) -> Markup:
    """A box in which what is wider than the page scrolls, by keyboard too."""
    return element("div", *children, class_="scroll", role="region", aria_label=label, tabindex="0")


def section(id_: str, title: str, *children: Child) -> Markup:
    """A section of the page, with its heading."""
    heading = element("h2", title, id=f"{id_}-title")
    return element("section", heading, *children, id=id_, aria_labelledby=f"{id_}-title")
