"""Every tensor of the training program, and what becomes of it, as a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from pcg.explain.page.element import Markup, element, joined, scroll, section
from pcg.explain.report_data import ReportData, SavedTensor

DECISIONS = {
    "save": "kept for backward",
    "compress": "kept, packed",
    "recompute": "made again in backward",
    "drop": "let go: backward does not read it",
}
"""What a decision means, in the order of the page."""

_HEADS = ("tensor", "decision", "#MiB", "#layers", "shape, bytes", "needed by", "reason")


def badge(decision: str) -> Markup:
    """A decision, by word, colour and the style of its border."""
    return element("span", decision, class_=f"badge d-{decision}")


def tensors(report: ReportData) -> Markup | None:
    """The table; None where pcg cannot train the model."""
    if not report.saved:
        return None
    groups: dict[str, list[SavedTensor]] = {}
    for row in report.saved:
        groups.setdefault(row.tensor.partition(".")[0], []).append(row)
    heads = [
        element("th", head.removeprefix("#"), scope="col", class_="n" if head[0] == "#" else None)
        for head in _HEADS
    ]
    made = element(
        "table",
        element("caption", "Tensors, and what becomes of each", class_="unseen"),
        element("thead", element("tr", *heads)),
        *(_group(name, rows) for name, rows in groups.items()),
        class_="tensors",
    )
    return section(
        "tensors",
        "What becomes of each tensor",
        element(
            "p",
            "Sizes are of one tensor at this batch; the formula gives its bytes for B sequences of "
            "S tokens. A view shares the memory of what it is a view of and is not listed.",
        ),
        _filter(report),
        scroll("Tensors, and what becomes of each", made),
    )


def _filter(report: ReportData) -> Markup:
    """Controls that the page's script shows and obeys."""
    counts = Counter(row.decision for row in report.saved)
    boxes = [
        element(
            "label",
            element("input", type="checkbox", name="decision", value=word, checked=True),
            badge(word),
            element("span", counts[word], class_="count"),
        )
        for word in DECISIONS
        if counts[word]
    ]
    search = element(
        "input",
        type="search",
        name="words",
        placeholder="name, module, reason …",
        aria_label="Find",
    )
    legend = element("legend", "Show")
    return element(
        "form",
        element("fieldset", legend, *boxes),
        search,
        element("output", f"{len(report.saved)} tensors"),
        class_="filter",
        hidden=True,
    )


def _group(name: str, rows: list[SavedTensor]) -> Markup:
    """The tensors of one graph."""
    kept = sum(row.bytes for row in rows if row.decision in ("save", "compress"))
    layers = {row.layers for row in rows}
    many = f"{layers.pop()}" if len(layers) == 1 else "some"
    in_layers = name not in ("prologue", "epilogue")
    where = f" · {many} layer{'s' * (many != '1')} ×" if in_layers else " · outside the layers,"
    heading = element(
        "th",
        element("span", element("code", name), f"{where} {_mib(kept)} MiB kept", class_="stay"),
        colspan=len(_HEADS),
        scope="rowgroup",
    )
    return element("tbody", element("tr", heading, class_="group"), *map(_row, rows))


def _row(row: SavedTensor) -> Markup:
    name = element("code", row.tensor.partition(".")[2])
    type_ = f"{row.dtype}[{', '.join(map(str, row.shape))}]"
    formula = element("span", element("code", row.formula), class_="aside")
    readers = [element("span", reader) for reader in _readers(row.needed_by)]
    return element(
        "tr",
        element("th", name, element("span", row.op, class_="aside"), scope="row"),
        element("td", badge(row.decision)),
        element("td", _mib(row.bytes), class_="n"),
        element("td", row.layers, class_="n"),
        element("td", element("code", type_), formula),
        element("td", joined(readers) if readers else "–", class_="list"),
        element("td", row.reason, class_="words"),
        data_decision=row.decision,
        data_tensor=row.tensor,
    )


def _readers(needed_by: Iterable[str]) -> list[str]:
    """Operators of backward, those of one module together: `linear, outer (mlp.up_proj)`."""
    ops: dict[str, list[str]] = {}
    for reader in needed_by:
        op, _, scope = reader.partition(" ")
        ops.setdefault(scope, []).append(op)
    return [f"{', '.join(names)} {scope}".rstrip() for scope, names in ops.items()]


def _mib(size_bytes: int) -> str:
    size = size_bytes / 2**20
    return f"{size:,.{2 if size >= 0.1 or not size else 4}f}"
