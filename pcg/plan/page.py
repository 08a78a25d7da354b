"""The page of a machine plan: `plan.html`, in the frame that all pages share."""

from __future__ import annotations

from pcg.pages.environment import page_environment
from pcg.plan.figure import front_figure
from pcg.plan.front_table import MACHINE, front_columns, price_words
from pcg.plan.plan_data import PlanData

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
    columns = dict(front_columns(plan))
    machine = columns.pop(MACHINE)
    sizes = plan.chosen.memory_bytes if plan.chosen is not None else {}
    return (
        page_environment("pcg.plan")
        .get_template("plan.html")
        .render(
            plan=plan,
            facts={
                "workload": plan.workload,
                "recipe": plan.method or "no adapters",
                "machines tried": plan.candidates,
                "keep what is promised": plan.kept,
            },
            heads=["machine", *(f"#{head}" for head in columns)],
            rows=[
                (machine(one), [cell(one) for cell in columns.values()], one is plan.chosen)
                for one in plan.front
            ],
            kinds={kind: words for kind, words in KINDS.items() if sizes.get(kind)},
            price_words=price_words(plan),
            front_plot=front_figure(plan) if plan.front else "",
        )
    )
