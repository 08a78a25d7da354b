"""The plan that `pcg.plan` returns: its data, with methods that render it."""

from __future__ import annotations

from dataclasses import dataclass

from pcg.plan.plan_data import PlanData
from pcg.plan.text import plan_text


@dataclass(frozen=True)
class MachinePlan(PlanData):
    """A plan as users have it; `to_json` of its data is the third way to render it."""

    def to_html(self) -> str:
        """Return the plan as one HTML page that needs no other file, `pcg plan --html`."""
        from pcg.plan.page import page  # its plotting library takes a second to import

        return page(self)

    def to_text(self) -> str:
        """Return the plan as monospaced text of about 100 columns, commands apart."""
        return plan_text(self)
