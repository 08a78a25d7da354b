"""The data of the report of a cut, and the same as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pcg.options import SplitLink
from pcg.passes.placement.cut import Costs, Crossing, GraphCut, Piece, StepCut

STEPS = {
    "decode": "a token of each sequence",
    "prefill": "whole prompts",
    "training": "forward and backward",
}
"""The steps, and in words what each is of."""


@dataclass(frozen=True)
class LinkSpeed:
    """Tokens a second that are predicted over a link, and those of the fixed cut.

    Those of training are None where nothing is trained.
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
class SplitData:
    """The cut of a model between a base and a client.

    Attributes:
        model: the model's name.
        architecture: its class in transformers.
        peft: the recipes in words; None for none.
        layers: the number of its layers.
        dtype: torch's name of the activations' dtype.
        batch: sequences of a step.
        seq: tokens of each.
        base: the name of the base's device.
        client: that of the client's.
        link: the link that the cut is for.
        privacy: True if linear operators alone are sent.
        steps: the cuts by the words of `STEPS`.
        links: tokens a second over several links, each with a cut of its own.
        notes: what else there is to say.
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
        found: dict[str, int] = {}
        for graph in self.steps["decode"].graphs:
            for name, size in graph.held:
                found[name] = found.get(name, 0) + size * graph.count
        return tuple(found.items())

    def to_json(self) -> dict[str, Any]:
        """Return the report as one object (docs/explain.md)."""
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
    """Return the tokens of a step by its seconds."""
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
