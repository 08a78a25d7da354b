"""The figure of a machine plan: the front, by cost and by what it is for."""

from __future__ import annotations

from typing import Any

from markupsafe import Markup
from matplotlib.figure import Figure

from pcg.explain.page.svg import COLORS, note, svg_element
from pcg.plan.candidate import Candidate
from pcg.plan.plan_data import PlanData

_SIZE = (11.0, 3.8)
_MARKS = "osD^vP*X"
_COLORS = ("activations", "save", "compress", "recompute", "drop", "workspace", "other")


def front_figure(plan: PlanData) -> Markup:
    """Return the front: cost across, tokens a second or the time per token up."""
    trains = plan.workload.training is not None
    is_priced = all(one.dollars_per_hour is not None for one in plan.front)

    def cost(one: Candidate) -> float:
        return (one.dollars_per_hour or 0.0) if is_priced else one.machine.gpus

    def height(one: Candidate) -> float:
        return one.throughput if trains else 1e3 * one.latency_s

    def draw(figure: Figure) -> None:
        figure.set_layout_engine("constrained")
        axes = figure.add_subplot()
        for place, gpu in enumerate(dict.fromkeys(one.machine.gpu for one in plan.front)):
            of_gpu = [one for one in plan.front if one.machine.gpu == gpu]
            style: dict[str, Any] = {
                "color": COLORS[_COLORS[place % len(_COLORS)]],
                "marker": _MARKS[place % len(_MARKS)],
                "linestyle": "",
            }
            places = ([*map(cost, of_gpu)], [*map(height, of_gpu)])
            axes.plot(*places, label=gpu, **style)
            for one in of_gpu:
                (mark,) = axes.plot(cost(one), height(one), **style)
                note(mark, _words(one, trains))
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("dollars an hour" if is_priced else "GPUs")
        axes.set_ylabel("finetuned tokens/s" if trains else "ms per output token")
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=8)

    return svg_element("front", draw, _SIZE, "Machines of the front")


def _words(one: Candidate, trains: bool) -> str:
    words = f"{one.machine}"
    if trains:
        words += f": {one.throughput:,.0f} finetuned tokens/s"
    if one.load is not None:
        words += f", {1e3 * one.load.tpot_s:.3g} ms per output token"
    return words
