"""The data sheets of accelerators: peaks, memory, links between ranks, and driver names.

Numbers are those of the vendor, each with its source. A value that no vendor gives is an
assumption, and named so: a PCIe card's server has eight of them, and 100 Gbit/s between servers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches

from pcg.errors import UnsupportedError

# ------------------------------------------------------------------------------------- device sheet


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
        product_flops_per_s: peaks of dense matrix products by dtype; fp32 without TF32, as in
            PyTorch's default.
        vector_flops_per_s: peaks of other arithmetic by dtype; half precision and integers as f32.
        memory_bytes_per_s: bandwidth of the device's memory.
        launch_s: time added by the launch of each operator.
        links: links within a node by name; the first is the device's own.
        source: source of the peaks and the bandwidth.
        network: the link between nodes, with one rank's part of its node's bandwidth; None for one
            node.
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
    """The link of a ring of `degree` ranks.

    Within `near`'s ranks it is `near`; else the first of the sheet's links with enough ranks on one
    node. Over nodes, a ring enters and leaves each of them once: its latency is the mean of its
    steps, within nodes and between them. Rings begin at all ranks of a node, each over its own
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


_LAUNCH_SOURCE = (
    "NVIDIA, Getting Started with CUDA Graphs (2019): 3.8 µs a kernel, small ones launched one "
    "behind the other"
)


def _link(step_us: float, gb_per_s: float, name: str, ranks: int = 8) -> Link:
    """A link of a data sheet, which gives the sum of both directions.

    Its latency is that of a step of a ring in NCCL's Simple protocol.
    """
    source = f"NCCL src/graph/tuning.cc, hwLat of Ring/Simple: {step_us} µs; {name} "
    return Link(step_us * MICROSECOND, gb_per_s * GB / 2, f"{source}{gb_per_s} GB/s", ranks=ranks)


def _network(gbit_per_s: float, ranks: int, name: str) -> Link:
    """A node's network, which its ranks share."""
    source = "NCCL src/graph/tuning.cc, hwLat of NET Ring/Simple: 14 µs; "
    share = gbit_per_s * 1e9 / 8 / ranks
    text = f"{source}{name}: {gbit_per_s:,.0f} Gbit/s for {ranks} GPUs"
    return Link(14 * MICROSECOND, share, text, ranks=2**20)


def _nvlink(gb_per_s: int, sheet: str, ranks: int = 8) -> Link:
    return _link(3.4, gb_per_s, f"NVIDIA {sheet}: NVLink", ranks)


def _pcie(gb_per_s: int, sheet: str) -> Link:
    return _link(5.7, gb_per_s, f"NVIDIA {sheet}: PCIe")


PCIE_3 = _pcie(32, "T4 data sheet")
PCIE_4 = _pcie(64, "A100 data sheet")
PCIE_5 = _pcie(128, "H100 data sheet")
GLOO_LOOPBACK = Link(
    300 * MICROSECOND,
    0.7 * GB,
    "pcg profile --quick --tp 2, all_reduce: torch 2.13.0+cpu, two cores of an AMD EPYC",
    is_measured=True,
)
_HDR = _network(8 * 200, 8, "DGX A100 data sheet, eight ConnectX-6")
_NDR = _network(8 * 400, 8, "DGX H100, H200 and B200 data sheets, eight ConnectX-7")
_SERVER = _network(100, 8, "an assumption for servers of PCIe cards")
_PCIE_CARDS = {"PCIe 4": PCIE_4}


def _gpu(
    half_tflops: float,
    fp32_tflops: float,
    memory_gb_per_s: float,
    links: Mapping[str, Link],
    source: str,
    fp64_tflops: tuple[float, float] | None = None,
    network: Link = _SERVER,
) -> DeviceSheet:
    """A GPU's data sheet.

    Peaks are those of dense bf16 and fp16 on tensor cores, of fp32 without them, and of fp64 on
    tensor cores and without, if the data sheet has them.
    """
    half, fp32 = half_tflops * TERA, fp32_tflops * TERA
    products = {"bf16": half, "f16": half, "f32": fp32}
    vectors = {"f32": fp32}
    if fp64_tflops is not None:
        products["f64"], vectors["f64"] = (number * TERA for number in fp64_tflops)
    return DeviceSheet(
        products,
        vectors,
        memory_gb_per_s * GB,
        launch_s=3.8 * MICROSECOND,
        links=links,
        source=source,
        launch_source=_LAUNCH_SOURCE,
        network=network,
    )


def _without_bf16(sheet: DeviceSheet) -> DeviceSheet:
    """A GPU with tensor cores for fp16 alone: bf16 is computed in fp32."""
    products = {**sheet.product_flops_per_s, "bf16": sheet.product_flops_per_s["f32"]}
    return replace(sheet, product_flops_per_s=products)


def _a100(memory_gb_per_s: float, memory: str, is_sxm: bool = True) -> DeviceSheet:
    source = (
        f"NVIDIA A100 data sheet, {'SXM' if is_sxm else 'PCIe'}: BF16 Tensor Core 312 TFLOPS, FP32 "
        f"19.5, FP64 9.7, FP64 Tensor Core 19.5; {memory}"
    )
    links = {"NVLink 3": _nvlink(600, "A100 data sheet"), "PCIe 4": PCIE_4}
    if not is_sxm:
        bridge = _nvlink(600, "A100 data sheet, bridge of two GPUs", ranks=2)
        links = {"PCIe 4": PCIE_4, "NVLink 3 bridge": bridge}
    network = _HDR if is_sxm else _SERVER
    return _gpu(312, 19.5, memory_gb_per_s, links, source, (19.5, 9.7), network)


def _hopper(memory_gb_per_s: float, name: str, memory: str) -> DeviceSheet:
    source = (
        f"NVIDIA {name} data sheet, SXM: BF16 Tensor Core 1,979 teraFLOPS with sparsity, half of "
        f"it dense, FP32 67, FP64 34, FP64 Tensor Core 67; {memory}"
    )
    links = {"NVLink 4": _nvlink(900, "H100 data sheet"), "PCIe 5": PCIE_5}
    return _gpu(1_979 / 2, 67, memory_gb_per_s, links, source, (67, 34), _NDR)


_H100_PCIE = _gpu(
    1_513 / 2,
    51,
    2_000,
    {
        "PCIe 5": PCIE_5,
        "NVLink 4 bridge": _nvlink(600, "H100 PCIe data sheet, bridge of two GPUs", ranks=2),
    },
    "NVIDIA H100 data sheet, PCIe: BFLOAT16 Tensor Core 1,513 teraFLOPS with sparsity, half of it "
    "dense, FP32 51, FP64 26, FP64 Tensor Core 51; 2 TB/s",
    (51, 26),
)
_H100_NVL = _gpu(
    1_671 / 2,
    60,
    3_900,
    {
        "NVLink 4 bridge": _nvlink(600, "H100 NVL data sheet, bridge of two GPUs", ranks=2),
        "PCIe 5": PCIE_5,
    },
    "NVIDIA H100 data sheet, NVL: BFLOAT16 Tensor Core 1,671 teraFLOPS with sparsity, half of it "
    "dense, FP32 60, FP64 30, FP64 Tensor Core 60; 3.9 TB/s",
    (60, 30),
)
_B200 = _gpu(
    4_500 / 2,
    80,
    8_000,
    {
        "NVLink 5": _nvlink(1_800, "HGX B200 data sheet"),
        "PCIe 5": _pcie(128, "DGX B200 user guide"),
    },
    "NVIDIA HGX B200 and DGX B200 data sheets, one of eight GPUs: FP16/BF16 Tensor Core 4.5 PFLOPS "
    "with sparsity, half of it dense, FP32 80 TFLOPS, FP64 and FP64 Tensor Core 40; 8 TB/s",
    (40, 40),
    _NDR,
)
_MI300X = _gpu(
    1_307.4,
    163.4,
    5_300,
    {
        "Infinity Fabric": _link(
            3.4, 896, "an assumption, that of NVLink; AMD MI300X data sheet: seven links, together"
        ),
        "PCIe 5": _link(5.7, 128, "AMD MI300X data sheet: PCIe 5 x16"),
    },
    "AMD Instinct MI300X data sheet: bfloat16 1,307.4 TFLOPS, FP32 163.4, FP64 81.7, FP64 Matrix "
    "163.4; 5.3 TB/s",
    (163.4, 81.7),
    _network(8 * 400, 8, "Microsoft ND MI300X v5, eight ConnectX-7"),
)
_V100 = _gpu(
    125,
    15.7,
    900,
    {"NVLink 2": _nvlink(300, "V100 data sheet"), "PCIe 3": PCIE_3},
    "NVIDIA V100 data sheet, SXM2: Tensor Performance 125 TFLOPS (FP16), FP32 15.7, FP64 7.8; 900 "
    "GB/s; no BF16 on tensor cores",
    (7.8, 7.8),
    _network(100, 8, "Amazon EC2 p3dn.24xlarge"),
)
_T4 = _gpu(
    65,
    8.1,
    320,
    {"PCIe 3": PCIE_3},
    "NVIDIA T4 data sheet: mixed precision (FP16/FP32) 65 TFLOPS, FP32 8.1, 320 GB/s; no BF16 on "
    "tensor cores",
    network=_network(100, 8, "Amazon EC2 g4dn.metal"),
)

# One socket of an Intel Xeon Platinum 8480+: cores · base clock.
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
"""A server's socket, for models that are split over CPUs."""

SHEETS: Mapping[str, DeviceSheet] = {
    "A10": _gpu(
        250 / 2,
        31.2,
        600,
        _PCIE_CARDS,
        "NVIDIA A10 data sheet: BFLOAT16 Tensor Core 125 TF, FP32 31.2 TF, 600 GB/s",
    ),
    "A10G": _gpu(
        70,
        31.52,
        600,
        _PCIE_CARDS,
        "NVIDIA A10G data sheet (for AWS): BF16 Tensor Core 70 TF, FP32 31.52 TF, 600 GB/s",
        network=_network(100, 8, "Amazon EC2 g5.48xlarge"),
    ),
    "A100-40": _a100(1_555, "40 GB HBM2: 1,555 GB/s"),
    "A100-40-PCIE": _a100(1_555, "40 GB HBM2: 1,555 GB/s", is_sxm=False),
    "A100-80": _a100(2_039, "80 GB HBM2e: 2,039 GB/s"),
    "A100-80-PCIE": _a100(1_935, "80 GB HBM2e: 1,935 GB/s", is_sxm=False),
    "A6000": _gpu(
        309.7 / 2,
        38.7,
        768,
        _PCIE_CARDS,
        "NVIDIA RTX A6000 data sheet: Tensor performance 309.7 TFLOPS with sparsity, half of it "
        "dense, single precision 38.7; 768 GB/s",
    ),
    "B200": _B200,
    "H100": _hopper(3_350, "H100", "3.35 TB/s"),
    "H100-NVL": _H100_NVL,
    "H100-PCIE": _H100_PCIE,
    "H200": _hopper(4_800, "H200", "4.8 TB/s"),
    "L4": _gpu(
        242 / 2,
        30.3,
        300,
        _PCIE_CARDS,
        "NVIDIA L4 data sheet: BFLOAT16 Tensor Core 242 TFLOPS with sparsity, half of it dense, "
        "FP32 30.3, 300 GB/s",
        network=_network(100, 8, "Amazon EC2 g6.48xlarge"),
    ),
    "L40S": _gpu(
        362.05,
        91.6,
        864,
        _PCIE_CARDS,
        "NVIDIA L40S data sheet: BFLOAT16 Tensor Core 362.05 TFLOPS, FP32 91.6, 864 GB/s",
        network=_network(400, 8, "Amazon EC2 g6e.48xlarge"),
    ),
    "MI300X": _MI300X,
    "RTX-3090": _gpu(
        71,
        35.6,
        936,
        _PCIE_CARDS,
        "NVIDIA Ampere GA102 whitepaper, GeForce RTX 3090: BF16 Tensor 71 TFLOPS, FP32 35.6; 936 "
        "GB/s",
    ),
    "RTX-4090": _gpu(
        165.2,
        82.6,
        1_008,
        _PCIE_CARDS,
        "NVIDIA Ada whitepaper, GeForce RTX 4090: BF16 Tensor 165.2 TFLOPS, FP32 82.6; 1,008 GB/s",
    ),
    "T4": _without_bf16(_T4),
    "V100-32": _without_bf16(_V100),
    "CPU": CPU,
}
"""Data sheets by the names of devices."""
# ------------------------------------------------------------------------------------- accelerators


MIB = 2**20


@dataclass(frozen=True)
class Accelerator:
    """One kind of accelerator, with the total of memory that the driver reports."""

    name: str
    memory_bytes: int
    sheet: DeviceSheet


RESERVED_BYTES = 2**30
"""Memory left free on a device, for the CUDA context, libraries' workspaces and fragmentation."""

# Totals as nvidia-smi (rocm-smi) reports them, in MiB; with ECC where it is on by default.
_TOTALS_MIB = {
    "A10": 23_028,
    "A10G": 23_028,
    "A100-40": 40_960,
    "A100-40-PCIE": 40_960,
    "A100-80": 81_920,
    "A100-80-PCIE": 81_920,
    "A6000": 49_140,
    "B200": 183_359,
    "H100": 81_559,
    "H100-NVL": 95_830,
    "H100-PCIE": 81_559,
    "H200": 143_771,
    "L4": 23_034,
    "L40S": 46_068,
    "MI300X": 196_592,
    "RTX-3090": 24_576,
    "RTX-4090": 24_564,
    "T4": 15_360,
    "V100-32": 32_768,
}
ACCELERATORS: Mapping[str, Accelerator] = {
    name: Accelerator(name, total * MIB, SHEETS[name]) for name, total in _TOTALS_MIB.items()
}

_BY_DRIVER = {
    "A10": "A10",
    "A10G": "A10G",
    "A100-SXM4-40GB": "A100-40",
    "A100-PCIE-40GB": "A100-40-PCIE",
    "A100-SXM4-80GB": "A100-80",
    "A100 80GB PCIe": "A100-80-PCIE",
    "RTX A6000": "A6000",
    "B200": "B200",
    "H100 80GB HBM3": "H100",
    "H100 NVL": "H100-NVL",
    "H100 PCIe": "H100-PCIE",
    "H200": "H200",
    "L4": "L4",
    "L40S": "L40S",
    "Instinct MI300X": "MI300X",
    "Instinct MI300X OAM": "MI300X",
    "GeForce RTX 3090": "RTX-3090",
    "GeForce RTX 4090": "RTX-4090",
    "T4": "T4",
    "V100-SXM2-32GB": "V100-32",
}
"""Accelerators by the names that drivers give them, without the vendor's."""


def of_driver(called: str) -> Accelerator | None:
    """The accelerator with a driver's name; None without a sheet, as for a part of a GPU."""
    words = called.split(maxsplit=1)
    if words[0] in ("AMD", "NVIDIA", "Tesla") and len(words) > 1:
        called = words[1]
    name = _BY_DRIVER.get(called)
    return None if name is None else ACCELERATORS[name]


def find_accelerator(name: str) -> Accelerator:
    """The accelerator of a name in any case. UnsupportedError: unknown; lists the names."""
    known = known_name(name, ACCELERATORS)
    if known is not None:
        return ACCELERATORS[known]
    longer = [known for known in ACCELERATORS if name and known.startswith(name.upper())]
    close = longer or get_close_matches(name.upper(), ACCELERATORS, 1)
    hint = f"; did you mean {' or '.join(close)}?" if close else "."
    raise UnsupportedError(f"no GPU is known as {name!r}{hint} Known are {', '.join(ACCELERATORS)}")


def known_name(name: str, among: Iterable[str]) -> str | None:
    """The known spelling of a name in any case, or None."""
    return next((known for known in among if known.lower() == name.lower()), None)
