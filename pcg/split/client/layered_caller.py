"""Calls of several bases that hold some layers of a model each: a call goes to its layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pcg.errors import SplitError
from pcg.split.client.caller import Caller
from pcg.split.messages import Message
from pcg.split.pieces import LINEAR, Piece
from pcg.split.transports.transport import Moved


class LayeredCaller(Caller):
    """Calls the base that holds what a call is about.

    Attributes:
        callers: the connections.
    """

    def __init__(self, callers: Sequence[Caller]) -> None:
        """Check that they are of one model. SplitError: they are not, or nobody holds a layer."""
        first = callers[0].facts
        for one in callers:
            if one.facts["digest"] != first["digest"]:
                raise SplitError(
                    f"the bases at {callers[0].where} and {one.where} have other weights: "
                    f"{first['name']} and {one.facts['name']}; connect to bases of one model"
                )
        self.callers = callers
        # A tied embedding is fetched from any base; only the base of the last layer multiplies it.
        self._holders = {
            kind: {name: one for one in reversed(callers) for name in one.facts[kind]}
            for kind in ("fetched", "pieces")
        }
        pieces = {name: shape for one in callers for name, shape in one.facts["pieces"].items()}
        absent = {name for one in callers for name in one.facts.get("absent", ())}
        self.facts: Mapping[str, Any] = {
            **first,
            "pieces": pieces,
            "fetched": {name: s for one in callers for name, s in one.facts["fetched"].items()},
            "graphs": False,
            "absent": sorted(absent - pieces.keys()),
            "rows": all(one.facts.get("rows") for one in callers),
        }

    @property
    def where(self) -> str:
        """The addresses, with commas."""
        return ",".join(one.where for one in self.callers)

    @property
    def moved(self) -> Moved:  # type: ignore[override]
        """Counts over all transports."""
        every = [one.moved for one in self.callers]
        return Moved(
            sum(one.calls for one in every),
            sum(one.sent_bytes for one in every),
            sum(one.received_bytes for one in every),
        )

    def call(self, op: str, tensors: Sequence[Tensor] = (), **fields: bool | int | str) -> Message:
        if op != "run":
            kind = "fetched" if op == "fetch" else "pieces"
            return self._at(kind, str(fields.get("name"))).call(op, tensors, **fields)
        piece = Piece.parse(str(fields["piece"]))
        where = [self._at("pieces", name) for name in piece.weights]
        if all(one is where[0] for one in where):
            return where[0].call(op, tensors, **fields)
        if piece.kind != LINEAR:
            raise SplitError(f"{piece} is at several base executors")
        replies = [
            caller.call(op, tensors, **{**fields, "piece": str(Piece(LINEAR, (name,)))})
            for caller, name in zip(where, piece.weights, strict=True)
        ]
        joined = torch.cat([one.tensors[0] for one in replies], -1)
        return Message("reply", replies[0].seq, tensors=(joined,))

    def close(self) -> None:
        for one in self.callers:
            one.close()

    def _at(self, kind: str, name: str) -> Caller:
        found = self._holders[kind].get(name)
        if found is None:
            raise SplitError(f"none of the base executors at {self.where} has {name[:200]!r}")
        return found
