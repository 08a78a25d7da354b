"""The report of a cut: its data, with methods that render it."""

from __future__ import annotations

from dataclasses import dataclass

from pcg.explain.split.page import split_page
from pcg.explain.split.report_data import SplitData
from pcg.explain.split.text import split_text


@dataclass(frozen=True)
class SplitReport(SplitData):
    """A report of a cut as users have it; `to_json` of its data is the third way to render it."""

    def to_text(self) -> str:
        """Return the report as monospaced text of at most 100 columns, long names apart."""
        return split_text(self)

    def to_html(self) -> str:
        """Return the report as one HTML page that needs no other file."""
        return split_page(self)
