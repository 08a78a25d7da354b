"""Memory over the time of one step, as a stacked area."""

from __future__ import annotations

from pcg.explain.page.element import Markup, element, row, scroll, section, table
from pcg.explain.page.plot import (
    Scale,
    area,
    columns,
    line,
    mark,
    percent,
    plot,
    rows,
    stretched,
    text,
)
from pcg.explain.report_data import Moment, ReportData
from pcg.explain.text import gib

_DOT = "M-5 0a5 5 0 1 0 10 0a5 5 0 1 0-10 0z"
_ROOM = 1.18
"""Above the peak, for its label."""


_AGAIN = "again"


def moments(report: ReportData) -> Markup | None:
    """Kept and workspace at each moment; None where pcg cannot train the model."""
    if not report.timeline:
        return None
    found = report.timeline
    peak = max(found, key=_height)
    beside = sum(
        report.memory_bytes[kind] for kind in ("weights", "adapters", "gradients", "optimizer")
    )
    said = (
        f"The most at once is {_amount(_height(peak))}, in {_words(peak.label)}: the activations "
        f"and workspace of the table above. Beside it, {_amount(beside)} of weights, "
        "adapters, gradients and optimizer are resident all the time; the KV cache is of requests "
        "served beside the step."
    )
    return section(
        "timeline",
        "Memory over one step",
        element("p", said),
        _figure(found, peak),
        element("details", element("summary", "The same as a table"), _table(found)),
    )


def _figure(found: tuple[Moment, ...], peak: Moment) -> Markup:
    scale = Scale.of_bytes(_height(peak), _ROOM)
    kept = _steps([scale.share(moment.kept_bytes) for moment in found])
    whole = _steps([scale.share(_height(moment)) for moment in found])
    wide = 1 / len(found)
    x = (found.index(peak) + 0.5) * wide
    y = scale.share(_height(peak))
    legend = element(
        "p",
        element("span", class_="swatch k-workspace", aria_hidden="true"),
        "workspace, on top of ",
        element("span", class_="swatch k-activations", aria_hidden="true"),
        "kept for backward",
        class_="legend",
    )
    anchor = "start" if x < 0.3 else "end" if x > 0.7 else "middle"
    return plot(
        "Memory over one step",
        f"Memory grows layer by layer through forward and shrinks through backward; its peak is "
        f"{_amount(_height(peak))} in {_words(peak.label)}. The table below has all numbers.",
        *rows(scale.ticks()),
        text(0, 1, scale.name, dx=-8.0, dy=-2.0, text_anchor="end"),
        stretched(
            area([*whole, (1, 0), (0, 0)], class_="k-workspace"),
            area([*kept, (1, 0), (0, 0)], class_="k-activations"),
            line(whole, class_="edge"),
        ),
        *columns(_layers(found)),
        *(
            text(places / len(found), 0, word, dy=36.0, text_anchor="middle", class_="strong")
            for word, places in _phases(found)
        ),
        text(x, y, f"peak {_amount(_height(peak))}", dy=-10.0, text_anchor=anchor, class_="strong"),
        *(
            element(
                "rect",
                element("title", _note(moment)),
                x=percent(i * wide),
                width=percent(wide),
                height="100%",
                class_="hit point",
            )
            for i, moment in enumerate(found)
        ),
        mark(_DOT, x, y, f"peak: {_note(peak)}", class_="dot"),
        legend=legend,
    )


def _is_again(moment: Moment) -> bool:
    """Whether layers run forward again there, within backward."""
    return moment.label.startswith(_AGAIN)


def _height(moment: Moment) -> int:
    return moment.kept_bytes + moment.workspace_bytes


def _amount(size_bytes: int) -> str:
    return f"{gib(size_bytes)} GiB"


def _words(label: str) -> str:
    """A moment's label in a sentence."""
    phase, _, layer = label.partition(" ")
    if phase == _AGAIN:
        return f"the forward that makes the input of layer {layer} again"
    return f"{phase} of layer {layer}" if layer else f"the {phase}"


def _note(moment: Moment) -> str:
    return (
        f"{moment.label}: {gib(moment.kept_bytes)} GiB kept + {gib(moment.workspace_bytes)} GiB "
        f"workspace = {_amount(_height(moment))}"
    )


def _steps(heights: list[float]) -> list[tuple[float, float]]:
    """A level line for each height, one after the other."""
    count = len(heights)
    return [(i / count, y) for j, y in enumerate(heights) for i in (j, j + 1)]


def _layers(found: tuple[Moment, ...]) -> list[tuple[float, str]]:
    """About four layers of each half, by their numbers."""
    words = ["" if _is_again(m) else m.label.rpartition(" ")[2] for m in found]
    numbered = [(i, int(word)) for i, word in enumerate(words) if word.isdigit()]
    most = max(layer for _, layer in numbered) + 1
    step = next(n for n in (1, 2, 4, 5, 8, 10, 16, 20, 25, 32, 50, 100, most) if most <= 4 * n)
    return [((i + 0.5) / len(found), str(layer)) for i, layer in numbered if layer % step == 0]


def _phases(found: tuple[Moment, ...]) -> list[tuple[str, float]]:
    """The phases and where the middle of each lies; what runs again is within backward."""
    places: dict[str, list[int]] = {}
    for i, moment in enumerate(found):
        if not _is_again(moment):
            places.setdefault(moment.label.partition(" ")[0], []).append(i)
    return [(word, (at[0] + at[-1] + 1) / 2) for word, at in places.items()]


def _table(found: tuple[Moment, ...]) -> Markup:
    body = element(
        "tbody",
        *(row(m.label, gib(m.kept_bytes), gib(m.workspace_bytes), gib(_height(m))) for m in found),
    )
    heads = ("moment", "#kept, GiB", "#workspace, GiB", "#both, GiB")
    made = table(heads, body, caption="Memory at each moment of a step")
    return scroll("Memory at each moment", made)
