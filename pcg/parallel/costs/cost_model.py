"""Costs of operators and collectives, from a device's data sheet or from measurements on it.

    operator      max(operations / peak, bytes / bandwidth) + launch       the roofline
    all_reduce    2 (n - 1) (α + size / (n β))                             a ring, n ranks
    all_gather      (n - 1) (α + size / (n β))
    reduce_scatter  (n - 1) (α + size / (n β))
    all_to_all      (n - 1) (α + size / (n β))

A data sheet's peaks are those of its vendor times the shares in `accelerators.ASSUMED`; a profile
(`device_profile`) has the seconds of measured shapes, and the roofline between them. An unknown
cost is an error, never a default.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import cast

from pcg.errors import CostModelError
from pcg.ir.graph import Graph, Node
from pcg.ir.operators import operator
from pcg.ir.operators.base import Attributes, Types
from pcg.ir.operators.collectives import Collective, Dispatched, exchanged
from pcg.parallel.costs.accelerators import ASSUMED, Achieved, DeviceSheet, Link, link_between
from pcg.parallel.costs.work import Work, is_free, size_bytes, works_of

_ROUNDS = {"all_gather": 1, "all_reduce": 2, "all_to_all": 1, "reduce_scatter": 1}


class CostModel(ABC):
    """Seconds of operators and collectives on a kind of device, which has a name."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._known: dict[object, float] = {}

    @abstractmethod
    def work_seconds(self, work: Work) -> float:
        """Return the seconds of a call of an operator that moves bytes."""

    @abstractmethod
    def _link(self, kind: str, degree: int) -> Link:
        """Return the link of `degree` ranks, with its achieved bandwidth."""

    def operator_seconds(
        self,
        op: str,
        inputs: Types,
        outputs: Types,
        attributes: Attributes,
        tokens: int,
        context: int,
    ) -> float:
        """Return the seconds of an operator on a rank; 0 for a view.

        Args:
            op: an operator of a rank's graph, not a collective.
            inputs: a rank's types, with no symbols except `T` and `S`.
            outputs: as `inputs`.
            tokens: T, the number of tokens of the step.
            context: S, the number of tokens of a sequence.
        Raises:
            CostModelError: no cost is known.
        """
        key = (op, inputs, outputs, tuple(attributes.items()), tokens, context)
        if key not in self._known:
            works = works_of(op, inputs, outputs, attributes, tokens, context)
            self._known[key] = sum(map(self.work_seconds, works), 0.0)
        return self._known[key]

    def collective_seconds(self, kind: str, size_bytes: int, degree: int) -> float:
        """Return the seconds of one of the collectives above; 0 for one rank.

        `size_bytes` is the size of the summed tensor, of the gathered whole, or of all that a rank
        sends in an all_to_all, its own part included.

        Raises:
            CostModelError: no link is known, or no such collective.
        """
        if kind not in _ROUNDS:
            raise CostModelError(f"no cost is known of {kind!r}; of {', '.join(_ROUNDS)} there is")
        if degree < 1 or size_bytes < 0:
            raise CostModelError(f"{kind} of {size_bytes} bytes over {degree} ranks has no cost")
        if degree == 1:
            return 0.0
        return ring_seconds(kind, size_bytes, degree, self._link(kind, degree))


class SheetModel(CostModel):
    """The roofline of a device's data sheet.

    Args:
        link: the name of one of the sheet's links, in any case; its first by default.
        achieved: shares of the sheet's peaks.
        node_ranks: the ranks of a node; as many as the sheet's links reach by default.
    Raises:
        CostModelError: the sheet has no such link.
    """

    def __init__(
        self,
        name: str,
        sheet: DeviceSheet,
        link: str | None = None,
        achieved: Achieved = ASSUMED,
        node_ranks: int | None = None,
    ) -> None:
        super().__init__(name if node_ranks is None else f"{name}:{node_ranks}")
        self.node_ranks = node_ranks
        self.sheet = sheet
        self.achieved = achieved
        links = [known for known in sheet.links if link is None or known.lower() == link.lower()]
        if not links:
            raise CostModelError(f"{name} has no link {link!r}; it has {', '.join(sheet.links)}")
        self.link_name = links[0]

    def work_seconds(self, work: Work) -> float:
        return roofline_seconds(work, self.sheet, self.achieved, self.name)

    def _link(self, kind: str, degree: int) -> Link:
        near = self.sheet.links[self.link_name]
        link = link_between(self.sheet, near, degree, self.node_ranks)
        if link.is_measured:
            return link
        return replace(link, bytes_per_s=link.bytes_per_s * self.achieved.link)


def ring_seconds(kind: str, size_bytes: float, degree: int, link: Link) -> float:
    """Return a collective's seconds: `(n - 1) (α + size / (n β))`, twice that for all_reduce."""
    step = link.latency_s + size_bytes / (degree * link.bytes_per_s)
    return _ROUNDS[kind] * (degree - 1) * step


def roofline_seconds(work: Work, sheet: DeviceSheet, achieved: Achieved, name: str) -> float:
    """Return the least seconds of a call with its launch; CostModelError without a peak."""
    if work.is_product:
        peaks, share, dtype = sheet.product_flops_per_s, achieved.product, work.dtype
    else:
        # Half precision is computed in fp32; integers have at most its width.
        peaks, share = sheet.vector_flops_per_s, achieved.vector
        dtype = "f64" if work.dtype == "f64" else "f32"
    if dtype not in peaks:
        raise CostModelError(
            f"{name} has no peak for {work.kernel} in {work.dtype}; it has {', '.join(peaks)}. "
            "Measure on the device with pcg profile -o FILE"
        )
    by_flops = work.flops / (peaks[dtype] * share)
    by_bytes = work.moved_bytes / (sheet.memory_bytes_per_s * achieved.memory)
    return max(by_flops, by_bytes) + sheet.launch_s


# --------------------------------------------------------------------------------------- rank costs


PICOSECOND = 1e-12


@dataclass(frozen=True)
class RankCosts:
    """The costs of a rank's nodes, for a group of `degree` ranks on a device."""

    model: CostModel
    degree: int

    def node_seconds(self, graph: Graph, node: Node, tokens: int, context: int) -> float:
        """Return the seconds of a node of a rank's graph, including its message; 0 for a view.

        Args:
            tokens: the number of tokens of the step.
            context: the number of tokens of a sequence.
        Raises:
            CostModelError: no cost is known.
        """
        inputs, outputs = graph.types_of(node)
        message = message_of(node, inputs, outputs)
        if message is not None:
            kind, wholes = message
            size = sum(size_bytes(type_, tokens) for type_ in wholes)
            return self.model.collective_seconds(kind, size, self.degree)
        if is_free(node.op):
            return 0.0
        attributes = dict(node.attributes)
        return self.model.operator_seconds(node.op, inputs, outputs, attributes, tokens, context)

    def graph_seconds(self, graph: Graph, tokens: int, context: int) -> float:
        """Return the seconds of a rank's graph, without overlap of its messages."""
        return sum(self.node_seconds(graph, node, tokens, context) for node in graph.nodes)


def message_of(node: Node, inputs: Types, outputs: Types) -> tuple[str, Types] | None:
    """Return the kind and the whole tensors of a node's message, or None.

    Several tensors form a single message, and a gathered copy counts as any gather.
    """
    entry = operator(node.op)
    if not isinstance(entry, Collective) or not entry.rounds:
        return None
    if isinstance(entry, Dispatched):
        degree = cast("int", node.attribute("degree"))
        return "all_to_all", (exchanged(inputs[0], inputs[1].features[-1], degree),)
    kind = "all_gather" if node.op == "gathered_copy" else node.op.removesuffix("s")
    return kind, inputs if kind == "reduce_scatter" else outputs
