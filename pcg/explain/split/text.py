"""Renders the report of a cut as monospaced text."""

from __future__ import annotations

from textwrap import fill

from pcg.explain.split.report_data import STEPS, LinkSpeed, SplitData, tokens_per_s
from pcg.passes.placement.cut import Crossing, GraphCut, Piece, StepCut

_WIDTH = 98


def split_text(report: SplitData) -> str:
    """Return the report as text of at most 100 columns, names of values apart."""
    parts = [_heading(report), _steps(report), _links(report)]
    for name, step in report.steps.items():
        if name != "prefill":
            parts += [_graph(name, step, graph) for graph in step.graphs if graph.pieces]
    if report.held:
        names = ", ".join(f"{name} ({size:,} bytes)" for name, size in report.held)
        parts.append([_filled("the client holds  ", names)])
    if report.notes:
        parts.append([_filled("* ", note) for note in report.notes])
    return "\n\n".join("\n".join(lines) for lines in parts)


def _filled(head: str, text: str) -> str:
    return fill(
        text,
        _WIDTH,
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _heading(report: SplitData) -> list[str]:
    link = report.link
    speed = f"{link.latency_s * 1e3:g} ms a round trip, {link.bytes_per_s * 8 / 1e9:g} Gbit/s"
    kept = ", linear operators alone" if report.privacy else ""
    return [
        f"{report.model}  ·  {report.architecture}  ·  {report.layers} layers  ·  {report.dtype}",
        f"{report.peft or 'no adapters'}  ·  batch {report.batch} × {report.seq:,} tokens",
        "",
        f"base {report.base}, client {report.client}, link {link.name}: {speed}{kept}",
    ]


def _steps(report: SplitData) -> list[str]:
    lines = [
        f"{'step':<36}{'round trips':>13}{'KiB a token up':>16}{'down':>10}{'tokens a second':>18}"
    ]
    for name, step in report.steps.items():
        own = f"{name}: {STEPS[name]}"
        for who, costs in ((own, step.costs), ("  each product a call", step.fixed)):
            up, down = (
                size / step.tokens / 1024 for size in (costs.sent_bytes, costs.returned_bytes)
            )
            lines.append(
                f"  {who:<34}{costs.round_trips:>13,}{up:>16,.1f}{down:>10,.1f}"
                f"{tokens_per_s(step, costs):>18,.1f}"
            )
    return lines


def _links(report: SplitData) -> list[str]:
    lines = ["tokens a second by link          decode   each product    training   each product"]
    return lines + [f"  {row.link:<24}" + "".join(_speeds(row)) for row in report.links]


def _speeds(row: LinkSpeed) -> list[str]:
    numbers = (row.decode, row.fixed_decode, row.training, row.fixed_training)
    widths = (15, 15, 12, 15)
    return [
        f"{'-' if number is None else f'{number:,.1f}':>{width}}"
        for number, width in zip(numbers, widths, strict=True)
    ]


def _graph(step_name: str, step: StepCut, graph: GraphCut) -> list[str]:
    layers = "" if graph.count == 1 else f", {graph.count} layers"
    trips = len(graph.pieces)
    lines = [
        f"{step_name}: {graph.name}{layers}: {trips} round trip{'' if trips == 1 else 's'} "
        f"for {graph.fixed.round_trips}, {graph.costs.seconds * 1e3:,.3f} ms "
        f"for {graph.fixed.seconds * 1e3:,.3f}"
    ]
    for number, piece in enumerate(graph.pieces, 1):
        lines += _piece(number, piece, step.tokens)
    if graph.client:
        lines.append(_filled("  client   ", ", ".join(graph.client)))
    return lines


def _piece(number: int, piece: Piece, tokens: int) -> list[str]:
    way = "backward" if piece.is_backward else "forward"
    lines = [_filled(f"  {number} base   ", ", ".join(piece.nodes))]
    if piece.repeated:
        lines.append(_filled("    again  ", ", ".join(piece.repeated)))
    lines.append(_filled("    takes  ", _values(piece.inputs, tokens)))
    gives = f"{_values(piece.outputs, tokens)}; {way}, {piece.seconds * 1e3:,.3f} ms"
    lines.append(_filled("    gives  ", gives))
    return lines


def _values(values: Crossing, tokens: int) -> str:
    sizes = ", ".join(f"{name} {size / tokens:,.0f}" for name, size in values)
    return f"{sizes} bytes a token" if sizes else "nothing"
