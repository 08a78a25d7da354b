"""The report that `pcg.explain` returns: its data, with methods that render it."""

from __future__ import annotations

from dataclasses import dataclass

from pcg.explain.report_data import ReportData
from pcg.explain.text import report_text


@dataclass(frozen=True)
class Report(ReportData):
    """A report as users have it; `to_json` of its data is the third way to render it."""

    def to_html(self) -> str:
        """Return the report as one HTML page that needs no other file, `pcg explain --html`."""
        from pcg.explain.page.page import page  # its plotting library takes a second to import

        return page(self)

    def to_text(self, tensors: bool = False, formulas: bool = False) -> str:
        """Return the report as monospaced text of at most 100 columns, formulas apart.

        Args:
            tensors: list every tensor of a layer, and what becomes of it.
            formulas: print formulas of every kind of memory instead of the numbers.
        """
        return report_text(self, tensors, formulas)
