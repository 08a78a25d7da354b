"""Shared parts of all pages: head, style, tables and charts; and the tables that notebooks show."""

from collections.abc import Mapping

from markupsafe import Markup


def fact_table(caption: str, facts: Mapping[str, object]) -> str:
    """Return an HTML table with a row for each fact, for `_repr_html_`."""
    row = Markup('<tr><th scope="row">{}</th><td>{}</td></tr>')
    rows = Markup("").join(row.format(name, fact) for name, fact in facts.items())
    return str(
        Markup("<table><caption>{}</caption><tbody>{}</tbody></table>").format(caption, rows)
    )
