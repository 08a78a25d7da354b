"""Accelerators by name: their memory, and the numbers of their data sheets.

A sheet's numbers are those of the vendor, each with its source; the share of them that programs
achieve is an assumption of ours, kept apart (`ASSUMED`). Accelerators without a sheet have a memory
that programs can be fit to, but no cost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from pcg.errors import UnsupportedError

MIB = 2**20
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
    """

    latency_s: float
    bytes_per_s: float
    source: str
    is_measured: bool = False


@dataclass(frozen=True)
class DeviceSheet:
    """The peaks of a device.

    Attributes:
        product_flops_per_s: peaks of dense matrix products by dtype; fp32 without TF32, as
            PyTorch's default is.
        vector_flops_per_s: peaks of other arithmetic by dtype; half precision and integers as f32.
        memory_bytes_per_s: bandwidth of the device's memory.
        launch_s: time that the launch of each operator adds.
        links: links by name; the first is the device's own.
        source: source of the peaks and the bandwidth.
        launch_source: source of `launch_s`.
    """

    product_flops_per_s: Mapping[str, float]
    vector_flops_per_s: Mapping[str, float]
    memory_bytes_per_s: float
    launch_s: float
    links: Mapping[str, Link]
    source: str
    launch_source: str


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


@dataclass(frozen=True)
class Accelerator:
    """One kind of accelerator, with the total of memory that the driver reports."""

    name: str
    memory_bytes: int
    sheet: DeviceSheet | None = None


RESERVED_BYTES = 2**30
"""Memory left free on a device, for the CUDA context, libraries' workspaces and fragmentation."""


def _link(step_us: float, gb_per_s: int, name: str) -> Link:
    """A link of a data sheet, which gives both directions together.

    Its latency is that of a step of a ring in NCCL's Simple protocol.
    """
    source = f"NCCL src/graph/tuning.cc, hwLat of Ring/Simple: {step_us} µs; NVIDIA {name} "
    return Link(step_us * MICROSECOND, gb_per_s * GB / 2, f"{source}{gb_per_s} GB/s")


NVLINK_3 = _link(3.4, 600, "A100 data sheet: NVLink")
NVLINK_4 = _link(3.4, 900, "H100 data sheet: NVLink")
PCIE_4 = _link(5.7, 64, "A100 data sheet: PCIe")
PCIE_5 = _link(5.7, 128, "H100 data sheet: PCIe")
GLOO_LOOPBACK = Link(
    300 * MICROSECOND,
    0.7 * GB,
    "pcg profile --quick --tp 2, all_reduce: torch 2.13.0+cpu, two cores of an AMD EPYC",
    is_measured=True,
)


def _gpu(
    half_tflops: float,
    fp32_tflops: float,
    memory_gb_per_s: float,
    links: Mapping[str, Link],
    source: str,
    fp64_tflops: tuple[float, float] | None = None,
) -> DeviceSheet:
    """A GPU's data sheet.

    Peaks are those of dense bf16 and fp16 on tensor cores, of fp32 without them, and of fp64 on
    tensor cores and without, where the data sheet has them.
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
        3.8 * MICROSECOND,
        links,
        source,
        "NVIDIA, Getting Started with CUDA Graphs (2019): 3.8 µs a kernel, small ones launched one "
        "behind the other",
    )


def _a100(memory_gb_per_s: float, memory: str) -> DeviceSheet:
    source = (
        "NVIDIA A100 data sheet, SXM: BF16 Tensor Core 312 TFLOPS, FP32 19.5, FP64 9.7, FP64 "
        f"Tensor Core 19.5; {memory}"
    )
    links = {"NVLink 3": NVLINK_3, "PCIe 4": PCIE_4}
    return _gpu(312, 19.5, memory_gb_per_s, links, source, (19.5, 9.7))


def _hopper(memory_gb_per_s: float, name: str, memory: str) -> DeviceSheet:
    source = (
        f"NVIDIA {name} data sheet, SXM: BF16 Tensor Core 1,979 teraFLOPS with sparsity, half of "
        f"it dense, FP32 67, FP64 34, FP64 Tensor Core 67; {memory}"
    )
    links = {"NVLink 4": NVLINK_4, "PCIe 5": PCIE_5}
    return _gpu(1_979 / 2, 67, memory_gb_per_s, links, source, (67, 34))


_A10G = "NVIDIA A10G data sheet (for AWS): BF16 Tensor Core 70 TF, FP32 31.52 TF, 600 GB/s"
_L40S = "NVIDIA L40S data sheet: BFLOAT16 Tensor Core 362.05 TFLOPS, FP32 91.6, 864 GB/s"
_SHEETS = {
    "A10G": _gpu(70, 31.52, 600, {"PCIe 4": PCIE_4}, _A10G),
    "A100-40": _a100(1_555, "40 GB HBM2: 1,555 GB/s"),
    "A100-80": _a100(2_039, "80 GB HBM2e: 2,039 GB/s"),
    "H100": _hopper(3_350, "H100", "3.35 TB/s"),
    "H200": _hopper(4_800, "H200", "4.8 TB/s"),
    "L40S": _gpu(362.05, 91.6, 864, {"PCIe 4": PCIE_4}, _L40S),
}

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

# Totals as nvidia-smi (rocm-smi) reports them, in MiB; with ECC where it is on by default.
_TOTALS_MIB = {
    "A10G": 23_028,
    "A100-40": 40_960,
    "A100-80": 81_920,
    "A6000": 49_140,
    "B200": 183_359,
    "H100": 81_559,
    "H100-NVL": 95_830,
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
    name: Accelerator(name, total * MIB, _SHEETS.get(name)) for name, total in _TOTALS_MIB.items()
}

SHEETS: Mapping[str, DeviceSheet] = {
    **{name: one.sheet for name, one in ACCELERATORS.items() if one.sheet is not None},
    "CPU": CPU,
}
"""Data sheets by name; accelerators that are known by their memory alone have none."""


def find_accelerator(name: str) -> Accelerator:
    """The accelerator of a name, which may be in any case.

    Raises:
        UnsupportedError: pcg knows none of that name; lists them.
    """
    known = known_name(name, ACCELERATORS)
    if known is not None:
        return ACCELERATORS[known]
    longer = [known for known in ACCELERATORS if name and known.startswith(name.upper())]
    close = longer or get_close_matches(name.upper(), ACCELERATORS, 1)
    hint = f"; did you mean {' or '.join(close)}?" if close else "."
    raise UnsupportedError(f"no GPU is known as {name!r}{hint} Known are {', '.join(ACCELERATORS)}")


def known_name(name: str, among: Iterable[str]) -> str | None:
    """A known name as it is written, in whatever case it was asked for."""
    return next((known for known in among if known.lower() == name.lower()), None)
