"""The page of a machine plan: `page.html`, in the style of the page of `pcg.explain`."""

from __future__ import annotations

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

from pcg.plan.front_table import MACHINE, front_columns, price_words
from pcg.plan.page.figure import front_figure
from pcg.plan.plan_data import PlanData
from pcg.units import gib

KINDS = {
    "weights": "the base model, frozen",
    "adapters": "trainable parameters",
    "gradients": "one for each of them",
    "optimizer": "what the optimizer keeps of each",
    "served_adapters": "adapters that requests use",
    "kv_cache": "keys and values of requests in flight",
    "activations": "saved for backward",
    "workspace": "what the fullest moment needs beside",
}


def page(plan: PlanData) -> str:
    """Return the whole page, which refers to no other file."""
    environment = Environment(
        loader=ChoiceLoader(
            [PackageLoader("pcg.plan", "page"), PackageLoader("pcg.explain", "page")]
        ),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"gib": gib}
    columns = front_columns(plan)
    numbers = {name: cell for name, cell in columns.items() if name != MACHINE}
    return environment.get_template("plan.html").render(
        plan=plan,
        machine=columns[MACHINE],
        columns=numbers,
        kinds=KINDS,
        price_words=price_words(plan),
        figure=front_figure(plan) if plan.front else "",
    )
