"""Data sheets: the peaks of a device, and links between ranks, near ones and those over nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

GB = 1e9
TERA = 1e12
MICROSECOND = 1e-6


@dataclass(frozen=True)
class Link:
    """The connection between the ranks of a group.

    Attributes:
        latency_s: α, the latency of one step of a ring.
        bytes_per_s: β, the bandwidth of a rank in one direction.
        source: the source of both.
        is_measured: True if programs reach β; False if it is a peak.
        ranks: the most ranks that it connects: those of a node, or of a bridge.
    """

    latency_s: float
    bytes_per_s: float
    source: str
    is_measured: bool = False
    ranks: int = 8


@dataclass(frozen=True)
class DeviceSheet:
    """The peaks of a device.

    Attributes:
        product_flops_per_s: peaks of dense matrix products by dtype; fp32 without TF32, as
            PyTorch's default is.
        vector_flops_per_s: peaks of other arithmetic by dtype; half precision and integers as f32.
        memory_bytes_per_s: bandwidth of the device's memory.
        launch_s: time that the launch of each operator adds.
        links: links within a node by name; the first is the device's own.
        source: source of the peaks and the bandwidth.
        launch_source: source of `launch_s`.
        network: the link between nodes, with one rank's part of its node's bandwidth; None where
            all ranks are on one node.
    """

    product_flops_per_s: Mapping[str, float]
    vector_flops_per_s: Mapping[str, float]
    memory_bytes_per_s: float
    launch_s: float
    links: Mapping[str, Link]
    source: str
    launch_source: str
    network: Link | None = None


@dataclass(frozen=True)
class Achieved:
    """Shares of a sheet's peaks that programs reach."""

    product: float
    vector: float
    memory: float
    link: float


ASSUMED = Achieved(product=0.7, vector=0.5, memory=0.8, link=0.8)
"""Assumptions, not measurements: `pcg profile` measures. Large bf16 products, streaming kernels and
nccl-tests' bus bandwidth are commonly reported at about these shares on A100 and H100."""


def link_between(sheet: DeviceSheet, near: Link, degree: int, node_ranks: int | None) -> Link:
    """The link that a ring of so many ranks has.

    Within `near`'s ranks it is that; else the first of the sheet's links that reaches so many on
    one node. Over nodes, a ring enters and leaves each of them once: its latency is the mean of its
    steps, within nodes and between them. As rings begin at all ranks of a node, each over a network
    card of its own, they have the node's whole bandwidth together, or the near link's if that is
    less.

    Args:
        node_ranks: the ranks of a node, where they are fewer than the sheet's links reach.
    """

    def reach(link: Link) -> int:
        return min(link.ranks, node_ranks or link.ranks)

    if degree <= reach(near) or sheet.network is None:
        return near
    within = max((near, *sheet.links.values()), key=lambda link: reach(link))
    reached = [link for link in sheet.links.values() if degree <= reach(link)]
    if reached:
        return reached[0]
    node, network = reach(within), sheet.network
    nodes = -(-degree // node)
    steps = (degree - nodes) * within.latency_s + (nodes - 1) * network.latency_s
    return Link(
        steps / (degree - 1),
        min(within.bytes_per_s, node * network.bytes_per_s),
        f"{within.source}; between nodes of {node} ranks {network.source}",
        within.is_measured and network.is_measured,
        degree,
    )
