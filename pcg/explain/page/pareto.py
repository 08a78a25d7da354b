"""Bytes kept against operations made again: the front, and where other ways to train lie."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise, product
from typing import TypeAlias

from pcg.explain.page.bars import chosen_stage
from pcg.explain.page.element import Child, Markup, element, row, scroll, section, table
from pcg.explain.page.plot import Scale, columns, line, mark, percent, plot, rows, stretched, text
from pcg.explain.report_data import PeerPoint, ReportData
from pcg.explain.text import gib

_DOT = "M-3.5 0a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0-7 0z"
_RING = "M-7 0a7 7 0 1 0 14 0a7 7 0 1 0-14 0z"
_SHAPES = (
    "M-5.5-5.5h11v11h-11z",
    "M0-7.5L7.5 0L0 7.5L-7.5 0z",
    "M0-7.5L7 5.5H-7z",
    "M0 7.5L7-5.5H-7z",
)
"""Square, diamond, and triangles: one for each way to train that is not on the front."""

_PEER = "M-3-3h6v6h-6z"
_OWN = ("pruned", "rematerialized", "compressed")
_WIDE, _HIGH = 260, 280
"""Pixels of the plot on a phone, where labels have the least room."""

_CHARACTER = 7.2
"""Width of a label's character, in pixels."""

_PLACES = [
    (lift, anchor)
    for lift, anchor in product((13, 0, 29, -13, 45), ("start", "end", "middle"))
    if lift or anchor != "middle"
]
"""Where a label may stand: pixels above its point, and what of it is there."""

_Box: TypeAlias = tuple[float, float, float, float]
"""Left, right, low and high, in pixels."""


@dataclass(frozen=True)
class _Named:
    name: str
    x: float
    y: float
    size_bytes: int
    ratio: float
    shape: str


def pareto(report: ReportData) -> Markup | None:
    """The front; None where there is none."""
    if not report.pareto:
        return None
    named = _named(report)
    most = max([one.size_bytes for one in named] + [point.bytes for point in report.pareto])
    again = max([one.ratio for one in named] + [p.recompute_flops_ratio for p in report.pareto])
    peers = sorted(report.peers, key=lambda point: point.recompute_flops_ratio)
    again = max([again] + [point.recompute_flops_ratio for point in peers])
    across, up = Scale.of_bytes(most, 1.06), Scale(max(again * 1.1, 0.05), 0.01, "%")
    placed = [
        _Named(
            o.name, across.share(o.size_bytes), up.share(o.ratio), o.size_bytes, o.ratio, o.shape
        )
        for o in named
    ]
    front = [(across.share(p.bytes), up.share(p.recompute_flops_ratio)) for p in report.pareto]
    corners = [
        mark(_DOT, x, y, f"front: {_note(p.bytes, p.recompute_flops_ratio)}", class_="corner point")
        for (x, y), p in zip(front, report.pareto, strict=True)
    ]
    peer_line = [(across.share(p.bytes), up.share(p.recompute_flops_ratio)) for p in peers]
    corners += [
        mark(
            _PEER,
            x,
            y,
            f"{_budget(p)}: {_note(p.bytes, p.recompute_flops_ratio)}",
            class_="peer point",
        )
        for (x, y), p in zip(peer_line, peers, strict=True)
    ]
    marks = [
        mark(
            one.shape,
            one.x,
            one.y,
            f"{one.name}: {_note(one.size_bytes, one.ratio)}",
            class_=_class(one),
        )
        for one in placed
    ]
    drawn = plot(
        "Bytes kept against operations made again",
        "Fewer bytes kept for backward take more operations made again. The table below has the "
        "points.",
        *rows((y, f"{label}%") for y, label in up.ticks()),
        *columns(across.ticks()),
        text(
            1, 0, f"kept for backward, {across.name}", dy=36.0, text_anchor="end", class_="strong"
        ),
        text(0, 1, "recomputed", dx=-8.0, dy=-10.0, text_anchor="start", class_="strong"),
        *([stretched(line(peer_line, class_="peers"))] if peers else []),
        stretched(line(front, class_="front")),
        *corners,
        *marks,
        *_labels(placed, front),
        legend=_legend(placed, bool(peers)),
    )
    return section(
        "pareto",
        "Memory against time",
        element(
            "p",
            "Each corner is a plan that no other beats; layers may take different plans, so every "
            "point of the line between two corners is attainable, to within one layer. A memory "
            "budget picks one.",
        ),
        drawn,
        element("details", element("summary", "The same as a table"), _table(report, named)),
    )


def _budget(point: PeerPoint) -> str:
    return f"torch's partitioner, budget {point.budget:g}"


def _legend(named: list[_Named], has_peers: bool) -> Markup:
    rule = element("span", class_="rule", aria_hidden="true")
    entries = [element("span", rule, "attainable front, its corners as dots", class_="entry")]
    if has_peers:
        rule = element("span", class_="rule dashed", aria_hidden="true")
        entries.append(element("span", rule, "torch's partitioner, by budget", class_="entry"))
    for one in named:
        shape = element("path", d=one.shape, class_=_class(one))
        swatch = element("svg", shape, viewBox="-9 -9 18 18", class_="shape", aria_hidden="true")
        entries.append(element("span", swatch, one.name, class_="entry"))
    return element("p", *entries, class_="legend")


def _class(one: _Named) -> str:
    return "chosen point" if one.shape == _RING else "named point"


def _named(report: ReportData) -> list[_Named]:
    """The chosen plan, and every way to train that is not pcg's."""
    found, shapes = [], iter(_SHAPES)
    for stage in report.activations:
        chosen = stage.stage == chosen_stage(report)
        if chosen or stage.stage not in _OWN:
            name = "chosen plan" if chosen else stage.stage
            shape = _RING if chosen else next(shapes, _SHAPES[0])
            ratio = stage.recompute_flops_ratio
            found.append(_Named(name, 0.0, 0.0, stage.bytes, ratio, shape))
    return found


def _note(size_bytes: int, ratio: float) -> str:
    return f"{gib(size_bytes)} GiB kept, {ratio:.1%} made again"


def _table(report: ReportData, named: list[_Named]) -> Markup:
    points: list[tuple[Child, int, float]] = [
        (
            f"corner {i}" if not p.restored else f"{p.restored} layers share saved inputs",
            p.bytes,
            p.recompute_flops_ratio,
        )
        for i, p in enumerate(report.pareto, 1)
    ]
    points += [(one.name, one.size_bytes, one.ratio) for one in named]
    points += [(_budget(p), p.bytes, p.recompute_flops_ratio) for p in report.peers]
    points.sort(key=lambda point: -point[1])
    body = element("tbody", *(row(name, gib(size), f"{r:.1%}") for name, size, r in points))
    heads = ("point", "#kept, GiB", "#recomputed")
    made = table(heads, body, caption="Corners of the front, and other ways to train")
    return scroll("Points of the figure", made)


# ------------------------------------------------------------------------------------ labels


def _labels(named: list[_Named], front: list[tuple[float, float]]) -> list[Markup]:
    """A label for each, where it hides neither a point, nor a label, nor much of the front."""
    points = [(one.x * _WIDE, one.y * _HIGH) for one in named]
    points += [(x * _WIDE, y * _HIGH) for x, y in _between(front)]
    taken: list[_Box] = []
    found: list[Markup] = []
    for one in named:
        # The first of those that cost least, so a label goes above its point where it can.
        boxes = {(lift, anchor): _box(one, lift, anchor) for lift, anchor in _PLACES}
        lift, anchor = min(_PLACES, key=lambda place: _cost(boxes[place], taken, points))
        taken.append(boxes[lift, anchor])
        shift = _shift(lift, anchor)
        if lift > 20:
            leader = element("path", d=f"M0-9V{8 - lift}", class_="leader")
            found.insert(0, element("svg", leader, x=percent(one.x), y=percent(1 - one.y)))
        found.append(
            text(one.x, one.y, one.name, dx=shift, dy=4.0 - lift, text_anchor=anchor, class_="name")
        )
    return found


def _shift(lift: int, anchor: str) -> float:
    beside = 12.0 if lift == 0 else 2.0
    return {"start": beside, "end": -beside, "middle": 0.0}[anchor]


def _box(one: _Named, lift: int, anchor: str) -> _Box:
    wide = _CHARACTER * len(one.name)
    left = one.x * _WIDE + _shift(lift, anchor)
    left -= {"start": 0.0, "end": wide, "middle": wide / 2}[anchor]
    middle = one.y * _HIGH + lift
    return left, left + wide, middle - 8, middle + 8


def _cost(box: _Box, taken: list[_Box], points: list[tuple[float, float]]) -> float:
    left, right, low, high = box
    outside = max(0.0, -left) + max(0.0, right - _WIDE - 8) + 10 * (low < -8)
    labels = sum(a < right and b > left and c < high and d > low for a, b, c, d in taken)
    hidden = sum(left - 5 < x < right + 5 and low - 2 < y < high + 2 for x, y in points)
    return 10 * outside + 1000 * labels + 20 * hidden


def _between(front: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Points along the line."""
    return front + [
        (a[0] + (b[0] - a[0]) * i / 16, a[1] + (b[1] - a[1]) * i / 16)
        for a, b in pairwise(front)
        for i in range(1, 16)
    ]
