"""Report of a cut between a base and a client: data, JSON, text and HTML page."""

from __future__ import annotations

from dataclasses import dataclass
from textwrap import fill
from typing import Any

from pcg.options import SplitLink
from pcg.pages.environment import page_environment
from pcg.passes.placement.cut import Costs, Crossing, GraphCut, Piece, StepCut

STEPS = {
    "decode": "a token of each sequence",
    "prefill": "whole prompts",
    "training": "forward and backward",
}
"""The steps of a cut, with a short description."""


@dataclass(frozen=True)
class LinkSpeed:
    """Predicted tokens per second over a link, for the chosen and for the fixed cut.

    The training fields are None without training.
    """

    link: str
    decode: float
    fixed_decode: float
    training: float | None
    fixed_training: float | None

    def to_json(self) -> dict[str, Any]:
        return {
            "link": self.link,
            "decode_tokens_per_s": self.decode,
            "fixed_decode_tokens_per_s": self.fixed_decode,
            "training_tokens_per_s": self.training,
            "fixed_training_tokens_per_s": self.fixed_training,
        }


@dataclass(frozen=True)
class SplitReport:
    """The cut of a model between a base and a client.

    Attributes:
        model: the model's name.
        architecture: the model's class in transformers.
        peft: the recipes in words; None without recipes.
        layers: the number of layers.
        dtype: torch's name of the activations' dtype.
        batch: sequences of a step.
        seq: tokens of a sequence.
        base: the name of the base's device.
        client: the name of the client's device.
        link: the link between base and client.
        privacy: True if only linear operators are sent to the base.
        steps: the cuts, keyed as `STEPS`.
        links: tokens per second over several links, each with its own cut.
        notes: further sentences.
    """

    model: str
    architecture: str
    peft: str | None
    layers: int
    dtype: str
    batch: int
    seq: int
    base: str
    client: str
    link: SplitLink
    privacy: bool
    steps: dict[str, StepCut]
    links: tuple[LinkSpeed, ...]
    notes: tuple[str, ...]

    @property
    def held(self) -> Crossing:
        """The frozen weights that the client's nodes read, in all layers, with their bytes."""
        sizes: dict[str, int] = {}
        for graph in self.steps["decode"].graphs:
            for name, size in graph.held:
                sizes[name] = sizes.get(name, 0) + size * graph.count
        return tuple(sizes.items())

    def to_text(self) -> str:
        """Return the report as text of at most 100 columns, except long names."""
        return split_text(self)

    def to_html(self) -> str:
        """Return the report as a self-contained HTML page."""
        return split_page(self)

    def to_json(self) -> dict[str, Any]:
        """Return the report as a JSON object (docs/explain.md)."""
        return {
            "model": self.model,
            "architecture": self.architecture,
            "peft": self.peft,
            "layers": self.layers,
            "dtype": self.dtype,
            "batch": self.batch,
            "seq": self.seq,
            "base": self.base,
            "client": self.client,
            "link": {
                "name": self.link.name,
                "latency_s": self.link.latency_s,
                "bytes_per_s": self.link.bytes_per_s,
            },
            "privacy": self.privacy,
            "steps": {name: _step(step) for name, step in self.steps.items()},
            "links": [row.to_json() for row in self.links],
            "held": [{"weight": name, "bytes": size} for name, size in self.held],
            "notes": list(self.notes),
        }


def tokens_per_s(step: StepCut, costs: Costs) -> float:
    """Return the tokens per second of a step."""
    return step.tokens / costs.seconds


def _step(step: StepCut) -> dict[str, Any]:
    return {
        "tokens": step.tokens,
        **_costs(step.costs),
        "tokens_per_s": tokens_per_s(step, step.costs),
        "fixed": {**_costs(step.fixed), "tokens_per_s": tokens_per_s(step, step.fixed)},
        "graphs": [_graph(graph, step.tokens) for graph in step.graphs],
    }


def _costs(costs: Costs) -> dict[str, Any]:
    return {
        "round_trips": costs.round_trips,
        "sent_bytes": costs.sent_bytes,
        "returned_bytes": costs.returned_bytes,
        "seconds": costs.seconds,
    }


def _graph(graph: GraphCut, tokens: int) -> dict[str, Any]:
    return {
        "graph": graph.name,
        "count": graph.count,
        **_costs(graph.costs),
        "fixed": _costs(graph.fixed),
        "pieces": [_piece(piece, tokens) for piece in graph.pieces],
        "client": list(graph.client),
    }


def _piece(piece: Piece, tokens: int) -> dict[str, Any]:
    def crossing(values: Crossing) -> list[dict[str, Any]]:
        return [{"value": name, "bytes_per_token": size / tokens} for name, size in values]

    return {
        "direction": "backward" if piece.is_backward else "forward",
        "nodes": list(piece.nodes),
        "repeated": list(piece.repeated),
        "inputs": crossing(piece.inputs),
        "outputs": crossing(piece.outputs),
        "seconds": piece.seconds,
    }


# --------------------------------------------------------------------------------------- split text


_WIDTH = 98


def split_text(report: SplitReport) -> str:
    """Return the report as text of at most 100 columns, except names of values."""
    parts = [_heading(report), _steps(report), _links(report)]
    for name, step in report.steps.items():
        if name != "prefill":
            parts += [_graph_lines(name, step, graph) for graph in step.graphs if graph.pieces]
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


def _heading(report: SplitReport) -> list[str]:
    link = report.link
    speed = f"{link.latency_s * 1e3:g} ms a round trip, {link.bytes_per_s * 8 / 1e9:g} Gbit/s"
    kept = ", linear operators alone" if report.privacy else ""
    return [
        f"{report.model}  ·  {report.architecture}  ·  {report.layers} layers  ·  {report.dtype}",
        f"{report.peft or 'no adapters'}  ·  batch {report.batch} × {report.seq:,} tokens",
        "",
        f"base {report.base}, client {report.client}, link {link.name}: {speed}{kept}",
    ]


def _steps(report: SplitReport) -> list[str]:
    lines = [
        f"{'step':<36}{'round trips':>13}{'KiB a token up':>16}{'down':>10}{'tokens a second':>18}"
    ]
    for name, step in report.steps.items():
        cut = f"{name}: {STEPS[name]}"
        for who, costs in ((cut, step.costs), ("  each product a call", step.fixed)):
            up, down = (
                size / step.tokens / 1024 for size in (costs.sent_bytes, costs.returned_bytes)
            )
            lines.append(
                f"  {who:<34}{costs.round_trips:>13,}{up:>16,.1f}{down:>10,.1f}"
                f"{tokens_per_s(step, costs):>18,.1f}"
            )
    return lines


def _links(report: SplitReport) -> list[str]:
    lines = ["tokens a second by link          decode   each product    training   each product"]
    return lines + [f"  {row.link:<24}" + "".join(_speeds(row)) for row in report.links]


def _speeds(row: LinkSpeed) -> list[str]:
    numbers = (row.decode, row.fixed_decode, row.training, row.fixed_training)
    widths = (15, 15, 12, 15)
    return [
        f"{'-' if number is None else f'{number:,.1f}':>{width}}"
        for number, width in zip(numbers, widths, strict=True)
    ]


def _graph_lines(step_name: str, step: StepCut, graph: GraphCut) -> list[str]:
    layers = "" if graph.count == 1 else f", {graph.count} layers"
    trips = len(graph.pieces)
    lines = [
        f"{step_name}: {graph.name}{layers}: {trips} round trip{'' if trips == 1 else 's'} "
        f"for {graph.fixed.round_trips}, {graph.costs.seconds * 1e3:,.3f} ms "
        f"for {graph.fixed.seconds * 1e3:,.3f}"
    ]
    for number, piece in enumerate(graph.pieces, 1):
        lines += _piece_lines(number, piece, step.tokens)
    if graph.client:
        lines.append(_filled("  client   ", ", ".join(graph.client)))
    return lines


def _piece_lines(number: int, piece: Piece, tokens: int) -> list[str]:
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


# --------------------------------------------------------------------------------------- split page


def split_page(report: SplitReport) -> str:
    """Return the whole page, which needs no other file."""
    facts = {
        "architecture": report.architecture,
        "layers": f"{report.layers}",
        "dtype": report.dtype,
        "recipe": report.peft or "no adapters",
        "step": f"batch {report.batch:,} × {report.seq:,} tokens",
        "base": report.base,
        "client": report.client,
        "link": f"{report.link.name}, {report.link.latency_s * 1e3:g} ms a round trip, "
        f"{report.link.bytes_per_s * 8 / 1e9:g} Gbit/s",
        "sent": "linear operators alone" if report.privacy else "whatever is cheapest",
    }
    template = page_environment("pcg.explain.report").get_template("split.html")
    return template.render(report=report, facts=facts, step_words=STEPS, tokens_per_s=tokens_per_s)
