"""HTML page of a machine plan: `plan.html`, with a figure of the front."""

from __future__ import annotations

from markupsafe import Markup

from pcg.pages import charts
from pcg.pages.charts import Axis
from pcg.pages.environment import page_environment
from pcg.plan.candidate import Candidate
from pcg.plan.plan_data import MACHINE, PlanData, front_columns, price_words

_WIDTH, _HEIGHT, _LEFT, _RIGHT = 792, 274, 62, 784
_COLORS = ("activations", "save", "compress", "recompute", "drop", "workspace", "other")


def front_figure(plan: PlanData) -> Markup:
    """Return a plot of the front: tokens a second, or the time per token, against cost."""
    trains = plan.workload.training is not None
    is_priced = all(candidate.dollars_per_hour is not None for candidate in plan.front)

    def cost(candidate: Candidate) -> float:
        return (candidate.dollars_per_hour or 0.0) if is_priced else candidate.machine.gpus

    def height(candidate: Candidate) -> float:
        return candidate.throughput if trains else 1e3 * candidate.latency_s

    gpus = dict.fromkeys(candidate.machine.gpu for candidate in plan.front)
    styles = {gpu: (_COLORS[place % len(_COLORS)], place) for place, gpu in enumerate(gpus)}
    marks = {gpu: charts.mark(0, 0, *style) for gpu, style in styles.items()}
    head, below = charts.legend(marks, _LEFT, 14, _RIGHT)
    x = Axis(0, 1.05 * max(map(cost, plan.front)), _LEFT, _RIGHT)
    y = Axis(0, 1.08 * max(map(height, plan.front)), _HEIGHT - 40, below + 14)
    words = "finetuned tokens/s" if trains else "ms per output token"
    parts = [head, charts.text(8, below + 6, words, "start")]
    parts.append(charts.grid(x, y, charts.ticks(x, 8), charts.ticks(y, 5)))
    words = "dollars an hour" if is_priced else "GPUs"
    parts.append(charts.text((_LEFT + _RIGHT) / 2, _HEIGHT - 6, words))
    for candidate in plan.front:
        place, style = (x(cost(candidate)), y(height(candidate))), styles[candidate.machine.gpu]
        parts.append(charts.mark(*place, *style, title=_words(candidate, trains)))
    return charts.svg(_WIDTH, _HEIGHT, "Machines of the front", parts)


def _words(candidate: Candidate, trains: bool) -> str:
    words = f"{candidate.machine}"
    if trains:
        words += f": {candidate.throughput:,.0f} finetuned tokens/s"
    if candidate.load is not None:
        words += f", {1e3 * candidate.load.tpot_s:.3g} ms per output token"
    return words


KINDS = {
    "weights": "the base model, frozen",
    "adapters": "trainable parameters",
    "gradients": "one per trainable parameter",
    "optimizer": "the optimizer's states",
    "served_adapters": "adapters that requests use",
    "kv_cache": "keys and values of requests in flight",
    "activations": "saved for backward",
    "workspace": "other memory at the peak",
}


def page(plan: PlanData) -> str:
    """Return the whole page, which needs no other file."""
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
                (
                    machine(candidate),
                    [cell(candidate) for cell in columns.values()],
                    candidate is plan.chosen,
                )
                for candidate in plan.front
            ],
            kinds={kind: words for kind, words in KINDS.items() if sizes.get(kind)},
            price_words=price_words(plan),
            front_plot=front_figure(plan) if plan.front else "",
        )
    )
