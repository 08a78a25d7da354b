"""Data sheets of accelerators: peaks, memory, links between ranks, and driver names.

Numbers are the vendor's, each with its source. Values that no vendor gives are marked as
assumptions: a PCIe card's server has eight cards, and 100 Gbit/s between servers.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pcg.errors import UnsupportedError

# ------------------------------------------------------------------------------------- device sheet


GB = 1e9
TERA = 1e12
MICROSECOND = 1e-6


@dataclass(frozen=True)
class Link:
    """The connection between the ranks of a group.

    Attributes:
        latency_s: α, the latency of a ring's step.
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
        product_flops_per_s: peaks of dense matrix products by dtype; fp32 without TF32, as in
            PyTorch's default.
        vector_flops_per_s: peaks of other arithmetic by dtype; half precision and integers as f32.
        memory_bytes_per_s: bandwidth of the device's memory.
        launch_s: time added by the launch of each operator.
        links: links within a node by name; the first is the device's own.
        source: source of the peaks and the bandwidth.
        network: the link between nodes, with a rank's part of its node's bandwidth; None for a
            single node.
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
    """Return the link of a ring of `degree` ranks.

    Within `near`'s ranks the result is `near`, else the first of the sheet's links with enough
    ranks on a node. Over nodes, a ring enters and leaves each node once: its latency is the mean of
    its steps, within nodes and between nodes. Rings start at all ranks of a node, each over its own
    network card, so together they have the node's whole bandwidth, or the near link's if that is
    less.

    Args:
        node_ranks: the ranks of a node, if fewer than the sheet's links reach.
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


# ------------------------------------------------------------------------------------------- sheets


GLOO_LOOPBACK = Link(
    300 * MICROSECOND,
    0.7 * GB,
    "pcg profile --quick --tp 2, all_reduce: torch 2.13.0+cpu, two cores of an AMD EPYC",
    is_measured=True,
)
# A socket of an Intel Xeon Platinum 8480+: cores · base clock.
_CYCLES_PER_S = 56 * 2.0e9
CPU = DeviceSheet(
    product_flops_per_s={
        "bf16": _CYCLES_PER_S * 1_024,
        "f32": _CYCLES_PER_S * 64,
        "f64": _CYCLES_PER_S * 32,
    },
    vector_flops_per_s={"f32": _CYCLES_PER_S * 64, "f64": _CYCLES_PER_S * 32},
    memory_bytes_per_s=8 * 4_800e6 * 8,
    launch_s=1.5 * MICROSECOND,
    links={"gloo loopback": GLOO_LOOPBACK},
    source="Intel ARK, Xeon Platinum 8480+: 56 cores, 2.0 GHz base, 8 channels of DDR5-4800 of 8 "
    "bytes; a core's operations in a cycle: AMX 1,024 on bf16, AVX-512 with two units of multiply "
    "and add 64 in fp32 and 32 in fp64 (Intel 64 and IA-32 Optimization Reference Manual)",
    launch_source="an addition of 8 numbers: torch 2.13.0+cpu, one thread of an AMD EPYC",
)
"""A server's socket, for models split over CPUs."""


@dataclass(frozen=True)
class Accelerator:
    """A kind of accelerator, with the total memory that the driver reports."""

    name: str
    memory_bytes: int
    sheet: DeviceSheet
    drivers: tuple[str, ...]


def _accelerators() -> dict[str, Accelerator]:
    """Read the GPUs of accelerators.toml, which explains its fields."""
    text = Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
    table: dict[str, dict[str, dict[str, Any]]] = tomllib.loads(text)
    links = {}
    for key, link in table["links"].items():
        step_us, both_ways = link["step_us"], link["gb_per_s"]
        source = f"NCCL src/graph/tuning.cc, hwLat of Ring/Simple: {step_us} µs; {link['source']} "
        links[key] = Link(
            step_us * MICROSECOND,
            both_ways * GB / 2,
            f"{source}{both_ways} GB/s",
            ranks=link.get("ranks", 8),
        )
    networks = {}
    for key, network in table["networks"].items():
        gbit, text = network["gbit_per_s"], "NCCL src/graph/tuning.cc, hwLat of NET Ring/Simple: "
        source = f"{text}14 µs; {network['source']}: {gbit:,.0f} Gbit/s for 8 GPUs"
        networks[key] = Link(14 * MICROSECOND, gbit * 1e9 / 8 / 8, source, ranks=2**20)
    gpus = {}
    for name, gpu in table["devices"].items():
        half, fp32 = gpu["half_tflops"] * TERA, gpu["fp32_tflops"] * TERA
        products = {"bf16": half if gpu.get("has_bf16", True) else fp32, "f16": half, "f32": fp32}
        vectors = {"f32": fp32}
        if "fp64_tflops" in gpu:
            products["f64"], vectors["f64"] = (number * TERA for number in gpu["fp64_tflops"])
        sheet = DeviceSheet(
            products,
            vectors,
            gpu["memory_gb_per_s"] * GB,
            launch_s=3.8 * MICROSECOND,
            links={table["links"][key]["name"]: links[key] for key in gpu["links"]},
            source=gpu["source"],
            launch_source="NVIDIA, Getting Started with CUDA Graphs (2019): 3.8 µs a kernel, small "
            "ones launched one behind the other",
            network=networks[gpu["network"]],
        )
        gpus[name] = Accelerator(name, gpu["memory_mib"] * 2**20, sheet, tuple(gpu["drivers"]))
    return gpus


ACCELERATORS: Mapping[str, Accelerator] = _accelerators()
SHEETS: Mapping[str, DeviceSheet] = {
    **{name: accelerator.sheet for name, accelerator in ACCELERATORS.items()},
    "CPU": CPU,
}
"""Data sheets by the names of devices."""
RESERVED_BYTES = 2**30
"""Free memory of a device, for the CUDA context, libraries' workspaces and fragmentation."""


def of_driver(called: str) -> Accelerator | None:
    """Return the accelerator with a driver's name; None without a sheet, as for a part of a GPU."""
    words = called.split(maxsplit=1)
    if words[0] in ("AMD", "NVIDIA", "Tesla") and len(words) > 1:
        called = words[1]
    return next((gpu for gpu in ACCELERATORS.values() if called in gpu.drivers), None)


def find_accelerator(name: str) -> Accelerator:
    """Return an accelerator by its case-insensitive name; UnsupportedError lists the names."""
    known = known_name(name, ACCELERATORS)
    if known is not None:
        return ACCELERATORS[known]
    longer = [known for known in ACCELERATORS if name and known.startswith(name.upper())]
    close = longer or get_close_matches(name.upper(), ACCELERATORS, 1)
    hint = f"; did you mean {' or '.join(close)}?" if close else "."
    raise UnsupportedError(f"no GPU is known as {name!r}{hint} Known are {', '.join(ACCELERATORS)}")


def known_name(name: str, among: Iterable[str]) -> str | None:
    """Return the known spelling of a case-insensitive name, or None."""
    return next((known for known in among if known.lower() == name.lower()), None)
